#!/usr/bin/env python
"""Roofline table of the fused kernels: time, share of the copy bandwidth or of the GEMM rate,
memory and error.

python tools/bench_kernels.py --json docs/benchmarks/kernels.json --plot docs/benchmarks/kernels.svg
python tools/bench_kernels.py --compile-only  # no GPU: what every kernel uses on sm_90
    --json docs/benchmarks/kernels_sm90_static.json --markdown
    docs/benchmarks/kernels_sm90_static.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))  # for `benchmarks`, not installed


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="write every number, with hardware and versions"
    )
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the table (svg, png or pdf)")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="static budgets on sm_90; needs triton, not a GPU",
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="OUT", help="with --compile-only: write its table"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--cases", nargs="*", default=[], metavar="WORD", help="only cases whose name holds a word"
    )
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--input-sets", type=int, default=3, help="sets that inputs rotate over")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-peers", action="store_true", help="leave other projects' kernels out")
    arguments = parser.parse_args()
    if arguments.repetitions < 1 or arguments.input_sets < 1:
        parser.error(
            f"--repetitions and --input-sets must be >= 1, got {arguments.repetitions} and"
            f" {arguments.input_sets}"
        )
    if arguments.markdown is not None and not arguments.compile_only:
        parser.error(
            "--markdown writes the table of --compile-only; for measurements use --json and --plot"
        )
    return arguments


def environment(device: str) -> dict[str, Any]:
    """Hardware and versions, without which no number means anything."""
    from benchmarks.peers import peer_versions

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **peer_versions(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
        facts |= {"memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}
    else:
        facts |= {"device": "cpu", "threads": torch.get_num_threads()}
    return facts


def compile_report(markdown: Path | None) -> dict[str, Any]:
    """Static budgets of every kernel, printed as a table and written to `markdown`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit(
            "--compile-only compiles kernels, TRITON_INTERPRET=1 interprets them: unset it"
        )
    try:
        from benchmarks import static_report
        from benchmarks.static_analysis import ptxas_version
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--compile-only needs triton ({error}): pip install triton==3.6.0 'numpy<2.4'"
        ) from error
    versions = environment("cpu") | {
        "target": "sm_90",
        "ptxas": ptxas_version(),
        "date": date.today().isoformat(),
    }
    print(static_report.HEADER)
    rows = []
    for row in static_report.static_rows():
        print(static_report.text_line(row))
        rows.append(row)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(static_report.markdown(rows, versions))
    return {"environment": versions, "kernels": rows}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every case on the device and print the table as it grows."""
    from benchmarks import cases as jobs
    from benchmarks import timing
    from benchmarks.peers import add_peers

    clock = timing.Clock(arguments.device)
    copy_rate = timing.copy_bandwidth(clock, arguments.repetitions)
    print(f"device copy: {copy_rate / 1e9:.0f} GB/s")
    compiled = None if arguments.no_compile else torch.compile
    cases = [
        *jobs.logits_cases(arguments.device, compiled),
        *jobs.hidden_cases(arguments.device, compiled),
        *jobs.returns_cases(arguments.device),
    ]
    report: dict[str, Any] = {
        "ceilings": {"copy_bytes_per_second": copy_rate, "gemms_ms": {}},
        "results": [],
        "refused": {},
    }
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    for case in cases:
        if arguments.cases and not any(word in case.name for word in arguments.cases):
            continue
        gemm_ms = None
        if case.gemms is not None:
            gemm_ms = timing.gemm_milliseconds(clock, case.gemms, dtype, arguments.repetitions)
            report["ceilings"]["gemms_ms"]["x".join(map(str, case.gemms))] = gemm_ms
        if not arguments.no_peers:
            inputs = case.make_inputs(0)
            case, refused = add_peers(
                case, lambda provider, inputs=inputs: provider.run(provider.prepare(inputs))
            )
            report["refused"] |= {
                f"{case.name} {case.shape}: {name}": reason for name, reason in refused.items()
            }
            del inputs
        results = timing.run_case(
            case, clock, copy_rate, gemm_ms, arguments.repetitions, arguments.input_sets
        )
        print_case(case.name, case.shape, gemm_ms, results)
        report["results"] += [asdict(result) for result in results]
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    for name, reason in report["refused"].items():
        print(f"not measured: {name}: {reason}")
    return report


def print_case(name: str, shape: dict[str, Any], gemm_ms: float | None, results: list[Any]) -> None:
    """One block of the table."""
    ceiling = "" if gemm_ms is None else f"   three GEMMs {gemm_ms:.3f} ms"
    print(f"\n{name}  {' '.join(f'{key}={value}' for key, value in shape.items())}{ceiling}")
    print(
        f"  {'':26s} {'ms':>9s} {'p20..p80':>17s} {'%copy':>6s} {'TF/s':>6s} {'%GEMM':>6s}"
        f" {'GiB':>6s} {'error':>8s}"
    )

    def cell(value: float | None, width: int, spec: str) -> str:
        return f"{'-':>{width}s}" if value is None else f"{value:{width}{spec}}"

    for r in results:
        print(
            f"  {r.provider:26s} {r.milliseconds:9.3f} {r.p20:8.3f}{r.p80:9.3f}"
            f" {cell(r.percent_of_copy, 6, '.1f')} {cell(r.teraflops, 6, '.0f')}"
            f" {cell(r.percent_of_gemms, 6, '.1f')} {cell(r.peak_extra_gib, 6, '.2f')}"
            f" {cell(r.error, 8, '.1e')}  {r.remark}"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    """One bar per provider and shape, grouped by job."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    jobs = list(dict.fromkeys(result["case"] for result in report["results"]))
    rows = {job: [r for r in report["results"] if r["case"] == job] for job in jobs}
    heights = [0.6 + 0.22 * len(rows[job]) for job in jobs]
    figure, axes = plt.subplots(
        len(jobs), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, job in zip(axes[:, 0], jobs, strict=True):
        labels = [
            " ".join(f"{k}={v}" for k, v in r["shape"].items()) + "  " + r["provider"]
            for r in rows[job]
        ]
        colours = [
            "tab:blue" if r["provider"].startswith("ragen") else "tab:grey" for r in rows[job]
        ]
        bars = axis.barh(range(len(labels)), [r["milliseconds"] for r in rows[job]], color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=6)
        axis.set_yticks(range(len(labels)), labels, fontsize=6)
        axis.invert_yaxis()
        axis.tick_params(axis="x", labelsize=6)
        axis.set_title(f"{job} [ms]", fontsize=8, loc="left")
    figure.suptitle(str(report["environment"]["device"]), fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    arguments = parse_arguments()
    if arguments.compile_only:
        report = compile_report(arguments.markdown)
    else:
        report = {"environment": environment(arguments.device)} | measure(arguments)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.plot is not None and not arguments.compile_only:
        plot(report, arguments.plot)
    return int(any(row["violations"] for row in report.get("kernels", [])))


if __name__ == "__main__":
    sys.exit(main())
