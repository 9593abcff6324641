"""The numbers and tables of tools/fp8_report.py that need no GPU: drift, break-even shapes,
Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

BF16 = "bf16"
"""The row that the others are compared with: Transformer Engine's layers without FP8."""


def drift(reference: Tensor, other: Tensor) -> dict[str, float]:
    """Statistics of `other - reference`, log-probabilities [N] of tokens that the reference
    sampled.

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
    rank = math.ceil(
        0.99 * distance.numel()
    )  # the smallest distance that 99% of the tokens do not exceed
    return {
        "mean": float(difference.mean()),
        "mean_abs": float(distance.mean()),
        "p99_abs": float(distance.kthvalue(rank).values),
        "max_abs": float(distance.max()),
        "kl": float((difference.exp() - 1 - difference).mean()),
    }


def break_even_tokens(ratios: Mapping[tuple[int, int], float]) -> dict[int, int | None]:
    """Hidden size -> fewest measured tokens from which on every ratio (time over bfloat16's) is
    below 1, None if none is.

    `ratios` maps (tokens, hidden size) to the ratio.
    """
    answer: dict[int, int | None] = {}
    for hidden in sorted({hidden for _, hidden in ratios}):
        answer[hidden] = None
        for tokens in sorted((tokens for tokens, width in ratios if width == hidden), reverse=True):
            if not ratios[tokens, hidden] < 1:
                break
            answer[hidden] = tokens
    return answer


def break_even_size(ratios: Mapping[tuple[int, int], float]) -> int | None:
    """Smallest measured tokens x hidden size from which on every ratio is below 1, None if that of
    the largest is not.
    """
    losing = [tokens * hidden for (tokens, hidden), ratio in ratios.items() if not ratio < 1]
    paying = [
        tokens * hidden for tokens, hidden in ratios if tokens * hidden > max(losing, default=0)
    ]
    return min(paying, default=None)


def summarize(report: dict[str, Any]) -> dict[str, Any]:
    """The break-even shapes of every recipe in the report's table of times."""
    tables = {
        name: {(row["tokens"], row["hidden"]): row["ratios"][name] for row in report["time"]}
        for name in report["recipes"]
    }
    return {
        name: {
            "tokens_by_hidden": break_even_tokens(table),
            "tokens_x_hidden": break_even_size(table),
        }
        for name, table in tables.items()
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    machine = report["machine"]
    lines = [
        "# FP8 report",
        "",
        (
            f"{machine['device']}, CUDA {machine['cuda']}, torch {machine['torch']}, Transformer"
            f" Engine {machine['transformer_engine']}; commit {report['commit']}; FP8 format"
            f" {report['fp8']}."
        ),
        "",
        f"## Drift of log-probabilities against {BF16}",
        "",
        (
            f"{report['drift_tokens']} tokens sampled by the {BF16} policy; weights:"
            f" {report['weights']}."
        ),
        "",
        "| | mean | mean abs | p99 abs | max abs | KL |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in report["drift"].items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.2e}" for value in row.values()) + " |")
    recipes = report["recipes"]
    lines += [
        "",
        "## Time of forward and backward over that of bfloat16",
        "",
        f"| tokens | hidden | bf16 ms | {' | '.join(recipes)} |",
        "|---|---|---|" + "---|" * len(recipes),
    ]
    for row in report["time"]:
        ratios = " | ".join(f"{row['ratios'][name]:.2f}" for name in recipes)
        lines.append(
            f"| {row['tokens']} | {row['hidden']} | {row['milliseconds'][BF16]:.2f} | {ratios} |"
        )
    lines += [
        "",
        "## From which shape on a recipe pays",
        "",
        "| recipe | tokens padded to | tokens, by hidden size | tokens x hidden |",
        "|---|---|---|---|",
    ]
    for name, row in report["break_even"].items():
        by_hidden = ", ".join(
            f"{hidden}: {tokens or 'never'}" for hidden, tokens in row["tokens_by_hidden"].items()
        )
        lines.append(
            f"| {name} | {report['alignment'][name]} | {by_hidden} |"
            f" {row['tokens_x_hidden'] or 'never'} |"
        )
    return "\n".join(lines) + "\n"
