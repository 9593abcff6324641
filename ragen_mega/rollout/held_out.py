"""Success on fixed initial states, next to the uniform-random and the optimal player under the same
budget.

Protocol of arXiv:2504.20073 appendix B: 256 prompts, 5 turns, 10 actions, temperature 0.5.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from ragen_mega.algorithm.filters import has_return
from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.rules import Sections
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.environments.processes import builder
from ragen_mega.environments.reference_players import (
    Z_95,
    Baselines,
    Prompt,
    baselines,
    wilson_interval,
)
from ragen_mega.ranks.collectives import on_main
from ragen_mega.report.console import Console, set_titles
from ragen_mega.rollout.all_ranks import JointCollection, count_engines
from ragen_mega.rollout.collector import check_starts
from ragen_mega.rollout.endings import (
    check_ends,
    describe_errors,
    environment_errors,
    teach_the_form,
    why_solved,
    why_unsolved,
)
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_config, evaluation_tasks


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluated set. `success` is over all samples; its 95% interval accounts for the
    correlation between samples of one prompt.
    """

    environment: str
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    success: float
    ci_low: float
    ci_high: float
    random: float | None
    """Success of the reference players; None if unknown."""
    optimum: float | None
    reward: float | None
    """Mean total reward of the episodes that no error ended; None if there are none."""
    valid_format_rate: float
    """Share of the answers that could be read, in episodes that no error ended."""
    environment_errors: int
    """Episodes that the environment ended by an error or was too slow for. They count as not
    solved, since leaving them out would flatter a policy that breaks its environment.
    """
    pass_at_k: dict[str, float]
    prompt_success: list[float]
    """Success rate of each prompt, in order, so that runs can be compared prompt by prompt."""
    errors_say: str | None = None
    """One line about these episodes, with the reason of the first; None if there are none."""
    why_unsolved: str | None = None
    """The reason why no episode was solved; None if one was."""
    why_solved: str | None = None
    """A line about partial credit that counts as success; None if there is none."""
    starts: int | None = None
    """Distinct first prompts of a set that is trained on; None where they tell nothing."""
    starts_met: int | None = None
    """Number of them that training has met so far."""

    def to_dict(self) -> dict[str, Any]:
        """Return field name -> value, as JSON takes it."""
        return asdict(self)

    @property
    def quality(self) -> str:
        """Readable answers and the mean score: they tell about a policy that solves nothing yet."""
        score = "-" if self.reward is None else f"{self.reward:.3g}"
        why = f"; nothing is solved: {self.why_unsolved}" if self.why_unsolved else ""
        why += f"; {self.why_solved}" if self.why_solved else ""
        return f"readable {self.valid_format_rate:.1%}  score {score}{why}"

    def __str__(self) -> str:
        known = ["-" if rate is None else f"{rate:.1%}" for rate in (self.random, self.optimum)]
        return (
            f"success {self.success:.1%} [{self.ci_low:.1%}, {self.ci_high:.1%}]"
            f"  random {known[0]}  optimum {known[1]}  {self.quality}"
            + (f"; {self.errors_say}" if self.errors_say else "")
            + (
                f"; training has met {self.starts_met} of its {self.starts} starts"
                if self.starts_met
                else ""
            )
        )


@dataclass(frozen=True)
class HeldOut:
    """A set that a policy is evaluated on: the configuration with the environment's rules, the
    settings of play, the initial states, and the reference players on them.
    """

    config: Sections
    settings: PlaySettings
    prompts: Sequence[Prompt]
    reference: Baselines
    foreign: str | None = None
    """A hindrance of a policy that comes from other environments; None if it knows this one."""


def evaluate_each(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    console: Console,
    sets: Mapping[str, HeldOut],
    *,
    samples_per_prompt: int,
    send_again: Callable[[], None] | None = None,
    watch: Callable[[str, Sequence[TrajectoryGroup]], None] | None = None,
) -> dict[str, EvaluationResult]:
    """Play `samples_per_prompt` episodes of every environment in `sets` from each of its initial
    states, with its progress on the console; the engine has the weights. `watch` gets the groups
    that were played. Raises what `JointCollection.play`, `check_starts` and `check_ends` do.
    """
    results, titles = {}, set_titles(sets)
    for name, held_out in sets.items():
        num_here = -(-len(held_out.prompts) * samples_per_prompt // count_engines(engine))
        world, settings = held_out.config.environment, held_out.settings
        max_turns = world.expected_turns
        groups = evaluation_tasks(
            world, name, held_out.prompts, samples_per_prompt=samples_per_prompt
        )
        with (
            console.progress(f"evaluate {titles[name]}", num_here, max_turns=max_turns) as progress,
            JointCollection(
                engine, renderer, settings, advance=progress.turn, send_again=send_again
            ) as joint,
        ):
            tasks = joint.add(groups)
            joint.play()
            played = joint.take(tasks)
        # The main rank has the infos of all turns.
        results[name] = on_main(partial(_score, name, played, samples_per_prompt, held_out))
        if watch is not None:
            watch(name, played)
    return results


def _score(
    name: str,
    played: Sequence[TrajectoryGroup],
    samples_per_prompt: int,
    held_out: HeldOut,
) -> EvaluationResult:
    reference, unsolved = held_out.reference, None
    trajectories = [trajectory for group in played for trajectory in group.trajectories]
    check_starts(trajectories)
    check_ends(played)
    # An episode that its environment ended says nothing about the answers of the policy.
    scored = [trajectory for trajectory in trajectories if has_return(trajectory)]
    turns = [turn for trajectory in scored for turn in trajectory.turns]
    successes = [[t.success for t in group.trajectories] for group in played]
    success, ci_low, ci_high = success_interval(successes)
    if not success and scored:
        unsolved = why_unsolved(scored, teach_the_form(held_out.config))
        unsolved += f"; {held_out.foreign}" if held_out.foreign else ""
    return EvaluationResult(
        environment=name,
        num_prompts=len(played),
        samples_per_prompt=samples_per_prompt,
        temperature=held_out.settings.temperature,
        success=success,
        ci_low=ci_low,
        ci_high=ci_high,
        random=reference.random,
        optimum=reference.optimum,
        reward=fmean(each.total_reward for each in scored) if scored else None,
        valid_format_rate=sum(bool(turn.info.get("is_format_valid")) for turn in turns)
        / max(1, len(turns)),
        environment_errors=len(environment_errors(played)),
        pass_at_k=pass_at_k(successes),
        prompt_success=[sum(row) / len(row) for row in successes],
        errors_say=describe_errors(played, are_trained=False),
        why_unsolved=unsolved,
        why_solved=why_solved(name, scored),
    )


def reference_players(config: EnvironmentConfig, name: str, prompts: Sequence[Prompt]) -> Baselines:
    """Return the success of the uniform-random and the optimal player on the same initial states
    under the same budget.
    """
    return baselines(
        name,
        prompts,
        episode_config(config),
        timeout=config.environment_timeout,
        build=builder(config, name, config.evaluation_options(name)),
    )


def mean_references(
    references: Mapping[str, Baselines], shares: Mapping[str, float]
) -> dict[str, float]:
    """Return the success of the random and the optimal player, environments weighted by their
    shares of the rollouts; a player that is unknown in any of them is left out.
    """
    total = sum(shares.values())
    means = {}
    for player in ("random", "optimum"):
        rates = {name: getattr(references[name], player) for name in shares}
        if None not in rates.values():
            means[player] = sum(share / total * rates[name] for name, share in shares.items())
    return means


def success_interval(successes: Sequence[Sequence[bool]]) -> tuple[float, float, float]:
    """Return the success rate and its 95% interval from equally many samples of each prompt, where
    prompts differ in difficulty.

    A Wilson interval for the effective number of independent episodes: the number of prompts times
    the variance of one episode over that between the prompts' rates (Kish 1965, design effect), at
    most the number of samples. Both variances include z^2 / 2 prompts that are always solved and as
    many that never are, as Wilson's centre does: a few prompts that agree do not prove that all do.
    One sample of each prompt, and outcomes that are all equal, count as often as there are prompts.
    """
    num_prompts, num_samples = len(successes), len(successes[0])
    rates = [sum(row) / num_samples for row in successes]
    rate = sum(rates) / num_prompts
    padded = num_prompts + Z_95**2
    centre = (sum(rates) + Z_95**2 / 2) / padded
    spread = sum((other - centre) ** 2 for other in rates)
    spread += Z_95**2 / 2 * (centre**2 + (1 - centre) ** 2)
    effective = num_prompts * padded * centre * (1 - centre) / spread
    effective = min(max(effective, num_prompts), num_prompts * num_samples)  # but for rounding
    return rate, *wilson_interval(rate * effective, effective)


def pass_at_k(successes: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return the unbiased pass@k for k = 1, 2, 4, ... up to the samples per prompt
    (arXiv:2107.03374, Eq. 1).
    """
    num_samples = min(len(row) for row in successes)

    def estimate(row: Sequence[bool], k: int) -> float:
        return 1.0 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k)

    return {
        f"pass@{k}": sum(estimate(row, k) for row in successes) / len(successes)
        for k in (2**i for i in range(num_samples.bit_length()))
    }
