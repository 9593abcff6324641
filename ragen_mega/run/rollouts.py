"""The rollout of a step on all ranks: sampled and then put on the disk, or read back if a run
repeats the step.

A rollout is repeated only where sampling would give the same: from the same weights, tasks and
settings, on as many ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragen_mega import __version__
from ragen_mega.config import StarPOConfig
from ragen_mega.data import distributed
from ragen_mega.data.distributed import on_main
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.report.console import Console
from ragen_mega.rollout.all_ranks import collect_on_all_ranks, count_engines
from ragen_mega.rollout.collector import PlaySettings, Task
from ragen_mega.rollout.engine import EngineError, Interrupted, RolloutEngine
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import environment_errors
from ragen_mega.run.stop import StopSignal
from ragen_mega.storage.checkpoints import CHECKPOINTS
from ragen_mega.storage.rollout_store import ROLLOUTS, RolloutStore

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_REASON = 200


class DurableRollouts:
    """The rollout files of a run, and what decides whether one still holds. Methods are collective."""

    def __init__(self, run_directory: Path, config: StarPOConfig) -> None:
        self.store = RolloutStore(run_directory / ROLLOUTS)
        self._checkpoints = run_directory / CHECKPOINTS
        self._keep = config.checkpoint.keep_rollouts
        values = config.to_dict()
        self._settings = {
            "environment": values["environment"],
            "rollout": values["rollout"],
            "seed": config.train.seed,
            "versions": (
                {name: version(name) for name in ("torch", "transformers")}
                | {"ragen_mega": __version__}
            ),
        }

    def origin(
        self, tasks: Sequence[Sequence[Task]], weights: str, weight_version: int
    ) -> dict[str, Any]:
        """Everything that a rollout of `tasks` under the policy with the fingerprint `weights`
        depends on.
        """
        played = [
            (t.group_id, t.environment, t.seed, t.outcome_seed, t.board)
            for group in tasks
            for t in group
        ]
        return {
            "weights": weights,
            "weight_version": weight_version,
            "tasks": hashlib.sha256(repr(played).encode()).hexdigest(),
            **self._settings,
        }

    def recall(
        self, step: int, origin: dict[str, Any], report: Callable[[str], None]
    ) -> list[TrajectoryGroup] | None:
        """The groups that an earlier process sampled for this step, None if it did not or not from
        this origin.
        """
        return on_main(lambda: self.store.recall(step, origin, report))

    def write(self, step: int, groups: Sequence[TrajectoryGroup], origin: dict[str, Any]) -> None:
        """Put a rollout on the disk and delete those that are not to be kept. Raises OSError on all
        ranks.
        """

        def write() -> None:
            self.store.write(step, groups, origin)
            if self._keep is None:
                kept = [
                    int(path.name.removeprefix("step_"))
                    for path in self._checkpoints.glob("step_*")
                ]
                self.store.prune(min(kept, default=0))
            elif self._keep:
                self.store.prune(step + 1 - self._keep)

        on_main(write)


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """A digest of the parameters of all ranks: of the sums of their bits, so that one pass over
    them is all it costs.

    Tells weights apart that training left different; it is no protection against forgery.
    Collective.
    """
    sums = [
        value.detach().view(_INTEGERS[value.element_size()]).sum(dtype=torch.int64)
        for value in parameters
    ]
    local = torch.stack(sums).tolist() if sums else []
    return hashlib.sha256(repr(distributed.gather_objects(local)).encode()).hexdigest()


def sample(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    groups: Sequence[Sequence[Task]],
    config: StarPOConfig,
    console: Console,
    stop: StopSignal,
    *,
    send_again: Callable[[], None],
) -> list[TrajectoryGroup]:
    """Play the tasks of one step under the training temperature with an engine that is awake.
    Collective.

    `send_again` gives engines the weights once more. Raises, on all ranks alike, Interrupted if the
    run is to stop, FloatingPointError if the weights have diverged, and EngineError if the rollout
    fails on any rank for another reason.
    """
    rollout = config.rollout
    num_tasks = sum(len(group) for group in groups)
    collected: list[TrajectoryGroup] = []
    failure: EngineError | FloatingPointError | None = None
    with console.phase("rollout", num_tasks // count_engines(engine)) as progress:

        def advance() -> None:
            progress.advance()
            stop.interrupt()

        try:
            collected = collect_on_all_ranks(
                engine,
                renderer,
                groups,
                PlaySettings(
                    rollout.max_response_length,
                    rollout.max_context_length,
                    rollout.temperature,
                    config.train.seed,
                    environment_timeout=config.environment.environment_timeout,
                ),
                advance=advance,
                send_again=send_again,
            )
        except (EngineError, FloatingPointError) as error:
            failure = error
    if stop.agreed():
        raise Interrupted
    if failure is not None:
        raise failure
    return collected


def report_environment_errors(
    step: int, groups: Sequence[TrajectoryGroup], report: Callable[[str], None]
) -> None:
    """One line about the trajectories that their environment ended, if there are any."""
    if errors := environment_errors(groups):
        trajectory, reason = errors[0]
        reason = " ".join(reason.split())[:_MAX_REASON]
        report(
            f"step {step}: environment errors closed {len(errors)} trajectories as truncated; the"
            f" first: {trajectory.environment} with seed {trajectory.seed} and outcome seed"
            f" {trajectory.outcome_seed}: {reason}"
        )
