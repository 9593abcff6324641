"""Predict the measurements of tools/gpu_check.sh on one GPU, from the plan and from rooflines:

    python tools/benchmarks/gpu_predict.py > docs/benchmarks/gpu_day_predicted.md

The report of tools/gpu_check.sh sets measured figures beside this table. A row names a figure, its
place in report.json, and a prediction for each kind of GPU. Nothing here was fitted to a GPU of
ours: kernels are predicted to reach SHARE of the copy bandwidth, which is COPY of the data sheet's.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

from bench_step import NUM_TURNS, TARGET_MODEL, training_flags

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import Machine, find_hardware
from ragen_mega.planning.memory import GIB, Setting, plan
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import Cut, Sizes, default_play, product, step_seconds

GPUS = ("H100", "H200")
COPY = 0.9
"""Bytes read and written by a copy on the device, over the memory's peak."""
SHARE = 0.9
"""Share of the copy bandwidth that a kernel over rows reaches: the aim of the kernels."""
RESHARD = 0.9
"""Share of plain copies that a weight sync reaches."""
ROWS, VOCAB = 8192, 151936
"""Logits of which the figures are."""
LOGITS = {
    "logprob+entropy forward": 1,
    "logprob+entropy backward": 2,
    "policy loss forward+backward": 2,
}
"""Job over bfloat16 logits -> how often it reads or writes all of them."""
WIDTHS = (896, 3584)
"""Widths of Qwen2.5-0.5B and 7B."""
MISMATCH = 0.5
"""Assumed: the largest difference of log-probabilities of two engines in bfloat16."""
RESPONSE = 68
"""Sampled tokens of a turn in bench_step.py: a random model hardly ever ends early."""
PROMPT = 119.0
"""Tokens before each turn there, counted on a CPU: 593 of Sokoban in five turns."""
HEAD = """# The GPU day, predicted

Written by `python tools/benchmarks/gpu_predict.py` before any GPU was there; nothing was measured.
Seconds of a step are those of [the predictor](../predictor.md), whose interval is wide. Times of
kernels are rooflines: {share:.0%} of the bandwidth of a copy, which is taken as {copy:.0%} of the
data sheet's.
`tools/gpu_check.sh` prints what it measures beside these numbers.
"""


Figures = Iterator[tuple[str, str, float]]
"""Figure, its place in report.json, prediction."""


def kernels(machine: Machine) -> Figures:
    """Predict the kernel benchmark."""
    copy = COPY * machine.hardware.memory
    one_pass = 1e3 * 2.0 * ROWS * VOCAB / (SHARE * copy)  # bfloat16 logits, in milliseconds
    ours = "bench_kernels/results/case={}&N={}&V={}{}&provider=ragen/milliseconds"
    yield "bytes a second of a copy", "bench_kernels/ceilings/copy_bytes_per_second", copy
    for job, passes in LOGITS.items():
        yield f"{job}, ms", ours.format(job, ROWS, VOCAB, ""), passes * one_pass
    for width in WIDTHS:
        gemms = 3e3 * product(machine, ROWS, width, VOCAB, Cut())
        place = f"bench_kernels/ceilings/gemms_ms/{ROWS}x{VOCAB}x{width}"
        yield f"three products of width {width}, ms", place, gemms
        place = ours.format("linear policy loss", ROWS, VOCAB, f"&H={width}&active=1.0")
        yield f"linear policy loss of width {width}, ms", place, gemms + 2 * one_pass


def steps(machine: Machine, keep: float) -> Figures:
    """Predict a StarPO step of tools/benchmarks/bench_step.py that keeps a share of the groups."""
    asked = SimpleNamespace(
        num_groups=8,
        group_size=16,
        response_length=RESPONSE,
        steps=4,
        rollout_engine="sglang",
        output=Path("bench_step"),
        training=["--bf16"],
    )
    config = parse(training_flags(asked, Path("model"), keep))
    shape = ModelShape.of(model_config(TARGET_MODEL))
    play = replace(default_play(config, float(RESPONSE)), turns=NUM_TURNS, prompt_tokens=PROMPT)
    phases = step_seconds(machine, shape, config, 1, play)
    seconds = {name: sum(terms.values()) for name, terms in phases.items()}
    run = f"{'step' if keep < 1 else 'step_all'}/runs/0"
    sampled = asked.num_groups * asked.group_size * play.sampled
    yield f"step that keeps {keep:.0%}, s", f"{run}/seconds", sum(seconds.values())
    yield "- of it weight sync, s", f"{run}/phases/sync/seconds", seconds["sync"]
    yield "- of it rollout, s", f"{run}/phases/rollout/seconds", seconds["rollout"]
    update = seconds["update actor"] + seconds["update critic"]
    yield "- of it update, s", f"{run}/phases/update/seconds", update
    sizes, length = Sizes.of(shape), play.length
    flops = sizes.flops(length, play.sampled / length) + sizes.flops(length, 0.0)
    flops *= asked.group_size * max(1, round(keep * asked.num_groups)) * length
    yield "- TFLOP/s of the update", f"{run}/update_teraflops", flops / update / 1e12
    yield "- MFU of the update", f"{run}/mfu", flops / update / machine.hardware.bf16
    rate = 2e-9 * shape.num_parameters / seconds["sync"]
    yield "- weight sync, GB/s", f"{run}/sync_gbytes_per_second", rate
    yield from memory(machine, shape, config, run)
    rate = sampled / seconds["rollout"]
    yield "- sampled tokens a second", f"{run}/rollout_tokens_per_second", rate
    yield "- largest difference of log-probabilities", f"{run}/mismatch", MISMATCH


def memory(machine: Machine, shape: ModelShape, config: StarPOConfig, run: str) -> Figures:
    """Predict the free memory as soon as the server has the weights, and while it sleeps between
    updates.
    """
    phases = plan(shape, Setting.from_config(config, 1))
    passing = ("activations", "workspace", "fragmentation")
    asleep = sum(size for name, size in phases["train actor"].items() if name not in passing)
    awake = sum(size for name, size in phases["sync"].items() if name != "buffers")
    for what, held in (("awake", awake), ("asleep", asleep)):
        free = machine.hardware.gpu_gib - held / GIB
        yield f"- GiB free, server {what}", f"{run}/{what}_free_gib", free


def reshard(machine: Machine) -> Figures:
    """Predict the weight sync of a 7B model: every byte is gathered into a bucket, then copied."""
    rate = RESHARD * COPY * machine.hardware.memory / 4 / 1e9
    yield "weight sync of 7B, GB/s", "reshard/paths/gather/gbytes_per_second", rate
    yield "- share of plain copies", "reshard/paths/gather/share_of_bound", RESHARD / 2


def table() -> list[str]:
    """Return the rows of the table, its head first."""
    columns = []
    for name in GPUS:
        machine = Machine(find_hardware(name))
        rows = (kernels(machine), steps(machine, 0.25), reshard(machine), steps(machine, 1.0))
        columns.append([*chain(*rows)])
    lines = [f"| figure | place in report.json | {' | '.join(GPUS)} |"]
    lines.append("|---|---|" + "---|" * len(GPUS))
    for row in zip(*columns, strict=True):
        figure, place, _ = row[0]
        values = " | ".join(f"{value:.3g}" for *_, value in row)
        lines.append(f"| {figure} | `{place}` | {values} |")
    return lines


if __name__ == "__main__":
    print(HEAD.format(share=SHARE, copy=COPY))
    print("\n".join(table()))
