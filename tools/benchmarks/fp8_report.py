"""Measure what FP8 costs in accuracy on this machine: the drift of log-probabilities against
bfloat16.

    python tools/benchmarks/fp8_report.py --json fp8.json
    python tools/benchmarks/fp8_report.py --load MODEL --recipes tensorwise blockwise

The tokens are those that the bfloat16 policy itself samples. Every recipe that this GPU computes
stands beside what bfloat16 loses against float32 and what Transformer Engine's layers change in
bfloat16. Needs one CUDA GPU and Transformer Engine; without them exit code 2. What FP8 saves in
time is `bench_step.py -- --fp8 hybrid` beside `bench_step.py`.
"""

import argparse
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from harness import JSON, provenance, publish, table
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.config.sections.parallel import FP8Recipe
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.precision import RECIPES, Device, obstacle_to_recipe
from ragen_mega.models.huggingface import load_config, random_weights
from ragen_mega.planning.published import SHAPES, model_config
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.model_sources import local_directory

BF16 = "bf16"
"""The row that the others are compared with: Transformer Engine's layers without FP8."""
ROWS_OF_LOGITS = 512
FLAGS = (
    JSON,
    flag(
        "--model",
        f"shape of a model of random weights (default: Qwen2.5-0.5B): {', '.join(SHAPES)}",
    ),
    flag("--load", "Hugging Face name or directory; drift of random weights says little about it"),
    flag("--recipes", "default: all that this GPU computes", nargs="+", choices=sorted(RECIPES)),
    flag("--fp8", "format, as in training", "hybrid", choices=("hybrid", "e4m3")),
    flag("--tokens", "sampled and compared", 8192),
    flag("--length", "tokens of a trajectory", 1024),
    flag("--seed", "of weights and tokens", 0),
)


def layouts(
    recipes: Sequence[FP8Recipe], fp8: Literal["hybrid", "e4m3"]
) -> dict[str, ParallelConfig]:
    """Name -> implementation: the reference first, then the yardsticks, then the recipes."""
    reference = ParallelConfig(bf16=True, transformer_impl="transformer_engine")
    yardsticks = {
        "float32, local layers": ParallelConfig(transformer_impl="local"),
        "bf16, local layers": ParallelConfig(bf16=True, transformer_impl="local"),
    }
    return (
        {BF16: reference}
        | yardsticks
        | {name: replace(reference, fp8=fp8, fp8_recipe=name) for name in recipes}
    )


def random_batch(
    num_tokens: int, length: int, vocab_size: int, seed: int, *, prompt: int = 1
) -> TokenBatch:
    """`num_tokens` positions of random tokens in trajectories of `length` positions, whose first
    `prompt` tokens are the same, if there are several, and whose others are sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    trajectories: list[Trajectory] = []
    common = list[int]()
    for start in range(0, num_tokens, length):
        tokens = torch.randint(
            0, vocab_size, (min(length, num_tokens - start) + 1,), generator=generator
        ).tolist()
        common = common or tokens[:prompt] * (prompt > 1)
        tokens[: len(common)] = common
        trajectory = Trajectory(group_id=len(trajectories))
        trajectory.append_observation(tokens[:prompt])
        trajectory.append_action(
            Completion(tokens[prompt:], [0.0] * (len(tokens) - prompt), "length")
        )
        trajectories.append(trajectory)
    return pack(trajectories)


def sample_labels(policy: MegatronPolicy, batch: TokenBatch) -> TokenBatch:
    """Return the batch with labels that the policy samples at each position."""
    module = policy.head

    def sample(_: TokenBatch, output: Tensor) -> Tensor:
        weight, rows = module.head_weight().t(), module.head_input(output).split(ROWS_OF_LOGITS)
        words = [(row @ weight).float().softmax(-1).multinomial(1) for row in rows]
        return torch.cat(words).flatten().float()

    return batch.with_fields(labels=policy.trainer.per_token(batch, sample))


def measure_drift(
    hf: PretrainedConfig,
    read: Callable[[str], Tensor | None],
    batch: TokenBatch,
    variants: Mapping[str, ParallelConfig],
    groups: Any,
    max_tokens: int,
) -> dict[str, dict[str, float]]:
    """Return a map: variant -> statistics against the first one, all with the same weights and on
    tokens that the first one samples.
    """
    train, reference, rows = TrainConfig(max_tokens_per_microbatch=max_tokens), None, {}
    for name, parallel in variants.items():
        policy = MegatronPolicy(hf, groups, parallel, train, LossConfig(), temperature=1.0)
        policy.load_weights(read)
        if reference is None:
            batch = sample_labels(policy, batch)
            reference = policy.logprobs(batch)
        else:
            rows[name] = drift(reference, policy.logprobs(batch))
            numbers = (f"{key} {value:.2e}" for key, value in rows[name].items())
            print(f"{name:24s}", *numbers, sep="  ", flush=True)
        del policy
        free()
    return rows


def free() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def drift(reference: Tensor, other: Tensor) -> dict[str, float]:
    """Return the statistics of `other - reference`, log-probabilities [N] of tokens that the
    reference sampled.

    `kl` estimates KL(reference || other) by the mean of r - 1 - log r with r = exp(other -
    reference), which is unbiased and never negative (http://joschu.net/blog/kl-approx.html).
    """
    if reference.shape != other.shape or reference.numel() == 0:
        shapes = f"{list(reference.shape)} and {list(other.shape)}"
        raise ValueError(
            "drift compares log-probabilities of the same tokens, at least one, not shapes"
            f" {shapes}"
        )
    difference = other.double() - reference.double()
    distance = difference.abs()
    # the smallest distance that 99% of the tokens do not exceed
    rank = math.ceil(0.99 * distance.numel())
    return {
        "mean": float(difference.mean()),
        "mean_abs": float(distance.mean()),
        "p99_abs": float(distance.kthvalue(rank).values),
        "max_abs": float(distance.max()),
        "kl": float((difference.exp() - 1 - difference).mean()),
    }


def tables(report: dict[str, Any]) -> str:
    """Return the report as text."""
    drifts = [
        (name, *(f"{value:.2e}" for value in row.values())) for name, row in report["drift"].items()
    ]
    padded = ", ".join(f"{name} {size}" for name, size in report["alignment"].items())
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items())
    return "\n\n".join(
        (
            "# FP8 report",
            f"{report['hardware']}; {versions}; commit {report['commit']}; FP8 format"
            f" {report['fp8']}.",
            f"## Drift of log-probabilities against {BF16}",
            f"{report['drift_tokens']} tokens sampled by the {BF16} policy; weights:"
            f" {report['weights']}.",
            table(("", "mean", "mean abs", "p99 abs", "max abs", "KL"), drifts),
            f"FP8 pads tokens to multiples: {padded}.",
        )
    )


def choose_recipes(asked: Sequence[FP8Recipe] | None, machine: Device) -> list[FP8Recipe]:
    """Return the recipes to measure. Raises ValueError if the machine supports no recipe, or not
    one that was named.
    """
    if machine.capability is None or machine.transformer_engine is None:
        raise ValueError(
            "the FP8 report needs a CUDA GPU and Transformer Engine; run it on one after pip"
            " install --no-build-isolation -e '.[h100]' (ragen-mega doctor --for h100 says what is"
            " missing)"
        )
    for name in asked or ():
        if obstacle := obstacle_to_recipe(name, machine):
            raise ValueError(f"recipe {name} {obstacle}; drop it from --recipes")
    chosen = [
        name
        for name in RECIPES
        if obstacle_to_recipe(name, machine) is None and (not asked or name in asked)
    ]
    if not chosen:
        raise ValueError(
            f"{obstacle_to_recipe('tensorwise', machine)} for any FP8 recipe; run it on Ada, Hopper"
            " or newer"
        )
    return chosen


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    machine = Device.here()
    recipes = choose_recipes(arguments.recipes, machine)
    if arguments.load and arguments.model:
        raise ValueError("--load and --model both name the weights; drop one of them")
    read: Callable[[str], Tensor | None]
    if arguments.load:
        directory = local_directory(arguments.load)
        hf, read = load_config(str(directory)), open_model(directory)
    else:
        arguments.model = arguments.model or "Qwen2.5-0.5B"
        hf = model_config(arguments.model)
        read = random_weights(hf, arguments.seed).get
    variants = layouts(recipes, arguments.fp8)
    groups = initialize(variants[BF16], arguments.seed)
    batch = random_batch(arguments.tokens, arguments.length, hf.vocab_size, arguments.seed)
    report: dict[str, Any] = provenance() | {
        "machine": asdict(machine),
        "weights": arguments.load or f"{arguments.model}, random",
        "fp8": arguments.fp8,
        "recipes": recipes,
        "alignment": {name: RECIPES[name].alignment for name in recipes},
        "drift_tokens": arguments.tokens,
        "drift": measure_drift(hf, read, batch, variants, groups, max_tokens=8192),
    }
    publish(arguments, report, tables(report))
    shutdown()


if __name__ == "__main__":
    main()
