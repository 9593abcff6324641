"""`ragen-mega replay`: repeat a step of a run from its files and compare."""

from ragen_mega.commands.replay import main

if __name__ == "__main__":
    main()
