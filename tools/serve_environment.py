"""`ragen-mega serve-environment`: an environment for OpenEnv clients."""

from ragen_mega.commands.serve_environment import main

if __name__ == "__main__":
    main()
