"""Output of a run: metrics, files of a run directory, the console."""
