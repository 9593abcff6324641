"""`ragen-mega report`: finished runs as a table, means over seeds, and a plot."""

from ragen_mega.commands.report import main

if __name__ == "__main__":
    main()
