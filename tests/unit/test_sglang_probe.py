"""Which settings tools/sglang_probe.py settles on when attempts fail."""

from __future__ import annotations

from typing import Any

import pytest

from tools import sglang_probe as probe


@pytest.mark.parametrize(
    ("serving", "starting", "expected", "num_attempts"),
    [
        ({"ipc", "file"}, {"", "--disable-cuda-graph"}, ("ipc", ""), 1),
        ({"file"}, {""}, ("file", ""), 2),
        (
            {"file"},
            {"--disable-cuda-graph"},
            ("file", "--disable-cuda-graph"),
            4,
        ),  # two do not start, and are not tried twice
        (set(), {"", "--disable-prefill-cuda-graph", "--disable-cuda-graph"}, None, 7),
        ({"ipc"}, {"without --enable-memory-saver"}, ("ipc", "without --enable-memory-saver"), 4),
        ({"ipc"}, set(), None, 4),
    ],
)
def test_the_first_that_works_is_taken(
    serving: set[str], starting: set[str], expected: tuple[str, str] | None, num_attempts: int
) -> None:
    reports: list[dict[str, Any]] = []

    def attempt(transfer: str, options: str) -> dict[str, Any]:
        if options not in starting:
            raise probe.NotStarted("the server ended")
        if transfer not in serving:
            raise probe.Failed("the weights did not arrive")
        return {"rollouts": []}

    assert probe.first_that_works(attempt, reports.append) == expected
    assert len(reports) == num_attempts and all(
        "weight_transfer" in report and "options" in report for report in reports
    )
    assert [report["error"] is None for report in reports] == [False] * (
        num_attempts - (expected is not None)
    ) + ([True] if expected else [])
