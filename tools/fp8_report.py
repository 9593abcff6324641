"""What FP8 costs and brings here: drift of log-probabilities against bfloat16, and the shapes from
which a recipe pays.

    python tools/fp8_report.py --json fp8.json --markdown fp8.md
    python tools/fp8_report.py --load Qwen/Qwen2.5-0.5B-Instruct --recipes tensorwise blockwise

Drift: log-probabilities of tokens that the bfloat16 policy itself samples, under every recipe that
this GPU computes, beside what bfloat16 loses against float32 and what Transformer Engine's layers
change in bfloat16. Time: forward and backward of two layers with the quantisation of their weights,
recipes taking turns with bfloat16 in one run, medians as ratios. Needs one CUDA GPU and Transformer
Engine; without them exit code 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from fp8_tables import BF16, drift, markdown, summarize
from torch import Tensor
from transformers import PretrainedConfig, Qwen2Config

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data import distributed
from ragen_mega.data.packing import pack, pad
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.model import build_policy_model, model_inputs, transformer_config
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.precision import RECIPES, Machine, obstacle_to_recipe, token_alignment
from ragen_mega.models.huggingface import load_config, local_directory, random_weights
from ragen_mega.report.console import fail
from ragen_mega.storage.model_readers import open_model

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))  # for `benchmarks`, not installed

SIZES = {
    "qwen2.5-0.5b": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
    "qwen2.5-1.5b": dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "qwen2.5-3b": dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
    ),
}
TIMED_LAYERS = 2
ROWS_OF_LOGITS = 512


def layouts(recipes: Sequence[str], fp8: str) -> dict[str, ParallelConfig]:
    """Name -> what computes: the reference first, then the yardsticks, then the recipes."""
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


def random_batch(num_tokens: int, length: int, vocab_size: int, seed: int) -> TokenBatch:
    """`num_tokens` positions of random tokens in trajectories of `length` positions, every label
    sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for start in range(0, num_tokens, length):
        tokens = torch.randint(
            0, vocab_size, (min(length, num_tokens - start) + 1,), generator=generator
        ).tolist()
        trajectory = Trajectory(group_id=len(trajectories))
        trajectory.append_observation(tokens[:1])
        trajectory.append_action(Completion(tokens[1:], [0.0] * (len(tokens) - 1), "length"))
        trajectories.append(trajectory)
    return pack(trajectories)


def sample_labels(policy: MegatronPolicy, batch: TokenBatch) -> TokenBatch:
    """The batch with labels that the policy samples at each position."""
    module = policy.module

    def sample(_: TokenBatch, output: Tensor) -> Tensor:
        weight = module.head_weight().t()
        rows = module.head_input(output).split(ROWS_OF_LOGITS)
        return (
            torch.cat([(row @ weight).float().softmax(-1).multinomial(1) for row in rows])
            .flatten()
            .float()
        )

    return batch.with_fields(labels=policy.trainer.per_token(batch, sample))


def measure_drift(
    hf: PretrainedConfig,
    read: Callable[[str], Tensor | None],
    batch: TokenBatch,
    variants: Mapping[str, ParallelConfig],
    groups: Any,
    max_tokens: int,
) -> dict[str, dict[str, float]]:
    """Variant -> statistics against the first one, all with the same weights and on tokens that the
    first one samples.
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
            print(
                f"{name:24s} "
                + "  ".join(f"{key} {value:.2e}" for key, value in rows[name].items()),
                flush=True,
            )
        del policy
        _free()
    return rows


def timed_model(hidden: int) -> PretrainedConfig:
    """Layers of a width, with Qwen2.5's proportions and next to no vocabulary."""
    heads = max(1, hidden // 128)
    return Qwen2Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=TIMED_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, max(1, heads // 4)),
        tie_word_embeddings=True,
    )


def measure_ratios(
    tokens: Sequence[int],
    hidden: int,
    length: int,
    variants: Mapping[str, ParallelConfig],
    groups: Any,
    repetitions: int,
) -> list[dict[str, Any]]:
    """For each number of tokens the median milliseconds of every variant and their ratio to the
    first one's.
    """
    hf, device, rows = timed_model(hidden), distributed.device(), []
    models = {
        name: build_policy_model(hf, transformer_config(hf, parallel), groups)
        for name, parallel in variants.items()
    }
    from benchmarks.timing import Clock

    clock = Clock(device.type)
    for model in models.values():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    for num_tokens in tokens:
        batch = random_batch(num_tokens, length, hf.vocab_size, seed=0)
        inputs = {
            name: model_inputs(pad(batch, token_alignment(parallel)).to(device))
            for name, parallel in variants.items()
        }

        def step(name: str) -> None:
            models[
                name
                # weights are quantised again, as in the first microbatch of a step
            ].set_is_first_microbatch()
            output = models[name](**inputs[name])
            output.backward(torch.ones_like(output))

        readings: dict[str, list[Callable[[], float]]] = {name: [] for name in models}
        for repetition in range(3 + repetitions):
            for name, model in models.items():
                model.zero_grad(set_to_none=True)
                reading = clock.measure(step, name)
                if repetition >= 3:
                    readings[name].append(reading)
        clock.synchronize()
        medians = {
            name: statistics.median(read() for read in reads) for name, reads in readings.items()
        }
        base = next(iter(medians.values()))
        ratios = {name: value / base for name, value in medians.items()}
        rows.append(
            {"tokens": num_tokens, "hidden": hidden, "milliseconds": medians, "ratios": ratios}
        )
        print(
            f"{num_tokens:7d} tokens x {hidden:5d}  "
            + "  ".join(f"{n} {r:.2f}" for n, r in ratios.items()),
            flush=True,
        )
    del models
    _free()
    return rows


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--model",
        choices=sorted(SIZES),
        default="qwen2.5-0.5b",
        help="shape of a model of random weights",
    )
    weights.add_argument(
        "--load",
        help="Hugging Face name or directory; drift of random weights says little about it",
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=sorted(RECIPES), help="default: all that this GPU computes"
    )
    parser.add_argument(
        "--fp8", choices=("hybrid", "e4m3"), default="hybrid", help="format, as in training"
    )
    parser.add_argument("--drift-tokens", type=int, default=8192)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[512, 2048, 8192, 32768],
        help="of a timed microbatch",
    )
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[896, 2048, 4096], help="widths, multiples of 128"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a trajectory")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--markdown", type=Path, help="and as tables here")
    return parser.parse_args()


def choose_recipes(asked: Sequence[str] | None, machine: Machine) -> list[str]:
    """The recipes to measure. Raises ValueError if the machine computes none of them, or not one
    that was named.
    """
    if machine.capability is None or machine.transformer_engine is None:
        raise ValueError(
            "the FP8 report needs a CUDA GPU and Transformer Engine; run it on one after pip"
            " install --no-build-isolation -e '.[h100]' (tools/doctor.py --for h100 says what is"
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


def main() -> None:
    arguments, machine = parse_arguments(), Machine.here()
    try:
        recipes = choose_recipes(arguments.recipes, machine)
        if arguments.load:
            directory = local_directory(arguments.load)
            hf, read = load_config(str(directory)), open_model(directory)
        else:
            sizes = SIZES[arguments.model]
            hf = Qwen2Config(
                vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768, **sizes
            )
            read = random_weights(hf, arguments.seed).get
        variants = layouts(recipes, arguments.fp8)
        groups = initialize(variants[BF16], arguments.seed)
    except (ValueError, OSError) as error:
        fail(str(error))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    batch = random_batch(arguments.drift_tokens, arguments.length, hf.vocab_size, arguments.seed)
    timed = {
        name: parallel for name, parallel in variants.items() if name == BF16 or name in recipes
    }
    software = {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
    report: dict[str, Any] = {
        "machine": asdict(machine) | software,
        "commit": commit or "unknown",
        "weights": arguments.load or f"{arguments.model}, random",
        "fp8": arguments.fp8,
        "recipes": recipes,
        "alignment": {name: RECIPES[name].alignment for name in recipes},
        "drift_tokens": arguments.drift_tokens,
        "drift": measure_drift(hf, read, batch, variants, groups, max_tokens=8192),
        "time": [
            row
            for hidden in arguments.hidden
            for row in measure_ratios(
                arguments.tokens, hidden, arguments.length, timed, groups, arguments.repetitions
            )
        ],
    }
    report["break_even"] = summarize(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(report))
    print(markdown(report), end="")
    shutdown()


if __name__ == "__main__":
    main()
