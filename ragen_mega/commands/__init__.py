"""The program `ragen-mega`: one module for each command, and their shared helpers."""
