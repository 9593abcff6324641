"""Sokoban: rooms, world, exact players, the original's validation boards."""
