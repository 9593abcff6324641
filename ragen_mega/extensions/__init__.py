"""The names that users extend, and the packages that they may install."""
