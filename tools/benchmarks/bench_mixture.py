"""Time the experts of one layer of a mixture, forward and backward, against their own products.

    python tools/benchmarks/bench_mixture.py --tokens 8192 --json mixture.json

`layer` is megatron-core's layer of experts as training runs it on one device: router, permutation,
the products of each expert, and the way back. `products` are as many operations as two plain
products, each with its two gradients, of all copies of the tokens with one matrix; `share` is
products / layer. Weights and tokens are random, so every expert gets about as many tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from harness import (
    JSON,
    interleave,
    milliseconds_of,
    model_flag,
    provenance,
    publish,
    spread,
    table,
)

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.model import build_model, transformer_config
from ragen_mega.planning.published import model_config
from ragen_mega.ranks import collectives

VOCAB = 1024
"""Words of the model around the layer, which is never run."""
FLAGS = (
    JSON,
    model_flag("Qwen3-30B-A3B"),
    flag("--tokens", "of a microbatch", 8192),
    flag("--repetitions", "whose median counts", 10),
)


def build(arguments: argparse.Namespace) -> tuple[dict[str, Callable[[], None]], int]:
    """Return both works, and the operations of each. Raises ValueError for a model without
    experts.
    """
    hf = model_config(arguments.model, num_hidden_layers=1, vocab_size=VOCAB)
    layout = ParallelConfig(bf16=True)
    config = transformer_config(hf, layout)
    if not config.num_moe_experts:
        raise ValueError(f"--model must be a mixture of experts, and {arguments.model} is none")
    experts = build_model(hf, config, initialize(layout))[0].get_submodule("decoder.layers.0.mlp")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    draw = partial(torch.randn, dtype=torch.bfloat16, device=collectives.device())
    x = draw(arguments.tokens, 1, config.hidden_size, requires_grad=True)
    gradient, copies = torch.randn_like(x), arguments.tokens * config.moe_router_topk
    hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
    factors = [
        (draw(copies, k), draw(k, n), draw(copies, n))
        for k, n in ((hidden, 2 * ffn), (ffn, hidden))
    ]

    def layer() -> None:
        experts(x)[0].backward(gradient)

    def products() -> None:
        for rows, weight, gradients in factors:
            _ = rows @ weight, gradients @ weight.t(), rows.t() @ gradients

    return {"layer": layer, "products": products}, 3 * 2 * copies * 3 * hidden * ffn


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    works, operations = build(arguments)
    device = collectives.device().type
    jobs = {name: partial(milliseconds_of, work, device) for name, work in works.items()}
    found = interleave(jobs, arguments.repetitions, warmups=2)
    shutdown()
    milliseconds = {name: statistics.median(times) for name, times in found.items()}
    share = milliseconds["products"] / milliseconds["layer"]
    report = provenance() | {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "operations": operations,
        "milliseconds": {name: spread(times) for name, times in found.items()},
        "share_of_products": share,
    }
    rows = [
        (name, f"{ms:.2f}", f"{operations / ms / 1e9:.1f}") for name, ms in milliseconds.items()
    ]
    text = (
        f"{arguments.model}, {arguments.tokens} tokens, experts of one layer on"
        f" {report['hardware']}: {share:.0%} of its products' rate\n\n"
    )
    text += table(("work", "ms", "TFLOP/s"), rows)
    publish(arguments, report, text)


if __name__ == "__main__":
    main()
