"""The timeline of a run's ranks: a list of events that a trace viewer reads, through kills and
resumptions.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ragen_mega.report.metrics import Metrics
from ragen_mega.report.timeline import TIMELINE, append_spans, drop_spans
from ragen_mega.run.timers import Timers


def events(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def test_every_rank_has_a_row_and_steps_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / TIMELINE
    first = [("rollout", 100.0, 2.0), ("sync", 100.5, 0.25)]
    append_spans(path, 0, [first, [("rollout", 100.0, 1.0)]])
    append_spans(path, 1, [[("update", 103.0, 0.5)], []])
    append_spans(path, 2, [[], []])
    names = [event for event in events(path) if event["ph"] == "M"]
    assert [(one["tid"], one["args"]["name"]) for one in names] == [(0, "rank 0"), (1, "rank 1")]
    done = [event for event in events(path) if event["ph"] == "X"]
    assert [(one["tid"], one["name"], one["args"]["step"]) for one in done] == [
        (0, "rollout", 0), (0, "sync", 0), (1, "rollout", 0), (0, "update", 1),
    ]  # fmt: skip
    assert (done[1]["ts"], done[1]["dur"]) == (100_500_000, 250_000)  # microseconds


def test_a_resumed_run_writes_its_steps_again_after_what_a_kill_left(tmp_path: Path) -> None:
    path = tmp_path / TIMELINE
    drop_spans(path, 1)
    assert not path.exists()
    for step in range(3):
        append_spans(path, step, [[("update", 10.0 + step, 1.0)]])
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("dur")])
    drop_spans(path, 1)
    append_spans(path, 1, [[("update", 20.0, 1.0)]])
    steps = [event["args"].get("step") for event in events(path)]
    assert steps == [None, 0, 1] and events(path)[-1]["ts"] == 20_000_000


@pytest.mark.parametrize("left", [0, 1, 3, 4, 30, 300])
@pytest.mark.parametrize("step", range(6))
def test_a_resumed_run_keeps_the_events_before_its_step_and_writes_nothing_else(
    tmp_path: Path, step: int, left: int
) -> None:
    """Of step 3 there is none; a kill may have cut off the last bytes of the file."""
    path = tmp_path / TIMELINE
    for at in (0, 1, 2, 4):
        append_spans(path, at, [[("rollout", at, 1.0), ("update", at + 0.5, 0.5)]] * 2)
    content = path.read_bytes()[: path.stat().st_size - left]
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    kept = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):  # of brackets and of what was cut
            event = json.loads(line.removesuffix(","))
            kept += [event] if event["args"].get("step", -1) < step else []
    drop_spans(path, step)
    assert events(path) == kept
    assert (path.stat().st_mtime_ns == 1) == (path.read_bytes() == content)
    append_spans(path, 4, [[("rollout", 4.0, 1.0)]])
    assert len(events(path)) == len(kept) + 1


def test_what_is_timed_is_on_the_timeline_and_what_is_not_counted_costs_no_metric() -> None:
    timers, metrics, later = Timers(), Metrics(), Metrics()
    timers.begin(0)  # forgets waits of tests before
    with timers.timed("rollout"), timers.timed("sync"):
        pass
    timers.close_step(metrics)
    with timers.timeline_only("evaluation"), timers.timed("handover"):
        pass
    spans = timers.take_spans()
    assert [name for name, _, _ in spans] == ["sync", "rollout", "handover", "evaluation"]
    assert timers.take_spans() == []
    timers.close_step(later)
    assert "time/rollout" in metrics.result() and later.result() == {"time/step": 0.0}


def test_the_checkpoint_between_two_steps_is_no_part_of_the_second_ones_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timers, metrics = Timers(), Metrics()
    timers.begin(0)
    timers.close_step(Metrics())
    with timers.timed("checkpoint"):
        now[0] += 0.25
    timers.begin(1)
    assert not any(timers.usage().seconds.values())
    timers.close_step(metrics)
    assert metrics.result()["time/checkpoint"] == 0.25
