"""The ranks of a job: how they are started, and what they tell each other."""
