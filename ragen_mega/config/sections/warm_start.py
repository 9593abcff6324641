"""Flags of behaviour cloning before reinforcement learning."""

from dataclasses import dataclass
from typing import Annotated

from ragen_mega.config.sections.section import (
    Count,
    Natural,
    OnlyWith,
    PathName,
    Positive,
    Probability,
    Section,
    Seed,
)

_TUNED = OnlyWith("sft_steps", "--sft-steps 200")


@dataclass(frozen=True)
class WarmStartConfig(Section):
    """Behaviour cloning of a scripted player, before reinforcement learning."""

    warm_start_first_turn_steps: Natural = 300
    """Optimizer steps of behaviour cloning on first turns of scripted play (only without --load).
    """
    warm_start_first_turns: Count = 1
    """Turns of an episode that count as its first ones: as many as it takes to meet every kind of
    state.
    """
    warm_start_steps: Natural = 300
    """Further steps on whole scripted trajectories."""
    warm_start_batch: Count = 16
    """Trajectories per step; of first turns twice as many."""
    warm_start_trajectories: Count = 2000
    """Scripted trajectories, and four times as many first turns; the steps take as many passes as
    they need.
    """
    warm_start_until_flat: bool = False
    """End both stages as soon as their loss is flat, and let the learning rate fall then; the steps
    above are their most, the fall included.
    """
    warm_start_lr: Positive = 4e-3
    """Peak learning rate of the warm start."""
    warm_start_critic_steps: Natural = 0
    """Steps of regression of the critic to the returns of the whole scripted trajectories (only
    with a critic, and without --critic-load).
    """
    warm_start_critic_lr: Annotated[
        Positive, OnlyWith("warm_start_critic_steps", "--warm-start-critic-steps 150")
    ] = 1e-3
    """Peak learning rate of that regression."""
    warm_start_temperature: Positive = 1.0
    """Temperature at which the scripted play is imitated. Above 1 the policy starts surer of what
    is certain there, and as open where the play is random: reinforcement learning then shifts
    choices without loosening facts.
    """
    warm_start_skill: Probability = 0.0
    """Probability that the scripted player acts optimally instead of uniformly at random."""
    warm_start_seed: Seed | None = None
    """Seed of the small model's first weights and of the minibatches that it is taught with
    (default: the run's --seed), so that runs of several seeds can begin alike.
    """
    warm_start_from: PathName | None = None
    """Directory of a run whose warm start is taken instead of making one (only without --load), so
    that runs differ by reinforcement learning alone. Its model and worlds must be the same.
    """
    sft_steps: Annotated[Natural, OnlyWith("load", "--load MODEL")] = 0
    """Optimizer steps of supervised fine-tuning of the model of --load before reinforcement
    learning: it imitates scripted play, with thoughts in sentences, and the loss covers answers
    alone. Batch, trajectories, skill and temperature are as in the warm start. With
    --num-steps 0 it is all that a run does.
    """
    sft_lr: Annotated[Positive, _TUNED] = 2e-5
    """Peak learning rate of this fine-tuning."""
    sft_file: Annotated[PathName | None, _TUNED] = None
    """File of conversations that are imitated instead, JSON lines as --prompt-examples-file takes
    them; a conversation may begin with a system message.
    """
