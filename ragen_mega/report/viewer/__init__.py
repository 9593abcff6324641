"""One page that shows what agents did and how they learned: its data, a file, a live server."""
