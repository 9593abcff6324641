"""A two-armed bandit whose arms differ by the meaning of their names."""
