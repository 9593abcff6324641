"""`ragen-mega evaluate`: success of a run or a model on held-out initial states."""

from ragen_mega.commands.evaluate import main

if __name__ == "__main__":
    main()
