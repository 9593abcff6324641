"""The rollout of a training step by the engines of these ranks, which have the weights: its tasks,
further rounds, the verdicts of judges.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as version_of
from typing import Any

from ragen_mega import __version__
from ragen_mega.algorithm.tables import is_judge
from ragen_mega.config import StarPOConfig
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.report.console import Console
from ragen_mega.rollout.all_ranks import JointCollection, count_engines
from ragen_mega.rollout.engine import EngineError, RolloutEngine
from ragen_mega.rollout.player import Advance, Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TaskSampler, play_settings
from ragen_mega.rollout.verifier import Verifiers
from ragen_mega.run.selection import choose_groups, shape_on_main

_ATTEMPTS = 2
"""Times that a trajectory is played at most: what fails twice is mostly not worth the wait."""
Tasks = Sequence[Sequence[Task]]
Origin = dict[str, Any]
"""Everything that a rollout depends on, as JSON values."""


def origin_of(config: StarPOConfig, tasks: Tasks, weights: str, version: int) -> Origin:
    """Describe the inputs of the rollout of these tasks, under weights with this digest; two
    rollouts with the same origin are the same.
    """
    values = config.to_dict()
    played = [
        (t.group_id, t.environment, t.seed, t.outcome_seed, t.board)
        for group in tasks
        for t in group
    ]
    origin = {
        "weights": weights,
        "weight_version": version,
        "tasks": hashlib.sha256(repr(played).encode()).hexdigest(),
        "environment": values["environment"],
        "agent": values["agent"],
        "rollout": values["rollout"],
        "seed": config.train.seed,
        "routes": config.train.routing_replay == "engine",
        "judges": [name for name in config.advantage.reward_terms if is_judge(name)],
        "versions": _versions(),
    }
    if config.rollout.max_sampling_rounds > 1:  # as many as it takes until enough groups differ
        origin |= {"filter": values["filter"], "reward": config.advantage.reward}
    return origin


@cache
def _versions() -> dict[str, str]:
    """Look the versions up once: a look-up reads all metadata of a package."""
    found = {name: version_of(name) for name in ("torch", "transformers")}
    return found | {"ragen_mega": __version__}


@dataclass
class Sampling:
    """Player of the tasks of a step. All methods are collective."""

    config: StarPOConfig
    engine: RolloutEngine
    renderer: ChatRenderer
    tasks: TaskSampler
    console: Console
    say: Callable[[str], None]
    interrupt: Callable[[], None]
    """Raises Interrupted after a turn if this rank was asked to stop."""
    stop_if_asked: Callable[[], None]
    """Raises Interrupted on all ranks if any was."""
    send_again: Callable[[], None]
    """Gives all engines their weights again, after one has lost them."""

    def __post_init__(self) -> None:
        config = self.config
        self._settings = play_settings(
            config,
            temperature=config.rollout.temperature,
            seed=config.train.seed,
            attempts=_ATTEMPTS,
        )
        self._verifiers = Verifiers(
            config.advantage.reward_terms, timeout=config.environment.environment_timeout or None
        )

    def sample(self, step: int, tasks: Tasks) -> list[TrajectoryGroup]:
        """Play the tasks of a step, and further rounds as `--max-sampling-rounds` says.

        Raises, on all ranks alike, Interrupted if the run is to stop, FloatingPointError if the
        weights have diverged, and EngineError if the rollout fails on any rank for another reason.
        """
        config = self.config
        groups: list[TrajectoryGroup] = []
        for sampling_round in range(config.rollout.max_sampling_rounds):
            if sampling_round:
                if self._are_enough(groups):
                    break
                tasks = self.tasks.sample(step, sampling_round)
            num_here = sum(len(group) for group in tasks) // count_engines(self.engine)
            max_turns = config.environment.expected_turns
            try:
                with (
                    self.console.progress("rollout", num_here, max_turns=max_turns) as progress,
                    self.together(progress.turn) as joint,
                ):
                    indices = joint.add(tasks)
                    joint.play()
                    played = joint.take(indices)
            except (EngineError, FloatingPointError):
                self.stop_if_asked()
                raise
            self.stop_if_asked()
            groups += self.judge(step, played)
        return groups

    def _are_enough(self, groups: Sequence[TrajectoryGroup]) -> bool:
        """Return whether the filter, which divides what it keeps among the environments, keeps as
        many of these groups as of a rollout in which none is constant.
        """
        _, samples, _ = shape_on_main(groups, self.config.advantage.reward_terms)
        kept = choose_groups(samples, self.config, len(groups), share=1.0)
        wanted = self.config.filter.num_kept(self.config.rollout.num_groups)
        return wanted is not None and len(kept) >= wanted

    def together(self, show: Advance | None = None) -> JointCollection:
        """Return a collection of trajectories, of one rollout or several; `show` gets to know
        every turn.
        """

        def advance(num_tokens: int, is_over: bool) -> None:
            if show is not None:
                show(num_tokens, is_over)
            self.interrupt()

        return JointCollection(
            self.engine,
            self.renderer,
            self._settings,
            advance=advance,
            send_again=self.send_again,
        )

    def judge(self, step: int, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Have the rollout of a step judged. Raises EngineError on all ranks if a judge is away."""
        if missing := self._verifiers.judge(groups, self.renderer):
            self.say(f"step {step}: {missing} verdicts of judges are missing")
        return groups
