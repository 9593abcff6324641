"""`ragen-mega plan`: seconds, money and memory of a step."""

from ragen_mega.commands.plan import main

if __name__ == "__main__":
    main()
