"""`ragen-mega webshop-players`: score of WebShop's reference players."""

from ragen_mega.commands.webshop_players import main

if __name__ == "__main__":
    main()
