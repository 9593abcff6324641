"""The numbers of a step while it runs, and what a run writes for people to read."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ragen_mega.config import StarPOConfig
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.environments.reference_players import Prompt
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import Metrics, RunLogger
from ragen_mega.report.timeline import TIMELINE, append_spans, drop_spans
from ragen_mega.report.traces import TRACES, TraceWriter
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.run.timers import Timers

_PROBES = 8
"""Prompts of every evaluation that are kept for the viewer."""


class StepLog(Metrics):
    """The metrics of one step, its timed stages, and the results that its end depends on."""

    def __init__(self, step: int, timers: Timers) -> None:
        super().__init__()
        self.step = step
        self.stage = timers.timed
        """Context manager: the seconds of a part of the step are logged as time/<name>."""
        self.empty: str | None = None
        """The reason why the step trained nothing."""
        self.passes: list[Tensor] = []
        """[T, 2] log-probabilities and entropies of each of the policy's updates."""
        self.success: float | None = None
        """Mean success of an evaluation after this step, but for the last one."""
        self.went_back = False
        """Whether the guard has restored an earlier checkpoint."""


class RunLog:
    """Metrics, events, traces and timeline of a run directory. Methods are collective unless they
    say otherwise.
    """

    def __init__(
        self,
        config: StarPOConfig,
        logger: RunLogger,
        console: Console,
        timers: Timers,
        renderer: ChatRenderer,
    ) -> None:
        self._config, self._console, self._timers = config.logging, console, timers
        self._logger, self._decode = logger, renderer.tokenizer.decode
        self._traces = TraceWriter(
            logger.directory / TRACES,
            lambda ids: str(self._decode(ids)),
            config.environment,
            console.say,
        )

    def begin(self, step: int) -> StepLog:
        """Begin a step. Not collective."""
        self._timers.begin(step)
        return StepLog(step, self._timers)

    def note(self, step: int, text: str) -> None:
        """Report an event of a step, and keep it in events.jsonl. Not collective."""
        self._console.say(f"step {step}: {text}")
        self._logger.note(step, text)

    def repeat_from(self, step: int) -> None:
        """Delete the records of an earlier process about this step and later ones, which come
        again, or never: a run may end there. Raises OSError on all ranks.
        """

        def drop() -> None:
            self._logger.drop_from(step)
            self._traces.drop_from(step)
            drop_spans(self._logger.directory / TIMELINE, step)

        on_main(drop)

    def trace(
        self,
        log: StepLog,
        groups: Sequence[TrajectoryGroup],
        kept: Sequence[TrajectoryGroup] = (),
        batch: TokenBatch | None = None,
    ) -> None:
        """Keep the first groups of a step for the viewer, of which `batch` packs `kept`. Raises
        OSError on all ranks.
        """
        shown = groups[: self._config.trace_groups]
        if not shown:
            return
        with log.stage("rollout_files"):
            on_main(lambda: self._traces.write_step(log.step, shown, kept, batch))

    def trace_evaluation(
        self, step: int, name: str, groups: Sequence[TrajectoryGroup], prompts: Sequence[Prompt]
    ) -> None:
        """Keep one trajectory of each of the first prompts, which are always the same."""
        if not self._config.trace_groups:
            return
        shown = [replace(g, trajectories=g.trajectories[:1]) for g in groups[:_PROBES]]
        boards = [rows for _, rows in prompts[: len(shown)]]
        on_main(lambda: self._traces.write_evaluation(step, name, shown, boards))
        if not collectives.is_main():  # which has the tokens
            return
        rows = [
            (t.seed, t.success, t.total_reward, self._decode(list(t.tokens)))
            for group in shown
            for t in group.trajectories
        ]
        self._logger.show(f"trajectories/{name}", ("prompt", "success", "reward", "text"), rows)

    def write_timeline(self, step: int) -> None:
        """Add the spans of all ranks to the timeline, if one is kept."""
        spans = self._timers.take_spans()
        if self._config.timeline:
            ranks = collectives.gather_objects(spans)
            path = self._logger.directory / TIMELINE
            on_main(lambda: append_spans(path, step, ranks))
