"""`ragen-mega make-boards`: initial states that no recipe was chosen on."""

from ragen_mega.commands.make_boards import main

if __name__ == "__main__":
    main()
