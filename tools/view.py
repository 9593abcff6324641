"""`ragen-mega view`: runs in a browser."""

from ragen_mega.commands.view import main

if __name__ == "__main__":
    main()
