"""Pictures of grid worlds as standalone SVG, for light and dark pages."""

from collections.abc import Iterable, Mapping

from ragen_mega.environments.worlds.ways import Cell

SHAPES: Mapping[str, str] = {
    "wall": '<rect width="20" height="20" fill="#5b6472"/>',
    "floor": '<rect width="20" height="20" fill="#f1ece1" stroke="#d8d0bf"/>',
    "ice": '<rect width="20" height="20" fill="#dff1fb" stroke="#b9d9ea"/>',
    "hole": '<circle cx="10" cy="10" r="8" fill="#24405e"/>',
    "target": '<circle cx="10" cy="10" r="5" fill="none" stroke="#c2410c" stroke-width="2.5"/>',
    "goal": '<path d="M6 18V2l10 4-8 4" fill="#16a34a" stroke="#14532d"/>',
    "box": '<rect x="3" y="3" width="14" height="14" rx="2" fill="#c98a3d" stroke="#7c4f17"/>',
    "box on target": '<rect x="3" y="3" width="14" height="14" rx="2" fill="#3f9d57"'
    ' stroke="#14532d"/>',
    "player": '<circle cx="10" cy="10" r="6" fill="#2563eb" stroke="#1e3a8a"/>',
}
"""SVG shapes of the contents of a cell of 20 by 20 units."""


def draw_grid(rows: int, columns: int, things: Iterable[tuple[Cell, str]]) -> str:
    """SVG of a grid with things, named as in SHAPES, in cells (row, column); later ones lie on
    top.
    """
    drawn = "".join(
        f'<g transform="translate({20 * column} {20 * row})">{SHAPES[name]}</g>'
        for (row, column), name in things
    )
    box = f"0 0 {20 * columns} {20 * rows}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{drawn}</svg>'
