"""`ragen-mega study`: arms and seeds side by side."""

from ragen_mega.commands.study import main

if __name__ == "__main__":
    main()
