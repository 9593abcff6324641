"""Guards of a run: updates skipped for a non-finite loss or gradient, steps of which the filter
kept no group, success that collapses, groups of different tasks.

The first two are reported and counted, and too many in a row end the run; a collapse can be undone.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_mega.agents.repetition import begin_alike
from ragen_mega.agents.served_episode import ASKED
from ragen_mega.algorithm.diagnostics import CollapseDetector
from ragen_mega.config import EnvironmentConfig, GuardConfig, RolloutConfig, StarPOConfig
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.data.exchange import gather_batch
from ragen_mega.data.types import TokenBatch, Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import QUOTED
from ragen_mega.environments.registry import declares
from ragen_mega.ranks.collectives import on_main
from ragen_mega.rollout.endings import (
    PolicyErrors,
    describe_errors,
    environment_errors,
    teach_the_form,
    unusable_answers,
)
from ragen_mega.rollout.tasks import draws_by_outcome, episode_maker
from ragen_mega.storage.sealed_files import write_sealed

FAULTS = "faults"
MAX_FILES = 20
"""Bad batches that are kept; later ones are only counted."""
_REPEATS = 3
"""Times that an agent begins an episode again."""


class UpdateGuard:
    """Checks the result of every update. The trainer has already skipped a bad one, on all ranks
    alike.
    """

    def __init__(
        self, directory: Path | None, *, max_consecutive: int, report: Callable[[str], None]
    ) -> None:
        self.directory = directory
        """Folder of bad batches; None keeps none."""
        self.max_consecutive = max_consecutive
        self.consecutive: dict[str, int] = {}
        """Model -> bad updates since its last good one."""
        self.count = 0
        """Bad updates of this step so far."""
        self._report = report

    def check(
        self, step: int, model: str, minibatch: TokenBatch, result: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the finite numbers of an update's result; a bad update is reported and its batch
        kept. Collective.

        Raises OSError on all ranks if the batch cannot be written and FloatingPointError after too
        many bad updates.
        """
        if not result["skipped"]:
            self.consecutive[model] = 0
            return dict(result)
        self.consecutive[model] = self.consecutive.get(model, 0) + 1
        self.count += 1
        minibatch = gather_batch(minibatch)
        kept = on_main(lambda: self._keep(step, model, minibatch, result))
        self._report(
            f"step {step}: update of the {model} skipped, its loss ({result['loss']:g}) or gradient"
            f" ({result['grad_norm']:g}) is not finite" + (f"; batch in {kept}" if kept else "")
        )
        if self.consecutive[model] >= self.max_consecutive:
            raise FloatingPointError(
                f"{self.consecutive[model]} updates of the {model} in a row had a non-finite loss"
                f" or gradient (step {step})"
            )
        return {name: value for name, value in result.items() if math.isfinite(value)}

    def take_count(self) -> int:
        """Return the bad updates since the last call."""
        count, self.count = self.count, 0
        return count

    def _keep(
        self, step: int, model: str, minibatch: TokenBatch, result: Mapping[str, float]
    ) -> Path | None:
        if self.directory is None or (
            self.directory.is_dir() and len(list(self.directory.iterdir())) >= MAX_FILES
        ):
            return None
        self.directory.mkdir(exist_ok=True)
        path = self.directory / f"step_{step:08d}_{model}_{self.count}.safetensors"
        write_sealed(
            path, dict(minibatch.tensors()), {"step": step, "model": model, "result": dict(result)}
        )
        return path


class CollapseGuard:
    """Decides, alike on all ranks, when `--guard` reacts, which checkpoint to go back to, and what
    changes from then on.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.detector = CollapseDetector()
        self.good_step: int | None = None
        """The regular checkpoint at which success was best; the one to go back to."""
        self.rollbacks = 0
        self.lr_factor = 1.0
        """Factor of the learning rates, after the rollbacks so far."""
        self.filter_share = 1.0
        """Share of the groups that the filter keeps which is trained on."""
        self._good_level = -math.inf
        self._is_collapse_reported = False

    @property
    def pinned(self) -> list[int]:
        """Steps of checkpoints that must stay."""
        is_needed = self.config.guard == "react"
        return [self.good_step] if is_needed and self.good_step is not None else []

    @property
    def may_react(self) -> bool:
        """Whether a collapse is undone: there is a checkpoint, and a rollback left."""
        return bool(self.pinned) and self.rollbacks < self.config.guard_rollbacks

    def observe(self, signals: Mapping[str, float], *, is_last: bool) -> str | None:
        """Record a step; returns what has collapsed, if that is news or can be undone."""
        found = self.detector.observe(signals, is_last=is_last)
        is_known, self._is_collapse_reported = self._is_collapse_reported, found is not None
        return None if is_known and not self.may_react else found

    def task_changed(self) -> None:
        """Record that the next step plays other tasks, whose success cannot be compared."""
        self.detector = CollapseDetector()
        self._good_level = -math.inf

    def checkpoint_at(self, step: int) -> None:
        """A regular checkpoint is about to be written. One at the end of a process must not count:
        the run would go on otherwise than without that end.
        """
        level = self.detector.success_level
        level = -math.inf if level is None else level
        if level >= self._good_level:
            self.good_step, self._good_level = step, level

    def go_back(self, step: int) -> str:
        """Record that the run goes back, and that a checkpoint of that follows after `step` steps.
        Returns the changes from here on.
        """
        self.rollbacks += 1
        self.lr_factor *= self.config.guard_lr
        self.filter_share *= self.config.guard_filter
        self.good_step = step
        self.detector.forget_recent()
        return (
            f"rollback {self.rollbacks} of {self.config.guard_rollbacks}; from here on learning"
            f" rates x {self.lr_factor:g}, and of the groups that the filter keeps the"
            f" {self.filter_share:.4g} that vary most"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs to go on alike, as JSON takes it."""
        return {
            "detector": self.detector.state_dict(),
            "good_step": self.good_step,
            "good_level": self._good_level if math.isfinite(self._good_level) else None,
            "rollbacks": self.rollbacks,
            "lr_factor": self.lr_factor,
            "filter_share": self.filter_share,
            "is_told": self._is_collapse_reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; an older one has no factors, which the flags say then."""
        self.detector.load_state_dict(state["detector"])
        self.good_step, self.rollbacks = state["good_step"], state["rollbacks"]
        self.lr_factor = state.get("lr_factor", self.config.guard_lr**self.rollbacks)
        self.filter_share = state.get("filter_share", self.config.guard_filter**self.rollbacks)
        self._good_level = -math.inf if state["good_level"] is None else state["good_level"]
        self._is_collapse_reported = state["is_told"]


class RolloutGuard:
    """Finds what is wrong with worlds and agents in the rollouts of a run, and says it once. Needs
    all tokens and infos, as the first rank has them.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        begins_again: Callable[[Trajectory, int], bool] = lambda episode, step: True,
    ) -> None:
        """`begins_again`: whether the agent of an episode of a step repeats its first request."""
        self.config = config
        self.starts = HeldOutStarts()
        self._begins_again = begins_again
        self._policy_errors = PolicyErrors()
        self._settled: set[tuple[str, str]] = set()
        """Subject and environment, of which everything is known or was said."""

    def notes(self, step: int, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Return the notes about the rollout of a step."""
        quoted, asked = self._news(QUOTED, groups), self._news(ASKED, groups)
        errors = describe_errors(groups)
        return [
            *self.check_starts(step, groups),
            *(
                f"what {name} says holds markers of chat templates or tags such as </answer>; the"
                " policy sees them as plain letters (rollout/quoted_markers counts them)"
                for name in quoted
            ),
            *(
                f"{name} asks for {asked[name]}, which is ignored: the trainer's sampling holds"
                " (rollout/ignored_sampling counts such answers); --agent-sampling agent keeps the"
                " agent's, and leaves these answers out of training"
                for name in asked
            ),
            *self.starts.trained(groups),
            *([errors] if errors else []),
            *self._policy_errors.add(groups),
        ]

    def _news(self, key: str, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """Return environment -> entry `key` of an info, of environments without one before."""
        found = {
            member.environment: turn.info[key]
            for group in groups
            for member in group.trajectories
            for turn in member.turns
            if key in turn.info
        }
        new = {name: found[name] for name in sorted(found) if (key, name) not in self._settled}
        self._settled.update((key, name) for name in new)
        return new

    def check_starts(self, step: int, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Warn of groups of a step whose members do not play the same task: they differ in the
        first prompt, which follows from the seed. Differences that outcome seeds alone explain are
        the intention of the world or the agent.
        """
        said = []
        for group in groups:
            started = [member for member in group.trajectories if member.num_sampled_tokens]
            if not started or ("starts", started[0].environment) in self._settled:
                continue
            first = started[0]
            if other := next((each for each in started if not _begin_alike(first, each)), None):
                self._settled.add(("starts", first.environment))
                check = self._agent if first.is_tree else self._world
                said += check(step, first, other)
        return said

    def _world(self, step: int, one: Trajectory, other: Trajectory) -> list[str]:
        name, limit = one.environment, self.config.environment_timeout
        maker = episode_maker(self.config, name, step)
        if draws_by_outcome(maker, one.seed, [one.outcome_seed, other.outcome_seed], limit):
            return []
        return [
            f"members of a group play different tasks: {name} gave seed {one.seed} more than"
            " one first observation, so that returns of a group are compared across tasks. Let"
            " reset(seed) draw the initial state from a generator of its own,"
            " random.Random(seed), that step uses too: the global generators of random and"
            " numpy are shared by all threads (or set --environment-processes, where calls"
            " follow one another)"
        ]

    def _agent(self, step: int, one: Trajectory, other: Trajectory) -> list[str]:
        repeats = [each for each in (one, other) for _ in range(_REPEATS)]
        if all(self._begins_again(each, step) for each in repeats):
            return []
        return [
            f"members of a group play different tasks: {one.environment} began the episodes of seed"
            f" {one.seed} with outcome seeds {one.outcome_seed} and {other.outcome_seed} by"
            " different requests, and by others again when they were repeated, so that returns of a"
            " group are compared across tasks. Let the first request follow from the task alone:"
            " from its row and seed, or from outcome_seed, but not from a clock, a counter or the"
            " global generators of random and numpy, which all threads share"
        ]


def _begin_alike(one: Trajectory, other: Trajectory) -> bool:
    """Return whether two members begin with the same prompt."""
    return begin_alike(one, other) if one.is_tree else one.first_prompt == other.first_prompt


class HeldOutStarts:
    """Counts the held-out starts of each environment that training has met: first prompts that are
    equal. Worlds without boards draw both by seed, perhaps from few states.
    """

    def __init__(self) -> None:
        self._held_out: dict[str, set[str]] = {}  # digests of first prompts, by environment
        self._met: dict[str, set[str]] = {}
        self._found: dict[str, set[str]] = {}  # by a rollout whose step is not done

    def evaluated(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Record the starts of an evaluation. First prompts that are all alike tell nothing, nor do
        first prompts of an environment that hides its state.
        """
        for name, prompts in _first_prompts(groups).items():
            tell = (len(prompts) > 1 or len(groups) == 1) and not declares(name, "is_hidden")
            self._held_out[name] = prompts if tell else set()

    def trained(self, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Find the starts of a rollout, which count once the step is done, see `commit`; returns a
        warning for each environment in which one is held out for the first time.
        """
        self._found = {
            name: prompts & self._held_out.get(name, set())
            for name, prompts in _first_prompts(groups).items()
        }
        return [
            f"training has met {len(found)} of the {len(self._held_out[name])} starts that"
            f" {name} is evaluated on: both are drawn by seed, so that success there is no success"
            f" on unseen states (eval/starts_met goes on counting); {_remedy(name)}"
            for name, found in self._found.items()
            if found and not self._met.get(name)
        ]

    def commit(self) -> None:
        """Count the starts of the latest rollout: its step will not be repeated."""
        for name, found in self._found.items():
            self._met.setdefault(name, set()).update(found)

    def count(self, name: str) -> tuple[int, int] | None:
        """Return how many of how many starts of an environment training has met; None if they tell
        nothing.
        """
        held_out = self._held_out.get(name)
        return (len(self._met.get(name, set()) & held_out), len(held_out)) if held_out else None

    def state_dict(self) -> dict[str, dict[str, list[str]]]:
        """Return what a resumed run counts on from, as JSON takes it."""
        return {
            part: {name: sorted(prompts) for name, prompts in found.items()}
            for part, found in (("held_out", self._held_out), ("met", self._met))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Continue from `state_dict()`; from an empty one, as older runs have, with nothing."""
        self._held_out, self._met = (
            {name: set(prompts) for name, prompts in state.get(part, {}).items()}
            for part in ("held_out", "met")
        )


def _remedy(name: str) -> str:
    """Return how starts of an environment are held out."""
    if is_agent(name):
        return "give the agent rows by --tasks, or other tasks for seeds below 1,000,000"
    return (
        "give the world boards or splits to hold them out, or is_hidden if first observations do"
        " not tell its state"
    )


def _first_prompts(groups: Sequence[TrajectoryGroup]) -> dict[str, set[str]]:
    """Return environment name -> digests of the first prompts. Needs all tokens, as the first rank
    has them.
    """
    found: dict[str, set[str]] = {}
    for group in groups:
        for member in group.trajectories:
            if member.num_sampled_tokens:
                prompt = repr(list(member.first_prompt)).encode()
                digest = hashlib.sha256(prompt).hexdigest()[:16]
                found.setdefault(member.environment, set()).add(digest)
    return found


class EmptySteps:
    """Counts the steps in a row that trained on nothing."""

    def __init__(self, most: int) -> None:
        """`most`: bound of `--max-empty-steps`; 0: none."""
        self.count = 0
        self._most = most

    def add(self, why: str | None) -> str | None:
        """Count a step, which trained on nothing for a reason, if there is one. Returns an error if
        there are too many such steps; a resumed run may have as many again. Without a reason the
        count begins anew.
        """
        self.count = self.count + 1 if why else 0
        # A resumed run may have more empty steps behind it than its bound allows.
        if why is None or not 0 < self._most <= self.count:
            return None
        self.count = 0
        return (
            f"{self._most} steps in a row trained on nothing, the bound of --max-empty-steps: {why}"
        )


def nothing_to_learn(
    groups: Sequence[TrajectoryGroup], samples: Sequence[TrajectoryGroup], config: StarPOConfig
) -> str:
    """Return why the filter kept none of a step's groups, and the remedy; `samples` are the groups
    with the members that have a return.
    """
    num_played = sum(len(group.trajectories) for group in groups)
    if len(environment_errors(groups)) == num_played:
        return (
            "the environment ended every trajectory by an error; mend it, or raise"
            " --environment-timeout"
        )
    if not samples:
        return (
            "errors of environments or missing verdicts of judges left fewer than two members of"
            " every group; mend them, or raise --group-size"
        )
    return _no_variance(samples, config)


def _no_variance(groups: Sequence[TrajectoryGroup], config: StarPOConfig) -> str:
    """Return why groups with their samples alone teach nothing, and the remedy."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if why := unusable_answers(trajectories, teach_the_form(config)):
        return why
    returns = sorted({round(trajectory.total_reward, 6) for trajectory in trajectories})
    earned = f"{returns[0]:g}" if len(returns) == 1 else f"{returns[0]:g} to {returns[-1]:g}"
    for is_so, why in (
        (
            all(trajectory.success for trajectory in trajectories),
            "every trajectory succeeds with the same return: the task is solved; make it harder by"
            " --environment-options, or stop here",
        ),
        (
            all(len(set(group.total_rewards)) == 1 for group in groups),
            f"within each group all returns are equal (returns {earned}); raise --group-size or"
            " --temperature, or make the task easier",
        ),
    ):
        if is_so:
            return why
    return (
        f"--filter-strategy {config.filter.filter_strategy} kept none of {len(groups)} groups"
        f" (returns {earned}); loosen --filter-value or name another"
    )


def inversion_note(metrics: Mapping[str, float]) -> str | None:
    """Describe a reward that pays more for failing than for success, by the metrics of a step."""
    if not metrics.get("reward/inverted"):
        return None
    by = "reward/inverted_by/"
    margins = {key.removeprefix(by): value for key, value in metrics.items() if key.startswith(by)}
    term = max(margins, key=margins.__getitem__)
    return (
        "the reward pays more for failing than for success: its term"
        f" {term} pays failures {margins[term]:.3g} more in the mean; change the weight of {term}"
        " in --reward"
    )


def cut_note(metrics: Mapping[str, float], rollout: RolloutConfig) -> str | None:
    """Say that the context cut every trajectory of a step, by its metrics."""
    if metrics.get("rollout/truncated_by_context") != 1:
        return None
    return (
        f"every trajectory was cut at --max-context-length {rollout.max_context_length}, so none"
        f" could end; raise it by {rollout.longer_context}, or shorten observations"
    )
