"""`ragen-mega convert`: models into Hugging Face's or Megatron's format."""

from ragen_mega.commands.convert_checkpoint import main

if __name__ == "__main__":
    main()
