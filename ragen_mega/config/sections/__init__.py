"""The sections of the configuration: a file for each, with its flags and the rules among them."""
