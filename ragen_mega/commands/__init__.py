"""The program `ragen-mega`: one module for each command, and what they share."""
