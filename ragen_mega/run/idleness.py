"""The meter of idleness: how the ranks spend the seconds of a step, and a sentence about the
largest wait and the flag that moves it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ragen_mega.config import StarPOConfig
from ragen_mega.ranks.waits import Cause

WORK = ("rollout", "sync", "update", "other")
WAITS = ("waiting_samples", "waiting_weights", "waiting_ranks")
_PART = {
    "rollout": "rollout",
    "sync": "sync",
    "handover": "sync",
    "advantages": "update",
    "diagnose": "update",
    "update": "update",
}
"""Stage -> part of the step's time; every other stage is `other`."""
Seconds = dict[str, float]
_EVENED = {
    "rollout": "--placement separate",
    "sync": "--rollout-tensor-parallel-size",
    "update": "a smaller --max-tokens-per-microbatch",
    "other": "a smaller --trace-groups",
}
"""Part -> what evens out the ranks in it."""
_LITTLE = 0.05
"""Share of all seconds below which no wait is worth a flag."""


class Usage(NamedTuple):
    """The seconds of one rank."""

    seconds: Seconds
    """Part of `WORK` or `WAITS` -> seconds; together the whole time."""
    uneven: Seconds
    """Part of `WORK` -> seconds in which it waited there for other ranks."""


def summed(usages: Iterable[Usage]) -> Usage:
    """Return the seconds of several ranks, or of one in several steps, together."""
    total = Usage(dict.fromkeys((*WORK, *WAITS), 0.0), dict.fromkeys(WORK, 0.0))
    for each in usages:
        for sums, seconds in zip(total, each, strict=True):
            sums.update({part: sums[part] + seconds[part] for part in sums})
    return total


def usage(
    stages: Mapping[str, float], waits: Mapping[tuple[str, Cause], float], whole: float
) -> Usage:
    """Divide the `whole` seconds of a rank, of which `stages` took some (each without those inside
    it) and `waits`, by stage and cause, some of the seconds of stages.
    """
    found, uneven = summed(())
    for stage, seconds in stages.items():
        found[_PART.get(stage, "other")] += seconds
    for (stage, cause), seconds in waits.items():
        part = _PART.get(stage, "other")
        found[f"waiting_{cause}"] += seconds
        found[part] -= seconds
        uneven[part] += seconds if cause == "ranks" else 0.0
    found["other"] += max(0.0, whole - sum(found.values()))  # what no stage has taken
    return Usage(found, uneven)


def shares(ranks: Sequence[Usage]) -> dict[str, float]:
    """Return the share of each part in the seconds of all ranks."""
    seconds = summed(ranks).seconds
    whole = sum(seconds.values()) or 1.0
    return {part: each / whole for part, each in seconds.items()}


def sentence(ranks: Sequence[Usage], config: StarPOConfig) -> str:
    """Name the largest wait of the ranks, those that train first, and the flag that moves it."""
    found = shares(ranks)
    wait, most = max(WAITS, key=found.__getitem__), max(WORK, key=found.__getitem__)
    if found[wait] < _LITTLE:
        idle = sum(found[each] for each in WAITS)
        return f"ranks wait {idle:.0%} of their time; the largest part is {most}, {found[most]:.0%}"
    samplers = config.parallel.rollout_ranks
    if wait == "waiting_ranks":
        num_trainers = len(ranks) - samplers
        parts = range(num_trainers), range(num_trainers, len(ranks))
        own = max(parts, key=lambda part: sum(ranks[rank].seconds[wait] for rank in part))
        part = max(WORK, key=summed(ranks[rank] for rank in own).uneven.__getitem__)
        slowest = min(own, key=lambda rank: ranks[rank].seconds[wait])
        whom, remedy = f"other ranks, most in {part} and least on rank {slowest}", _EVENED[part]
        if part == "rollout" and samplers:
            remedy = "--carry-over 0.25"
    elif config.rollout.max_staleness == 0:
        whom, remedy = wait.removeprefix("waiting_"), "--max-staleness 1"
    elif wait == "waiting_samples":
        whom, remedy = "samples", f"--rollout-ranks {samplers + 1}"
    else:
        whom = "weights"
        remedy = f"--rollout-ranks {samplers - 1}" if samplers > 1 else "more ranks that train"
    return f"ranks wait {found[wait]:.0%} of their time for {whom}; {remedy} moves it"
