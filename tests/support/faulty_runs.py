"""A tiny run on the bandit whose updates are spoiled on purpose, and a record of which of them
moved anything.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from ragen_mega.commands import replayed_step
from ragen_mega.config import parse
from ragen_mega.run.build import build
from ragen_mega.run.run import Run

FLAGS = """
    --environments bandit --environment-options {} --prompt-style compact --max-turns 2
    --max-response-length 12 --max-context-length 120 --hidden-size 32 --ffn-hidden-size 64
    --num-layers 2 --num-groups 2 --group-size 4 --minibatch-size 2 --filter-strategy none
    --format-penalty -0.5 --lr 1e-3 --critic-lr 1e-3 --lr-decay linear --num-steps 4
    --eval-prompts 2 --eval-interval 0 --save-interval 2 --keep-last 0 --keep-rollouts 0
    --kl-kind k3 --kl-coef 0.01
""".split()
WARM_START = (
    "--warm-start-first-turn-steps 100 --warm-start-steps 4 --warm-start-trajectories 20"
    " --num-steps 1".split()
)


def open_run(output: Path, name: str, *flags: str) -> Run:
    load = () if name == "start" else ("--load", str(start_of(output)))
    return build(parse([*FLAGS, *load, "--output", str(output), "--name", name, *flags]))


def replay_arguments(run: Path, step: int) -> argparse.Namespace:
    layout = dict.fromkeys(replayed_step.LAYOUT)
    return argparse.Namespace(
        run=run, step=step, tolerance=1e-4, num_ranks=None, json=None, **layout
    )


def start_of(output: Path) -> Path:
    return output / "start" / "warm_start"


def poison(run: Run, changes: dict[int, tuple[str, float]]) -> None:
    """Spoil the n-th minibatch, of four a step: a field on its first sampled token, or during its
    updates a weight of `actor` or `critic`.
    """
    minibatches = run.batches.minibatches

    def poisoned(batch, step) -> Iterator:
        for number, minibatch in enumerate(minibatches(batch, step), start=4 * step):
            where, value = changes.get(number, ("", 0.0))
            if where in run.trainers:
                weight = list(run.trainers[where].chunks.parameters())[-1].data.view(-1)[:1]
                healthy = weight.clone()
                weight.fill_(value)
                yield minibatch
                assert math.isnan(weight) or weight == value
                weight.copy_(healthy)
                continue
            if where:
                getattr(minibatch, where)[int(minibatch.loss_mask.nonzero()[0])] = value
            yield minibatch

    run.batches.minibatches = poisoned


def snapshot(trainer) -> list[torch.Tensor]:
    """The bits of all parameters and of every tensor of the optimizer."""
    inner = (
        trainer.optimizer.chained_optimizers[0]
        if hasattr(trainer.optimizer, "chained_optimizers")
        else trainer.optimizer
    )
    moments = [
        value for parameter in inner.optimizer.state.values() for value in parameter.values()
    ]
    return [
        value.detach().clone().view(torch.int32)
        for value in (*trainer.chunks.parameters(), *moments)
    ]


def record_moves(run: Run) -> dict[str, list[bool]]:
    """Model -> whether each of its updates changes anything of weights and optimizer, filled while
    the run trains.
    """
    moves: dict[str, list[bool]] = {}

    def watch(name: str, owner) -> None:
        update = owner.update

        def watched(minibatch):
            before = snapshot(owner.trainer)
            result = update(minibatch)
            after = snapshot(owner.trainer)
            moves.setdefault(name, []).append(
                len(before) != len(after)
                or not all(torch.equal(one, other) for one, other in zip(before, after))
            )
            return result

        owner.update = watched

    watch("actor", run.policy)
    watch("critic", run.critic)
    return moves
