"""Runs without --load: a small model that has seen scripted play."""
