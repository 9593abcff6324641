"""The data of a step (completions, trajectories, token batches) and its exchange among ranks."""
