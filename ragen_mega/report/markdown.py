"""Tables in Markdown, and a title that several have."""

from collections.abc import Iterable, Sequence

MINUTES = "minutes without warm start"
"""Title of the time of a run. A warm start that several runs share is made by one of them alone."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the table in Markdown; a bar in a cell stays in the cell."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
