"""WebShop: find and buy a product that fits an instruction, on the pages of a simulated shop."""
