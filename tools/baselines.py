"""`ragen-mega baselines`: success of the random and of the optimal player."""

from ragen_mega.commands.baselines import main

if __name__ == "__main__":
    main()
