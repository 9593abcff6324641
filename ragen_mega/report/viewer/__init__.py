"""One page that shows what agents did and how they learned: its data, a file, a live server."""

MOST_MEGABYTES = 15.0
"""Size of the file above which trajectories are left out."""
MOST_NUMBERS = 400_000
"""Numbers of metrics in all runs of a page above which curves leave out steps; 4 MB."""
