"""Time optimizer steps of the trainer alone, without any engine: seconds, tokens a second, MFU and
memory beside the plan.

    python tools/benchmarks/bench_update.py --json update.json   # prime-rl's published setting
    python tools/benchmarks/bench_update.py --model Qwen2.5-3B --length 4096 --trajectories 4 \\
        -- --fp8 hybrid --advantage-estimator gae

Random weights of the model's shape train on trajectories of random tokens, all of which count as
sampled. With --prompt they have so many first tokens in common, which are computed once, in one
microbatch, and only the others are sampled. Flags after -- go to the training program; with an
estimator that needs a critic, the critic is there and trains too. With `--lora-rank` a second actor
trains all weights in turn with the adapters, and the memory of both is not said. `seconds` is the
wall clock of one optimizer step of each model, median of the repetitions. Tokens a second, of all
trajectories, and MFU are the actor's; MFU counts causal attention and a common prompt once and no
recomputation, as prime-rl's benchmark does. `memory_gib` is what the process holds of the device at
the end, which is its peak, since torch returns nothing; `planned_gib` is the largest training phase
of `ragen-mega plan`.

prime-rl's own number is benchmarks/baselines/benchmark-1xh100-Qwen--Qwen3-0.6B-rl-full-1gpu-
Recompute-flash_attention_3-16384-cp1-ep1.json in its repository: Qwen3-0.6B, two microbatches of
16,384 tokens, all layers recomputed, one H100: 11.9 thousand tokens a second, MFU 11.1%, 12.5 GiB;
its step of 32,768 tokens is said to take 1.99 s.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from bench_step import bfloat16_peak
from fp8_report import free, random_batch
from harness import JSON, interleave, model_flag, provenance, publish, seconds_of, spread, table
from transformers import PretrainedConfig

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import random_weights
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.memory import GIB, Setting, training
from ragen_mega.planning.published import model_config
from ragen_mega.ranks import collectives

ALL_WEIGHTS = "actor, all weights"

FLAGS = (
    JSON,
    model_flag("Qwen3-0.6B"),
    flag("--length", "tokens of a trajectory, which is a microbatch", 16384),
    flag("--trajectories", "of an optimizer step", 2),
    flag("--prompt", "first tokens of all trajectories; 1 if they have none in common", 1),
    flag("--repetitions", "that count", 5),
    ("training", {"nargs": "*", "metavar": "-- FLAGS", "help": "of the training program"}),
)


def jobs(
    arguments: argparse.Namespace, config: StarPOConfig, hf: PretrainedConfig
) -> dict[str, Callable[[], float]]:
    """Build the models with random weights; returns name -> an optimizer step on random tokens,
    which says its seconds.
    """
    length, seed = arguments.length, config.train.seed
    common = (hf, initialize(config.parallel, seed), config.parallel, config.train, config.loss)
    positions = arguments.trajectories * length
    batch = random_batch(positions, length, hf.vocab_size, seed, prompt=arguments.prompt)
    mask = batch.loss_mask.float()
    batch = batch.with_fields(advantages=mask, values=0 * mask, returns=mask)
    weights = random_weights(hf, seed, collectives.device().type)
    lora, models = config.lora, dict[str, MegatronPolicy | MegatronCritic]()
    actor = models["actor"] = MegatronPolicy(*common, temperature=1.0, lora=lora)
    actor.load_weights(weights.get)
    if lora.rank:
        models[ALL_WEIGHTS] = MegatronPolicy(*common, temperature=1.0)
        models[ALL_WEIGHTS].load_weights(weights.get)
    if config.advantage.uses_critic:
        base = actor.chunks if lora.rank else None
        models["critic"] = MegatronCritic(*common, lora=lora, base=base)
        if base is None:
            models["critic"].load_weights(weights.get)
    steps = {name: partial(model.update, batch) for name, model in models.items()}
    return {name: partial(seconds_of, step) for name, step in steps.items()}


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    length, hf = arguments.length, model_config(arguments.model)
    on_host, shape = not torch.cuda.is_available(), ModelShape.of(hf)
    shared, count = arguments.prompt * (arguments.prompt > 1), arguments.trajectories
    computed = shared + count * (length - shared) if shared else length
    tokens = ["--max-context-length", str(length), "--max-tokens-per-microbatch", str(computed)]
    tokens += ["--shared-prefixes", "on"] * bool(shared)
    config = parse(["--recipe", "none", *["--bf16"][on_host:], *tokens, *arguments.training])
    work = jobs(arguments, config, hf)
    free()  # the random weights
    readings = interleave(work, arguments.repetitions, warmups=2)
    shutdown()
    seconds = {name: spread(of_model) for name, of_model in readings.items()}
    median, cost, peak = seconds["actor"]["median"], shape.cost, bfloat16_peak()
    # a position attends to half of its trajectory on average, one behind a prompt to more
    operations = count * (length - shared) * cost.flops(length + shared)
    operations = (operations + shared * cost.flops(shared, 0.0)) / median
    sharing = count * length / computed if shared else 1.0
    setting = Setting.from_config(config, 1, sharing=sharing, on_host=on_host)
    free_bytes, all_bytes = (0, 0) if on_host else torch.cuda.mem_get_info()
    report = provenance() | {
        "model": arguments.model,
        "length": arguments.length,
        "trajectories": arguments.trajectories,
        "prompt": arguments.prompt,
        "training_flags": arguments.training,
        "seconds": seconds,
        "tokens_per_second": count * length / median,
        "teraflops": operations / 1e12,
        "mfu": peak and operations / peak,
    }
    if ALL_WEIGHTS in seconds:
        report["times_as_fast"] = seconds[ALL_WEIGHTS]["median"] / median
    else:
        planned = max(sum(terms.values()) for terms in training(shape, setting).values())
        report |= {"memory_gib": (all_bytes - free_bytes) / GIB, "planned_gib": planned / GIB}
    rows = [(name, f"{value:.4g}") for name, value in report.items() if isinstance(value, float)]
    publish(arguments, report, table((arguments.model, "of the actor"), rows))


if __name__ == "__main__":
    main()
