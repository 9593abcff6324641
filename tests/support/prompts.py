"""Initial states that tests play from."""

from ragen_mega.environments.reference_players import Prompt


def first_seeds(count: int) -> list[Prompt]:
    """Return the prompts of the seeds 0, 1, ..."""
    return [(seed, None) for seed in range(count)]
