"""`ragen-mega plan` in this process."""

import pytest

from ragen_mega.commands import plan


def run_plan(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Its exit code and all that it printed."""
    try:
        code = plan.main(list(argv)) or 0
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err
