"""Words for the way from one cell of a grid to another."""


def way(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return e.g. `2 down and 1 left`; `here` for the same cell. Cells are (row, column)."""
    rows, columns = end[0] - start[0], end[1] - start[1]
    parts = [
        f"{abs(count)} {forward if count > 0 else backward}"
        for count, forward, backward in ((rows, "down", "up"), (columns, "right", "left"))
        if count
    ]
    return " and ".join(parts) or "here"
