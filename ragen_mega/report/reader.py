"""The files of a run as plain objects: settings, metrics, events, conversations, rollouts."""

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_mega.config.recorded import read_json, read_object, read_recorded
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.report.metrics import EVENTS_FILE, METRICS_FILE, SUMMARY_FILE, read_metrics
from ragen_mega.report.traces import TRACES, traces
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run so far."""

    directory: Path
    config: dict[str, Any]
    """Section -> name -> value of the settings, and their provenance."""
    summary: dict[str, Any] | None
    """The final results; None while the run trains."""
    metrics: list[dict[str, Any]]
    """One row of numbers for each step, with `step`: `pandas.DataFrame(run.metrics)`."""
    events: list[dict[str, Any]]
    """Notes about steps: warnings, errors of environments, rollbacks."""

    def episodes(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the episodes of the traces, in order of the steps: of training (`kind` "step"), of
        evaluations ("eval"), or both.

        An episode has kind, step, environment, group, seed, kept (whether it was trained on),
        reward, success, ended ("terminated", or the limit that cut it: "truncated" in a trace that
        does not name it), and turns. A turn has prompt (what came before its answer, since the last
        one), answer, reward and info; for an agent info["call"] has the messages that are new.
        """
        for path, its_kind, step, _ in traces(self.directory / TRACES):
            if kind not in (None, its_kind):
                continue
            trace = read_json(gzip.decompress(path.read_bytes()).decode())
            for group in trace["groups"]:
                about = {"kind": its_kind, "step": step, "environment": group["environment"]}
                about |= {"group": group["id"], "seed": group["seed"]}
                for member in group["members"]:
                    # traces of before have no limit by its name
                    limit = member.get("truncated_by", member["truncated"] and "truncated")
                    yield about | {
                        "kept": member.get("kept", group["kept"]),  # traces of before lack it
                        "reward": member["reward"],
                        "success": member["success"],
                        "ended": limit or "terminated",
                        "turns": _turns(member, trace["strings"]),
                    }

    def rollout(self, step: int) -> list[TrajectoryGroup]:
        """Return all groups of a step, with token ids and log-probabilities. Raises
        FileNotFoundError for a step whose rollout is not kept (`--keep-rollouts 0` keeps all), and
        ValueError for a damaged file.
        """
        store = RolloutStore(self.directory / ROLLOUTS)
        if step not in (kept := store.steps()):
            there = f"those of {kept[0]} to {kept[-1]}" if kept else "none"
            raise FileNotFoundError(
                f"{self.directory} holds no rollout of step {step}, and {there}; train with"
                " --keep-rollouts 0 to keep all"
            )
        return store.read(step).groups


def read_run(directory: Path | str) -> RecordedRun:
    """Read a run directory; the run may go on meanwhile.

        >>> run = read_run("runs/quick")
        >>> [row["step"] for row in run.metrics], next(run.episodes("step"))["environment"]
        ([0], 'bandit')

    Raises ValueError, in one line, if the directory holds no run or a damaged one.
    """
    directory = Path(directory)
    config = read_recorded(directory)
    rows = [
        read_metrics(directory / name) if (directory / name).exists() else []
        for name in (METRICS_FILE, EVENTS_FILE)
    ]
    done = directory / SUMMARY_FILE
    return RecordedRun(directory, config, read_object(done) if done.exists() else None, *rows)


def _turns(member: Mapping[str, Any], strings: Sequence[str]) -> list[dict[str, Any]]:
    texts = [strings[token] for token in member["tokens"]]
    found, before = [], 0
    for turn in member["turns"]:
        found.append(
            {
                "prompt": "".join(texts[before : turn["start"]]),
                "answer": "".join(texts[turn["start"] : turn["end"]]),
                "reward": turn["reward"],
                "info": turn["info"],
            }
        )
        before = turn["end"]
    return found
