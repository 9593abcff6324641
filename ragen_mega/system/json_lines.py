"""Files of JSON lines: one object a line."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with the numbers of their lines. Raises OSError, and ValueError,
    in one line, for bytes that are no UTF-8 and a line that holds no object or a key twice.
    """
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {number} must be UTF-8 ({error}); save it so") from None
    # By line feeds alone, for texts of JSON may hold what else `splitlines` takes for an end.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row, problem = json.loads(line, object_pairs_hook=distinct), ""
        except (ValueError, RecursionError) as error:
            row, problem = None, f" ({error})"
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number} must be a JSON object, not"
                f" {line[:40]!r}{problem}; write one object a line"
            )
        yield number, row


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, which Python would read without the first of two equal keys. Raises
    ValueError for such keys.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is in it twice")
    return found
