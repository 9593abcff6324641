"""`torchrun` for scripts: threads, CPUs beside each GPU, signals, one error line."""

import sys

from ragen_mega.commands.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
