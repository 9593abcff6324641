"""What a run says: metrics, files of a run directory, the console."""
