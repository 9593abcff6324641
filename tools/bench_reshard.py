"""Time a weight sync, trainer shards -> rollout engine, at the shapes of Qwen2.5 0.5B to 72B,
against the bound of its links.

    python tools/bench_reshard.py --model Qwen2.5-7B --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2 \\
        --rollout-tensor-parallel-size 2 --json reshard.json

It starts TP x PP processes over gloo (over NCCL, one device each, where CUDA is available; that has
not been tried) with random weights of the model's shapes, and lets every rank receive its engine
shard by each path that the layout allows:

  gather    broadcast over PP and all-gather over TP per bucket, full Hugging Face tensors, cut into the engine's shards
  aligned   broadcast over PP only, local shards de-interleaved; needs rollout TP = trainer TP

`seconds` is the whole sync of the slowest rank, with one copy into the engine's memory. `bound` is
what plain collectives and one plain copy of the same bytes take in the same run, nothing else;
`share` is bound / seconds, 100% cannot be beaten but by noise. Where the memory is short, fewer
layers and then fewer words are measured; the output says how many. Both paths must deliver all
names with equal checksums, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from reshard_shapes import SHAPES, fitting_config, model_config, model_elements
from torch import Tensor
from transformers import Qwen2Config

from ragen_mega.config import ParallelConfig
from ragen_mega.data import distributed
from ragen_mega.data.checksums import check_checksums, check_names, checksums
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.reshard_plan import BUCKET_BYTES, ReshardPlan
from ragen_mega.megatron.resharding import Traffic, aligned, all_gather, gather
from ragen_mega.models.layout import Slot, model_slots, shard
from ragen_mega.models.server_cut import cut_stream, engine_name, head_rows
from ragen_mega.models.shape import ModelShape
from ragen_mega.report.console import fail

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def local_weights(hf: Qwen2Config, groups: Any, dtype: torch.dtype) -> list[tuple[Slot, Tensor]]:
    """This rank's part of a model with random weights, in Megatron's layout."""
    stage, stages, tp = groups.pp.rank(), groups.pp.size(), groups.tp.size()
    per_stage = hf.num_hidden_layers // stages
    generator = torch.Generator(device=distributed.device()).manual_seed(distributed.rank())
    local = []
    for slot in model_slots(ModelShape.of(hf)):
        if slot.layer is None:
            owner = 0 if "embedding" in slot.key else stages - 1
        else:
            owner = slot.layer // per_stage
        if owner == stage:
            full = [torch.empty(shape, device="meta") for shape in slot.shapes]
            shape = shard(slot, full, 0, tp).shape
            weight = torch.empty(shape, dtype=dtype, device=distributed.device()).normal_(
                generator=generator
            )
            if slot.cut == "replicated":
                weight.fill_(1.0)  # the same on all tensor-parallel ranks
            local.append((slot, weight))
    return local


def timed(work: Callable[[], None]) -> float:
    """Seconds of the slowest rank."""
    distributed.barrier()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return max(distributed.gather_objects(time.perf_counter() - start))


def plain(plan: ReshardPlan, memory: Tensor, engine_bytes: int, *, with_tp: bool) -> None:
    """The bound: the collectives of one sync on buffers that lie ready, and one copy as large as
    the engine's shard.
    """
    tp, pp = plan.groups.tp, plan.groups.pp
    largest = max(bucket.num_bytes for bucket in plan.buckets)
    flat = torch.empty(largest, dtype=torch.uint8, device=memory.device)
    gathered = torch.empty(
        tp.size() * largest if with_tp and tp.size() > 1 else 0,
        dtype=torch.uint8,
        device=memory.device,
    )
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


def deliver(shards: Iterator[tuple[str, Tensor]], memory: Tensor) -> None:
    """Copy every shard once, as an engine does; into one place, because its contents do not matter
    here.
    """
    for _, tensor in shards:
        place = (
            memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        )
        place.copy_(tensor)


def measure(arguments: argparse.Namespace, hf: Qwen2Config) -> dict[str, Any]:
    """Body of one rank: both paths and their bounds, interleaved; the same result on all ranks."""
    torch.set_num_threads(1)
    parallel = parallel_config(arguments)
    groups = initialize(parallel)
    local = local_weights(hf, groups, DTYPES[arguments.dtype])
    tensors = {slot.parameter: tensor for slot, tensor in local}
    plan = ReshardPlan.build(groups, local, bucket_bytes=arguments.bucket_mb * 2**20)
    rollout_tp = arguments.rollout_tensor_parallel_size
    engine_rank = distributed.rank() % rollout_tp
    traffic = {"gather": Traffic(), "aligned": Traffic()}

    def stream(path: str) -> Iterator[tuple[str, Tensor]]:
        traffic[path] = Traffic()
        if path == "aligned":
            return aligned(plan, tensors, rollout_tp, traffic[path])
        return cut_stream(gather(plan, tensors, traffic[path]), hf, engine_rank, rollout_tp)

    paths = ["gather", "aligned"] if rollout_tp == groups.tp.size() else ["gather"]
    found, engine_bytes, largest = {}, 0, 0
    for path in paths:  # also opens the connections
        sums, sizes = {}, []
        for name, tensor in stream(path):
            sums |= checksums([(name, tensor)])
            sizes.append(tensor.numel() * tensor.element_size())
        check_names(list(sums), {engine_name(name) for name in plan.names})
        check_checksums(found or sums, sums)
        found, engine_bytes, largest = sums, sum(sizes), max(sizes)
    memory = torch.empty(largest, dtype=torch.uint8, device=distributed.device())
    seconds: dict[str, list[float]] = {
        f"{path}{kind}": [] for path in paths for kind in ("", "_bound")
    }
    for _ in range(arguments.repeats):
        for path in paths:
            seconds[path].append(timed(lambda: deliver(stream(path), memory)))
            seconds[f"{path}_bound"].append(
                timed(lambda: plain(plan, memory, engine_bytes, with_tp=path == "gather"))
            )
    return {
        "buckets": len(plan.buckets), "shard_bytes": plan.shard_bytes, "engine_shard_bytes": engine_bytes,
        "weights": len(found), "checksums_equal": True,
        "paths": {path: summary(traffic[path], engine_bytes, seconds[path], seconds[f"{path}_bound"]) for path in paths},
    }  # fmt: skip


def summary(
    traffic: Traffic, engine_bytes: int, seconds: list[float], bound: list[float]
) -> dict[str, Any]:
    """Of one path, from repeats."""
    median, bound_median = statistics.median(seconds), statistics.median(bound)
    return {
        "pp_bytes": traffic.pp_bytes, "tp_bytes": traffic.tp_bytes, "seconds": median, "bound_seconds": bound_median,
        "gbytes_per_second": engine_bytes / median / 1e9, "bound_gbytes_per_second": engine_bytes / bound_median / 1e9,
        "share_of_bound": bound_median / median, "all_seconds": seconds, "all_bound_seconds": bound,
    }  # fmt: skip


def parallel_config(arguments: argparse.Namespace) -> ParallelConfig:
    """The trainer's layout."""
    return ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
    )


def table(report: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        (
            f"{report['model']} {report['dtype']}: {report['num_layers']} of"
            f" {report['full_num_layers']} layers, {report['vocab_size']} of"
            f" {report['full_vocab_size']} words, {report['model_gbytes']:.2f} GB; TP"
            f" {report['tp']} x PP {report['pp']} -> rollout TP {report['rollout_tp']},"
            f" {report['buckets']} buckets, {report['backend']}"
        ),
        "path      PP GB   TP GB   seconds   bound s    GB/s   bound GB/s   share",
    ]
    for path, row in report["paths"].items():
        lines.append(
            f"{path:8s} {row['pp_bytes'] / 1e9:6.2f}  {row['tp_bytes'] / 1e9:6.2f} "
            f" {row['seconds']:8.3f}  {row['bound_seconds']:8.3f}  {row['gbytes_per_second']:6.2f} "
            f" {row['bound_gbytes_per_second']:11.2f}  {row['share_of_bound']:6.0%}"
        )
    if "aligned" in report["paths"]:
        ratio = report["paths"]["gather"]["seconds"] / report["paths"]["aligned"]["seconds"]
        lines.append(
            f"aligned is {ratio:.1f} times as fast as gather; {report['weights']} checksums equal"
            " on every rank"
        )
    return "\n".join(lines)


def launch(argv: list[str], num_ranks: int) -> dict[str, Any]:
    """Run this file on `num_ranks` ranks and return rank 0's result. Raises RuntimeError with their
    last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, *argv, "--worker", str(result),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = re.findall(r"(?:ValueError|RuntimeError|OutOfMemoryError): (.+)", done.stderr)
            raise RuntimeError(errors[0] if errors else f"the ranks failed: {done.stderr[-2000:]}")
        return json.loads(result.read_text())


def default_memory(num_ranks: int) -> int:
    """Bytes of all ranks: a part of what is free on their devices, or in memory and then no more
    than takes minutes.
    """
    if torch.cuda.is_available():
        return round(0.6 * sum(torch.cuda.mem_get_info(index)[0] for index in range(num_ranks)))
    return min(round(0.6 * psutil.virtual_memory().available), 4 * 10**9)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=SHAPES, default="Qwen2.5-0.5B", help="default: %(default)s"
    )
    parser.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        default=2,
        metavar="TP",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--pipeline-model-parallel-size",
        type=int,
        default=1,
        metavar="PP",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--rollout-tensor-parallel-size",
        type=int,
        metavar="TP",
        help="default: the trainer's, both paths",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--num-layers", type=int, help="of the model's (default: as many as fit into the memory)"
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        help="of all (default: 60%% of what is free, at most 4 without CUDA)",
    )
    parser.add_argument(
        "--bucket-mb",
        type=int,
        default=BUCKET_BYTES // 2**20,
        help="largest gathered bucket (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="the median counts (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rollout_tensor_parallel_size is None:
        arguments.rollout_tensor_parallel_size = arguments.tensor_model_parallel_size
    for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "rollout_tensor_parallel_size", "bucket_mb", "repeats",
    ):  # fmt: skip
        if getattr(arguments, name) < 1:
            fail(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    return arguments


def main() -> None:
    arguments = parse()
    name, dtype = arguments.model, DTYPES[arguments.dtype]
    if arguments.worker:
        result = measure(arguments, model_config(name, arguments.num_layers, arguments.vocab_size))
        if distributed.is_main():
            arguments.worker.write_text(json.dumps(result))
        distributed.barrier()
        distributed.stop()
        return
    try:
        parallel = parallel_config(arguments)
        num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
            raise ValueError(
                f"TP x PP ({num_ranks}) must be at most the {torch.cuda.device_count()} CUDA"
                " devices; lower one"
            )
        budget = (
            round(arguments.memory_gb * 1e9) if arguments.memory_gb else default_memory(num_ranks)
        )
        hf = fitting_config(
            name,
            parallel,
            dtype.itemsize,
            arguments.bucket_mb * 2**20,
            budget,
            arguments.num_layers,
        )
        head_rows(hf, 0, arguments.rollout_tensor_parallel_size)
        size = ["--num-layers", str(hf.num_hidden_layers), "--vocab-size", str(hf.vocab_size)]
        result = launch([*sys.argv[1:], *size], num_ranks)
    except (ValueError, RuntimeError) as error:
        fail(
            str(error).removeprefix("error: "), exit_code=2 if isinstance(error, ValueError) else 1
        )
    full = model_config(name)
    report = {
        "model": name, "dtype": arguments.dtype, "num_layers": hf.num_hidden_layers, "full_num_layers": full.num_hidden_layers,
        "vocab_size": hf.vocab_size, "full_vocab_size": full.vocab_size,
        "model_gbytes": model_elements(hf)[0] * dtype.itemsize / 1e9,
        "tp": arguments.tensor_model_parallel_size, "pp": arguments.pipeline_model_parallel_size,
        "rollout_tp": arguments.rollout_tensor_parallel_size, "backend": "nccl" if torch.cuda.is_available() else "gloo",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__, **result,
    }  # fmt: skip
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
