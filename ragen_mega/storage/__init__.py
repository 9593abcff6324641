"""Files that a crash cannot spoil: checkpoints, model directories, rollouts."""
