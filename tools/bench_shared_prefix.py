"""Time training passes with and without shared prefixes, on the same weights and trajectories.

    python tools/bench_shared_prefix.py runs/frozen_lake-gae-seed0 runs/bandit-gae-seed0

Of every run directory: its model, recipe and newest stored rollout, of which the share of the
groups that its filter names is kept. Beside them trajectories of random tokens for a random model
of the default size: 16 members behind one system prompt of 2,000 tokens; five pages of 250 tokens,
of which a group shares the first and, as long as it has chosen alike, further ones; and such that
share nothing. With `--wide` that model is half of the layers of Qwen2.5-0.5B, many, since the last
one answers sampled tokens alone, with sharing and without; a repetition takes an hour then.

For each, log-probabilities and values of the batch, and an actor's and a critic's update on each of
its minibatches, `--shared-prefixes off` and `auto` by turns, in one process of one thread. Seconds
are those of the CPU in this process, which other programs on the machine change little; the ratios
of the wall clock are beside them. `tokens` is the ratio of tokens of all trajectories to those that
are computed, `reached` the ratio of times as a share of it. `FLOPs` is the ratio of the operations:
less than that of the tokens, because a token attends to the whole path before it, however often
that path is computed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmark import OUTPUTS, interleave, provenance, publish, table
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import LossConfig, ModelConfig, ParallelConfig, StarPOConfig, TrainConfig
from ragen_mega.data.packing import minibatches, pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.trainer import MOST_NODES
from ragen_mega.models.huggingface import load_config, random_weights
from ragen_mega.report.provenance import read_settings
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore
from ragen_mega.storage.run_directory import FINAL_EXPORT
from ragen_mega.warm_start.small_model import small_model

VOCABULARY = 400
WAYS = ("off", "auto")
DEFAULT = ModelConfig()
WIDE = ModelConfig(
    hidden_size=896,
    num_layers=12,
    num_attention_heads=14,
    num_query_groups=2,
    ffn_hidden_size=4864,
)
"""Half of Qwen2.5-0.5B: a microbatch of all 24 layers would not fit into 24 GB."""


class Workload(NamedTuple):
    """What is trained on."""

    name: str
    batch: TokenBatch
    hf: PretrainedConfig
    read: Callable[[str], Tensor | None]
    train: TrainConfig


def stored(run: Path) -> Workload:
    """The newest rollout of a run. Raises ValueError if the directory holds none."""
    config = StarPOConfig.from_dict(read_settings(run)[0])
    store = RolloutStore(run / ROLLOUTS)
    if not store.steps():
        raise ValueError(f"{run} keeps no rollouts; give a run trained with --keep-rollouts 0")
    groups = store.read(store.steps()[-1]).groups
    groups.sort(key=lambda group: -statistics.pstdev(group.total_rewards))
    kept = groups[: config.filter.num_kept(len(groups)) or len(groups)]
    trajectories = [one for group in kept for one in group.trajectories]
    model = run / FINAL_EXPORT
    hf = load_config(model)
    return Workload(run.name, pack(trajectories), hf, open_model(model), config.train)


def drawn(
    name: str, texts: list[list[list[int]]], minibatch_size: int, model: ModelConfig
) -> Workload:
    """Trajectories of (prompt, answer, observation, answer, ...) for a model of random weights."""
    trajectories = []
    for index, parts in enumerate(texts):
        trajectories.append(Trajectory(group_id=index))
        for place, part in enumerate(parts):
            if place % 2:
                trajectories[-1].append_action(Completion(part, [-1.0] * len(part), "stop"))
            else:
                trajectories[-1].append_observation(part)
    hf = small_model(model, VOCABULARY)
    train = TrainConfig(minibatch_size=minibatch_size, max_tokens_per_microbatch=8192)
    return Workload(name, pack(trajectories), hf, random_weights(hf, seed=0).get, train)


def drawn_workloads(model: ModelConfig) -> list[Workload]:
    """A common system prompt, pages, and nothing in common."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    prompt = draw(2000)
    prompts = [[prompt, draw(100), draw(50), draw(100)] for _ in range(16)]
    pages = []
    for _ in range(4):
        answers, shown = [draw(20) for _ in range(2)], {}
        for _ in range(8):
            choices, parts = (), []
            for _ in range(5):
                parts.append(shown.setdefault(choices, draw(250)))
                choice = int(torch.randint(2, (), generator=generator))
                choices += (choice,)
                parts.append(answers[choice])
            pages.append(parts)
    alone = [[draw(60), draw(30), draw(40), draw(30)] for _ in range(64)]
    return [
        drawn("system prompt", prompts, 16, model),
        drawn("pages", pages, 32, model),
        drawn("nothing shared", alone, 64, model),
    ]


def measure(workload: Workload, repetitions: int) -> list[dict[str, Any]]:
    """A row for every kind of pass."""
    groups, (name, batch, hf, read, train) = initialize(ParallelConfig()), workload
    frozen = TrainConfig(
        lr=1e-9, critic_lr=1e-9, max_tokens_per_microbatch=train.max_tokens_per_microbatch
    )
    loss = LossConfig(entropy_coef=0.0)
    policy = MegatronPolicy(hf, groups, ParallelConfig(), frozen, loss, temperature=1.0)
    critic = MegatronCritic(hf, groups, ParallelConfig(), frozen, loss)
    for model in (policy, critic):
        model.load_weights(read)
    torch.nn.init.normal_(critic.module.output_layer.weight, std=0.02)
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(batch.num_positions, generator=generator) * batch.loss_mask

    batch = batch.with_fields(
        old_logprobs=batch.rollout_logprobs, advantages=noise(), values=noise(), returns=noise()
    )
    parts = [*minibatches(batch, train.minibatch_size, num_passes=1, generator=generator)]
    passes: dict[str, Callable[[], object]] = {
        "log-probabilities": lambda: policy.logprobs(batch),
        "values": lambda: critic.values(batch),
        "update actor": lambda: [policy.update(part) for part in parts],
        "update critic": lambda: [critic.update(part) for part in parts],
    }

    def job(work: Callable[[], object], way: str) -> Callable[[], tuple[float, float]]:
        def timed() -> tuple[float, float]:
            policy.trainer.most_nodes = critic.trainer.most_nodes = MOST_NODES[way]
            begin = time.process_time(), time.perf_counter()
            work()
            return time.process_time() - begin[0], time.perf_counter() - begin[1]

        return timed

    jobs = {f"{kind}|{way}": job(work, way) for kind, work in passes.items() for way in WAYS}
    readings = interleave(jobs, repetitions, warmups=1)
    rows = []
    for kind in passes:
        whole = parts if kind.startswith("update") else [batch]
        work = {}
        for way in WAYS:
            policy.trainer.most_nodes = MOST_NODES[way]
            work[way] = [sum(x) for x in zip(*map(policy.trainer.count_work, whole))]
        tokens, flops = (off / on for off, on in zip(*work.values()))
        cpu, wall = (
            [[one[clock] for one in readings[f"{kind}|{way}"]] for way in WAYS] for clock in (0, 1)
        )
        ratios = [off / on for off, on in zip(*cpu)]
        rows.append(
            {"workload": name, "pass": kind, "positions": batch.num_positions}
            | {"tokens": tokens, "flops": flops, "seconds": dict(zip(WAYS, cpu)), "ratios": ratios}
            | {"ratio": statistics.median(ratios)}
            | {"wall_ratio": statistics.median(off / on for off, on in zip(*wall))}
        )
        print(name, kind, f"{tokens:.2f} {flops:.2f} {rows[-1]['ratio']:.2f}", flush=True)
    return rows


def tables(report: dict[str, Any]) -> str:
    """The report as text."""
    head = (
        "workload",
        "pass",
        "off, s",
        "auto, s",
        "tokens",
        "FLOPs",
        "time",
        "spread",
        "wall",
        "reached",
    )
    rows = [
        (
            row["workload"],
            row["pass"],
            *(f"{statistics.median(row['seconds'][way]):.3f}" for way in WAYS),
            f"{row['tokens']:.2f}",
            f"{row['flops']:.2f}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f} - {max(row['ratios']):.2f}",
            f"{row['wall_ratio']:.2f}",
            f"{row['ratio'] / row['tokens']:.0%}",
        )
        for row in report["rows"]
    ]
    return table(head, rows)


@command(
    __doc__,
    *OUTPUTS,
    ("runs", {"nargs": "*", "type": Path, "metavar": "RUN", "help": "run directories"}),
    flag("--repetitions", "of every pass, after one that does not count", 5),
    ("--wide", {"action": "store_true", "help": "draw for half of Qwen2.5-0.5B's layers"}),
)
def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    report: dict[str, Any] = provenance() | {"rows": []}
    for workload in [
        *map(stored, arguments.runs),
        *drawn_workloads(WIDE if arguments.wide else DEFAULT),
    ]:
        report["rows"] += measure(workload, arguments.repetitions)
    panels = {
        f"{row['workload']}, {row['pass']}: seconds": row["seconds"] for row in report["rows"]
    }
    publish(arguments, report, tables(report), panels)


if __name__ == "__main__":
    main()
