"""Playing: from tasks to trajectories with any engine, on all ranks, in training and evaluation."""
