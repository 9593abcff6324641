"""`ragen-mega doctor`: what is installed, what is active, what falls back."""

from ragen_mega.commands.doctor import main

if __name__ == "__main__":
    main()
