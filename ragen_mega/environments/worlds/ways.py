"""The cells of a grid: the distance between two cells, and the way in words."""

Cell = tuple[int, int]
"""Row and column, both from 0 at the top left."""


def distance(first: Cell, second: Cell) -> int:
    """Return the number of moves from one cell to the other where nothing is in the way."""
    return abs(first[0] - second[0]) + abs(first[1] - second[1])


def way(start: Cell, end: Cell) -> str:
    """Return e.g. `2 down and 1 left`; `here` for the same cell."""
    rows, columns = end[0] - start[0], end[1] - start[1]
    parts = [
        f"{abs(count)} {forward if count > 0 else backward}"
        for count, forward, backward in ((rows, "down", "up"), (columns, "right", "left"))
        if count
    ]
    return " and ".join(parts) or "here"
