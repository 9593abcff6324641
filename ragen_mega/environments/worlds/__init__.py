"""The packaged environments, one folder each: world, reference players, boards."""
