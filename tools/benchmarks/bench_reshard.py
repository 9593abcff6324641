"""Time a weight sync, trainer shards -> rollout engine, at the shapes of a real model, against the
bound of its links.

    python tools/benchmarks/bench_reshard.py --model Qwen2.5-7B --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --rollout-tensor-parallel-size 2 --json reshard.json

It starts TP x PP processes over gloo (over NCCL, one device each, where CUDA is available; that has
not been tried) with random weights of the model's shapes, and lets every rank receive its engine
shard by each path that the layout allows:

  gather    broadcast over PP and all-gather over TP per bucket, full Hugging Face tensors, cut
            into the engine's shards
  aligned   broadcast over PP only, local shards de-interleaved; needs rollout TP = trainer TP

`seconds` is the whole sync of the slowest rank, with one copy into the engine's memory. `bound` is
what plain collectives and one plain copy of the same bytes take in the same run, nothing else;
`share` is bound / seconds, only noise can exceed 100%. Both paths must deliver all names with
equal checksums, or the exit code is 1.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import JSON, interleave, model_flag, provenance, publish, seconds_of, spread, table
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import ParallelConfig
from ragen_mega.data.checksums import check_names, checksum
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.model import build_model, check_model, transformer_config
from ragen_mega.megatron.resharding import (
    BUCKET_BYTES,
    ReshardPlan,
    Traffic,
    all_gather,
    gather,
    serve,
)
from ragen_mega.megatron.weights import held
from ragen_mega.models.cuts import head_rows
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.published import model_config
from ragen_mega.ranks import collectives
from ragen_mega.ranks.launcher import run_ranks
from ragen_mega.report.metrics import write_json
from ragen_mega.rollout.engine import EngineShard

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FLAGS = (
    JSON,
    model_flag("Qwen2.5-0.5B"),
    flag("--tensor-model-parallel-size", "of the trainer", 2, metavar="TP"),
    flag("--pipeline-model-parallel-size", "of the trainer", 1, metavar="PP"),
    flag(
        "--rollout-tensor-parallel-size",
        "of the engine (default: the trainer's, both paths)",
        type=int,
        metavar="TP",
    ),
    flag("--dtype", "of the weights", "bfloat16", choices=DTYPES),
    flag("--num-layers", "of the model's (default: all; fewer where memory is short)", type=int),
    flag("--bucket-mb", "largest gathered bucket", BUCKET_BYTES // 2**20),
    flag("--repeats", "whose median counts", 5),
    flag("--worker", argparse.SUPPRESS, type=Path),
)


def configured(arguments: argparse.Namespace) -> PretrainedConfig:
    """Return the model whose shapes are sent."""
    layers = {"num_hidden_layers": arguments.num_layers} if arguments.num_layers else {}
    return model_config(arguments.model, **layers)


def plain(plan: ReshardPlan, memory: Tensor, engine_bytes: int, *, with_tp: bool) -> None:
    """Run the bound: the collectives of one sync on prepared buffers, and one copy as large as the
    engine's shard.
    """
    tp, pp = plan.groups.tp, plan.groups.pp
    largest = max(bucket.num_bytes for bucket in plan.buckets)
    flat = torch.empty(largest, dtype=torch.uint8, device=memory.device)
    size = tp.size() * largest if with_tp and tp.size() > 1 else 0
    gathered = torch.empty(size, dtype=torch.uint8, device=memory.device)
    for bucket in plan.buckets:
        part = flat[: bucket.num_bytes]
        if pp.size() > 1:
            dist.broadcast(part, src=dist.get_global_rank(pp, bucket.stage), group=pp)
        if len(gathered):
            all_gather(gathered[: tp.size() * bucket.num_bytes], part, tp)
    source = torch.empty_like(memory)
    for start in range(0, engine_bytes, len(memory)):
        count = min(len(memory), engine_bytes - start)
        memory[:count].copy_(source[:count])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the body of one rank: both paths and their bounds, interleaved; the same result on all
    ranks.
    """
    torch.set_num_threads(1)
    hf = configured(arguments)
    groups = initialize(arguments.layout)
    model = build_model(hf, transformer_config(hf, arguments.layout), groups)
    local = [(slot, parameter.detach()) for slot, parameter in held(model)]
    tensors = {slot.parameter: tensor for slot, tensor in local}
    for tensor in tensors.values():
        if tensor.dim() > 1:  # the others are the same on all tensor-parallel ranks
            tensor.normal_()
    plan = ReshardPlan.build(groups, local, bucket_bytes=arguments.bucket_mb * 2**20)
    rollout_tp = arguments.rollout_tensor_parallel_size
    engine_rank = collectives.rank() % rollout_tp
    traffic = {"gather": Traffic(), "aligned": Traffic()}

    def stream(path: str) -> Iterator[tuple[str, Tensor]]:
        traffic[path] = Traffic()
        if path == "aligned":
            return serve(plan, tensors, EngineShard(engine_rank, rollout_tp), traffic[path])
        return cut_stream(gather(plan, tensors, traffic[path]), hf, engine_rank, rollout_tp)

    paths = ["gather", "aligned"] if rollout_tp == groups.tp.size() else ["gather"]
    found: dict[str, int] = {}
    for path in paths:  # also opens the connections
        sums, sizes = {}, []
        for name, tensor in stream(path):
            sums[name] = checksum(tensor)
            sizes.append(tensor.nbytes)
        check_names(list(sums), {entry.slots[0].server for entry in plan.entries})
        if found and found != sums:
            raise ValueError("both paths must give the engine the same bits; compare their layouts")
        found = sums
    engine_bytes = sum(sizes)
    memory = torch.empty(max(sizes), dtype=torch.uint8, device=collectives.device())

    def deliver(path: str) -> None:
        # one copy, as an engine does; all into one place, because contents do not matter here
        for _, tensor in stream(path):
            memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def bound(path: str) -> None:
        plain(plan, memory, engine_bytes, with_tp=path == "gather")

    def slowest(work: Callable[[str], None], path: str) -> float:
        collectives.barrier()
        return max(collectives.gather_objects(seconds_of(lambda: work(path))))

    jobs = {path: partial(slowest, deliver, path) for path in paths}
    jobs |= {f"bound of {path}": partial(slowest, bound, path) for path in paths}
    seconds = interleave(jobs, arguments.repeats)
    return {
        "buckets": len(plan.buckets),
        "shard_bytes": plan.shard_bytes,
        "engine_shard_bytes": engine_bytes,
        "weights": len(found),
        "checksums_equal": True,
        "paths": {
            path: summary(traffic[path], engine_bytes, seconds[path], seconds[f"bound of {path}"])
            for path in paths
        },
    }


def summary(
    traffic: Traffic, engine_bytes: int, seconds: list[float], bound: list[float]
) -> dict[str, Any]:
    """Return the result of one path, from its repetitions."""
    median, bound_median = statistics.median(seconds), statistics.median(bound)
    return {
        "pp_bytes": traffic.pp_bytes,
        "tp_bytes": traffic.group_bytes["dense"],
        "seconds": median,
        "bound_seconds": bound_median,
        "gbytes_per_second": engine_bytes / median / 1e9,
        "bound_gbytes_per_second": engine_bytes / bound_median / 1e9,
        "share_of_bound": bound_median / median,
        "spread": spread(seconds),
        "all_seconds": seconds,
        "all_bound_seconds": bound,
    }


def tables(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        (
            path,
            *(f"{row[key] / 1e9:.2f}" for key in ("pp_bytes", "tp_bytes")),
            f"{row['seconds']:.3f}",
            f"{row['spread']['min']:.3f} - {row['spread']['max']:.3f}",
            f"{row['bound_seconds']:.3f}",
            f"{row['gbytes_per_second']:.2f}",
            f"{row['bound_gbytes_per_second']:.2f}",
            f"{row['share_of_bound']:.0%}",
        )
        for path, row in report["paths"].items()
    ]
    head = "path, PP GB, TP GB, seconds, spread, bound s, GB/s, bound GB/s, share".split(", ")
    lines = [
        f"{report['model']} {report['dtype']}: {report['num_layers']} of"
        f" {report['full_num_layers']} layers, {report['model_gbytes']:.2f} GB; TP {report['tp']} x"
        f" PP {report['pp']} -> rollout TP {report['rollout_tp']}, {report['buckets']} buckets,"
        f" {report['backend']} on {report['hardware']}",
        table(head, rows),
    ]
    if "aligned" in report["paths"]:
        ratio = report["paths"]["gather"]["seconds"] / report["paths"]["aligned"]["seconds"]
        lines.append(
            f"aligned is {ratio:.1f} times as fast as gather; {report['weights']} checksums equal"
            " on every rank"
        )
    return "\n\n".join(lines)


def complete(arguments: argparse.Namespace) -> None:
    """Set the flags that follow from others, `layout` (the trainer's) among them. Raises ValueError
    for sizes below 1.
    """
    if arguments.rollout_tensor_parallel_size is None:
        arguments.rollout_tensor_parallel_size = arguments.tensor_model_parallel_size
    sizes = [
        f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "rollout_tensor")
    ]
    for name in (*sizes, "bucket_mb", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}"
            )
    arguments.layout = ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        bf16=arguments.dtype == "bfloat16",
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    complete(arguments)
    if arguments.worker:  # one of the ranks that are started below
        result = measure(arguments)
        if collectives.is_main():
            write_json(arguments.worker, result)
        collectives.barrier()
        collectives.stop()
        return
    num_ranks = arguments.tensor_model_parallel_size * arguments.pipeline_model_parallel_size
    has_cuda = torch.cuda.is_available()
    if has_cuda and num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"TP x PP ({num_ranks}) must be at most the {torch.cuda.device_count()} CUDA devices;"
            " lower one"
        )
    hf = configured(arguments)
    check_model(hf, arguments.layout)
    head_rows(ModelShape.of(hf), 0, arguments.rollout_tensor_parallel_size)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        run_ranks(num_ranks, Path(__file__), *arguments.argv, "--worker", file)
        measured = json.loads(file.read_text())
    report = provenance() | {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "num_layers": hf.num_hidden_layers,
        "full_num_layers": model_config(arguments.model).num_hidden_layers,
        "model_gbytes": ModelShape.of(hf).num_parameters * DTYPES[arguments.dtype].itemsize / 1e9,
        "tp": arguments.tensor_model_parallel_size,
        "pp": arguments.pipeline_model_parallel_size,
        "rollout_tp": arguments.rollout_tensor_parallel_size,
        "backend": "nccl" if has_cuda else "gloo",
        **measured,
    }
    publish(arguments, report, tables(report))


if __name__ == "__main__":
    main()
