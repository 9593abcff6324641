"""Timers of the phases of a step, and its throughput in tokens."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ragen_mega.ranks.waits import here
from ragen_mega.report.metrics import Metrics, Sum
from ragen_mega.report.timeline import Span
from ragen_mega.run.idleness import Usage, usage


class Timers:
    """Seconds of the parts of a step, tokens of a step, and the totals of a run."""

    def __init__(self) -> None:
        self.totals = Metrics()
        self.sampled_tokens = 0
        """Number of tokens in this step's rollout; 0 if the rollout was read from the disk."""
        self.sampling_seconds: float | None = None
        """Time that other ranks took for sampling, if they did it."""
        self.trained_tokens = 0
        """Positions that the updates of this step went through."""
        self._seconds: dict[str, float] = {}
        self._before: dict[str, float] = {}
        """Seconds of the checkpoint before this step began, which its row has."""
        self._nested = 0.0
        self._spans: list[Span] = []
        self._began = time.monotonic()

    def begin(self, step: int) -> None:
        """Begin to measure how this rank spends its time in a step."""
        here.step, self._began = step, time.monotonic()
        self._before = dict(self._seconds)
        here.seconds.clear()
        here.spans.clear()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a part of the step; its seconds, without the seconds of parts inside it, are logged
        as time/<name>.
        """
        start = time.monotonic()
        outside, self._nested = self._nested, 0.0
        try:
            with here.in_stage(name), self._on_timeline(name):
                yield
        finally:
            elapsed = time.monotonic() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._nested
            self._nested = outside + elapsed

    @contextmanager
    def timeline_only(self, name: str) -> Iterator[None]:
        """Show a span on the timeline; no metric counts it, nor any span timed inside it."""
        counted = dict(self._seconds)
        try:
            with here.in_stage(name), self._on_timeline(name):
                yield
        finally:
            self._seconds = counted

    @contextmanager
    def _on_timeline(self, name: str) -> Iterator[None]:
        """Show a span on the timeline."""
        begin, start = time.time(), time.monotonic()
        try:
            yield
        finally:
            self._spans.append((name, begin, time.monotonic() - start))

    def take_spans(self) -> list[Span]:
        """Return the spans since the last call, waits among them."""
        spans, self._spans, here.spans = self._spans + here.spans, [], []
        return spans

    def usage(self) -> Usage:
        """Return how this rank has spent its time since `begin`."""
        stages = {name: each - self._before.get(name, 0.0) for name, each in self._seconds.items()}
        return usage(stages, here.seconds, time.monotonic() - self._began)

    def close_step(self, metrics: Metrics) -> None:
        """Add the step's seconds and rates to its metrics and begin the next step."""
        seconds = self._seconds
        training = seconds.get("advantages", 0.0) + seconds.get("update", 0.0)
        self.totals.add(
            "total", train_seconds=Sum(training), trained_tokens=Sum(self.trained_tokens)
        )
        if self.sampled_tokens:  # sampling needs the weights, so sending them counts
            here = seconds["rollout"] + seconds.get("sync", 0.0)
            rollout = here if self.sampling_seconds is None else self.sampling_seconds
            self.totals.add(
                "total", rollout_tokens=Sum(self.sampled_tokens), rollout_seconds=Sum(rollout)
            )
            metrics.add("rollout", tokens_per_second=self.sampled_tokens / rollout)
        if self.trained_tokens:
            rate = self.trained_tokens / training
            metrics.add("update", tokens_per_second=rate)
            share = metrics.result().get("actor/computed_share")
            if share is not None:  # else the critic alone was trained
                metrics.add("update", computed_tokens_per_second=share * rate)
        metrics.add("time", seconds, step=sum(seconds.values()))
        self._seconds, self.sampled_tokens, self.trained_tokens = {}, 0, 0
        self.sampling_seconds = None

    def state_dict(self) -> dict[str, float]:
        """Return the totals."""
        return self.totals.result()

    def load_state_dict(self, totals: Mapping[str, float]) -> None:
        """Go on from earlier totals."""
        self.totals.add(
            "total", {key.removeprefix("total/"): Sum(value) for key, value in totals.items()}
        )

    def summary(self) -> dict[str, float]:
        """Return tokens per second over the run."""
        totals = self.totals.result()
        return {
            "rollout_tokens_per_second": _rate(
                totals, "total/rollout_tokens", "total/rollout_seconds"
            ),
            "train_tokens_per_second": _rate(totals, "total/trained_tokens", "total/train_seconds"),
        }


def _rate(totals: Mapping[str, float], amount: str, seconds: str) -> float:
    return totals[amount] / totals[seconds] if totals.get(seconds) else 0.0
