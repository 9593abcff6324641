"""What a command says when it refuses its input."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    capsys: pytest.CaptureFixture[str], command: Callable[..., object], *given: Any, **named: Any
) -> str:
    """Call a command, which must end with code 2, print nothing and say one line, and return it."""
    with pytest.raises(SystemExit) as left:
        command(*given, **named)
    out, error = capsys.readouterr()
    assert (left.value.code, out) == (2, ""), error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error
