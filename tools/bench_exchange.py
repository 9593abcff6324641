"""From the ranks that sampled a rollout to those that train it: bytes, seconds and processor time,
against every rank telling every other all of it, pickled; and how even the work then is.

    python tools/bench_exchange.py [--trajectories 2048] [--tokens 4096] [--ranks 4] [--json OUT]

The ranks are forks without models, which exchange over gloo. The two ways take turns. Bytes are
payloads on their way to other ranks, counted in a turn of its own that is not timed.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from benchmark import OUTPUTS, interleave, provenance, publish, table

from ragen_mega.commands.command_line import command, flag
from ragen_mega.data import distributed
from ragen_mega.data.balance import balanced_split
from ragen_mega.data.launcher import as_rank
from ragen_mega.data.types import Completion, Trajectory
from ragen_mega.megatron.trainer import MOST_NODES
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import Sizes
from ragen_mega.rollout.collector import in_groups
from ragen_mega.rollout.holding import assign, hold, share

MODEL = "Qwen3-8B"
WORDS, GROUP, TURNS, SAMPLED = 150_000, 8, 4, 0.25
PICKLED, HELD = "all, pickled, to all", "each to its trainer"
"""The two ways."""
Reading = dict[str, float]


def length_of(index: int, mean: int, spread: float) -> int:
    """Log-normal, at most eight times the mean."""
    drawn = random.Random(-1 - index).gauss(-(spread**2) / 2, spread)
    return min(8 * mean, int(mean * math.exp(drawn)))


def play(index: int, length: int) -> Trajectory:
    """A trajectory of random tokens, a quarter of them sampled."""
    draw = random.Random(index)
    one = Trajectory(index // GROUP, "world", index // GROUP, index)
    for _ in range(TURNS):
        sampled = int(SAMPLED * length / TURNS)
        one.append_observation(draw.choices(range(WORDS), k=length // TURNS - sampled))
        logprobs = [-draw.randrange(2**20) / 2**18 for _ in range(sampled)]
        tokens = draw.choices(range(WORDS), k=sampled)
        one.append_action(Completion(tokens, logprobs, "stop")).reward = draw.random()
        one.turns[-1].info = {"success": False, "is_format_valid": True, "actions": ["up"]}
    return one


def pickled(mine: list[Trajectory], kept: float) -> int:
    """Every rank gets all; returns the tokens that this one then holds."""
    return sum(map(len, sum(distributed.gather_objects(mine), [])))


def held(mine: list[Trajectory], kept: float) -> int:
    """As a run does it."""
    found = share([replace(one) for one in mine])
    groups = in_groups(one for part in found for one in part)
    chosen = groups[: round(kept * len(groups))]
    trajectories = [one for group in chosen for one in group.trajectories]
    homes = list(range(distributed.world_size()))
    options = {
        "homes": homes,
        "cost": Sizes.of(ModelShape.of(model_config(MODEL))).cost,
        "most_nodes": MOST_NODES["auto"],
    }
    plan = [range(len(trajectories))]
    owners = distributed.on_main(lambda: assign(trajectories, plan, len(homes), **options))
    hold(groups, trajectories, owners, homes=homes)
    return sum(len(one) for group in groups for one in group.trajectories if one.is_held)


@contextmanager
def counted() -> Iterator[list[float]]:
    """Inside, the bytes that this rank sends to others are added to the first element."""
    total, others = [0.0], dist.get_world_size() - 1
    names = ("all_gather_object", "broadcast_object_list", "all_to_all_single", "all_reduce")
    before = {name: getattr(dist, name) for name in names}

    def gather(values: list[Any], mine: Any, **options: Any) -> None:
        total[0] += others * len(pickle.dumps(mine))
        before["all_gather_object"](values, mine, **options)

    def broadcast(values: list[Any], src: int, **options: Any) -> None:
        total[0] += others * len(pickle.dumps(values)) * (dist.get_rank() == src)
        before["broadcast_object_list"](values, src=src, **options)

    def all_to_all(out: Any, into: Any, *sizes: Any, **options: Any) -> None:
        sent = sizes[1] if sizes else [1] * (others + 1)
        total[0] += into.element_size() * (sum(sent) - sent[dist.get_rank()])
        before["all_to_all_single"](out, into, *sizes, **options)

    def reduce(values: Any, **options: Any) -> None:  # a ring sends every byte twice
        total[0] += 2 * others / (others + 1) * values.nbytes
        before["all_reduce"](values, **options)

    for name, counting in zip(names, (gather, broadcast, all_to_all, reduce), strict=True):
        setattr(dist, name, counting)
    try:
        yield total
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


def of_all(value: float, operation: Any = dist.ReduceOp.SUM) -> float:
    """The sum over ranks, or another operation."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=operation)
    return float(found)


def measure(work: Callable[[], int]) -> Reading:
    """Wall clock until all ranks are done, and processor seconds of all together."""
    gc.collect()  # what the last turn has left is not this one's work
    distributed.barrier()
    start, computed = time.perf_counter(), time.process_time()
    work()
    computed = time.process_time() - computed
    distributed.barrier()
    return {"seconds": time.perf_counter() - start, "processor": of_all(computed)}


def rank(index: int, folder: str, arguments: argparse.Namespace, answer: Connection) -> None:
    """What one rank does; the first one sends the readings."""
    size = arguments.ranks
    os.environ.update(as_rank(index, size, folder))
    torch.set_num_threads(1)
    distributed.start()
    mine = [
        play(i, length_of(i, arguments.tokens, arguments.spread))
        for i in range(index, arguments.trajectories, size)
    ]
    jobs = {PICKLED: partial(pickled, mine, 1.0)}
    jobs |= {f"{HELD}, {kept:.0%} kept": partial(held, mine, kept) for kept in arguments.kept}
    facts = {}
    for name, job in jobs.items():
        with counted() as sent:
            tokens = job()
        facts[name] = {"bytes": of_all(sent[0]), "held": of_all(tokens, dist.ReduceOp.MAX)}
    timed = {name: partial(measure, job) for name, job in jobs.items()}
    readings = interleave(timed, arguments.repetitions)
    if index == 0:
        answer.send({name: facts[name] | {"readings": readings[name]} for name in jobs})
    distributed.stop()


def run_ranks(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The readings of all ways, from forked ranks."""
    context = get_context("fork")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank, args=(index, folder, arguments, there))
            for index in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        there.close()
        try:
            return here.recv()
        except EOFError:
            raise ValueError("a rank has failed; its own error says why") from None
        finally:
            for process in ranks:
                process.join()


def unevenness(num_ranks: int) -> dict[str, float]:
    """The most expensive share over the mean: 1,024 long-tailed trajectories of MODEL (median 2,000
    tokens, at most 32,768), split by tokens and by cost.
    """
    draw = random.Random(0)
    lengths = [min(32_768, int(draw.lognormvariate(7.6, 1.2))) for _ in range(1024)]
    cost = Sizes.of(ModelShape.of(model_config(MODEL))).cost
    costs = [cost.of(length, int(SAMPLED * length)) for length in lengths]

    def ratio(sizes: Sequence[int]) -> float:
        parts = balanced_split(sizes, num_ranks)
        return max(sum(costs[i] for i in part) for part in parts) / sum(costs) * num_ranks

    return {"tokens": ratio(lengths), "cost": ratio(costs)}


def rows_of(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Of the table: bytes, medians with their spread, and how many times less than the first."""
    rows, base = [], found[PICKLED]
    for name, one in found.items():
        row = [name, f"{one['bytes'] / 1e6:.1f}", f"{base['bytes'] / one['bytes']:.1f}"]
        for key in ("seconds", "processor"):
            values = [reading[key] for reading in one["readings"]]
            pairs = zip(base["readings"], values, strict=True)
            ratios = [before[key] / value for before, value in pairs]
            row += [
                f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})",
                f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
            ]
        rows.append([*row, f"{one['held'] / 1e6:.2f}"])
    return rows


@command(
    __doc__,
    flag("--trajectories", "in all", 2048),
    flag("--tokens", "of each, in the mean", 4096),
    flag("--spread", "standard deviation of the logarithm of that, 0: all alike", 0.0),
    flag("--ranks", "data-parallel ranks, each of which samples", 4),
    flag("--kept", "shares that the filter keeps", type=float, nargs="+", default=[1.0, 0.25]),
    flag("--repetitions", "turns of each way", 5),
    *OUTPUTS,
)
def main(arguments: argparse.Namespace) -> None:
    if arguments.ranks < 2:
        raise ValueError(f"--ranks must be at least 2, not {arguments.ranks}")
    found = run_ranks(arguments)
    head = ["", "MB sent", "x", "seconds", "x", "processor seconds", "x", "most Mtokens held"]
    even = {size: unevenness(size) for size in (4, 16, 64)}
    rows = [[f"{size}", *(f"{value:.3f}" for value in one.values())] for size, one in even.items()]
    text = f"{table(head, rows_of(found))}\n\n{table(['ranks', 'by tokens', 'by cost'], rows)}"
    sizes = {
        name: getattr(arguments, name) for name in ("trajectories", "tokens", "spread", "ranks")
    }
    report = provenance() | sizes | {"ways": found, "unevenness": even}
    panels = {
        key: {name: [reading[key] for reading in one["readings"]] for name, one in found.items()}
        for key in ("seconds", "processor")
    }
    publish(arguments, report, text, panels)


if __name__ == "__main__":
    main()
