"""The GPU check where there is no GPU: parts fail one by one with a reason, archives are found, the
report is written.
"""

import argparse
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_mega import config

ROOT = Path(__file__).parents[2]
PREDICTIONS = ROOT / "docs" / "benchmarks" / "gpu_day_predictions.json"
ORDER = (
    "versions step step_fp8 update learn repeat kernels te train endure bench reshard moe"
    " lora learn_seeds step_all bench_all fp8 parity sglang apart"
)


def run(*flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "tools" / "gpu_check.sh"), *flags]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHON": sys.executable}
    environment |= changes
    return subprocess.run(
        command, capture_output=True, text=True, timeout=2800, env=environment, check=False
    )


def metadata(name: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_packages_are_reported_and_never_fatal(tmp_path: Path) -> None:
    archives, output = tmp_path / "archives", tmp_path / "out"
    archives.mkdir()
    output.mkdir()
    (output / "old.json").write_text("{}")
    os.utime(output / "old.json", (0, 0))
    carried, broken = tmp_path / "METADATA", tmp_path / "__init__.py"
    carried.write_text(metadata("sglang"))
    broken.write_text("raise OSError('libcudnn.so.9: cannot open shared object file')")
    with tarfile.open(archives / "site.tar.xz", "w:xz") as archive:
        archive.add(carried, "sglang-0.0.1.dist-info/METADATA")
        archive.add(broken, "transformer_engine/__init__.py")
    with zipfile.ZipFile(archives / "flash_attn-0.0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flash_attn_marker.py", "")
        wheel.writestr("flash_attn-0.0.1.dist-info/METADATA", metadata("flash-attn"))
        wheel.writestr(
            "flash_attn-0.0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("flash_attn-0.0.1.dist-info/RECORD", "")
    (archives / "broken.tar.xz").write_text("not an archive")
    python = tmp_path / "python"  # which believes in a GPU
    python.write_text(
        '#!/usr/bin/env bash\n[[ "$2" != *is_available* ]] || exec echo yes\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    flags = ("--output", str(output), "--archives", str(archives), "--minutes", "60")
    parts = ("versions", "te", "fp8", "sglang")
    shares = " ".join(f"{part}=500" for part in parts)  # for a busy machine
    done = run(*flags, *parts, PYTHON=str(python), SHARES=shares)
    report = json.loads((output / "report.json").read_text())
    assert "cannot unpack" in done.stderr and "broken.tar.xz" in done.stderr
    assert (
        "Transformer Engine does not load and is left out: OSError: libcudnn.so.9: cannot open"
        in done.stderr
    )
    assert [part["part"] for part in report["parts"]] == [*parts]
    assert "sglang 0.0.1" in report["versions"]
    assert "flash-attn 0.0.1" in report["versions"]
    failed = [part for part in report["parts"] if part["result"] != "passed"]
    assert done.returncode == len(failed)
    for part, module in zip(failed[1:], ("transformer_engine.pytorch",) * 2 + ("sglang",)):
        assert part["last_line"].startswith(
            f"{module} cannot be imported here; see ragen-mega doctor"
        )
    assert "old" not in report
    assert (output / "report.md").read_text().count("| failed") == len(failed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_figure_says_that_it_was_not_measured(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path), "--minutes", "30", SHARES="versions=250")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [part["part"] for part in report["parts"]] == ORDER.split()
    versions, *others = report["parts"]
    assert versions["result"] == "failed (1)" and done.returncode == len(report["parts"])
    assert {(part["result"], part["seconds"]) for part in others} == {("not run", 0)}
    page = (tmp_path / "report.md").read_text()
    predicted = json.loads(PREDICTIONS.read_text())["figures"]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [row[2] for row in rows[1 : len(predicted) + 1]] == ["not run |"] * len(predicted)


RECORDING = """#!/usr/bin/env bash
case "$1" in
-I) exec {python} "$@" ;;
-) cat >"{folder}/program"; [[ "$2" != */out ]] || exec {python} "{folder}/program" "${{@:2}}" ;;
-c) [[ "$2" != *is_available* ]] || echo yes ;;
*)
    {{ printf '%s\\0' "$@"; echo; }} >"{folder}/asked.$$"
    cat "{folder}/asked.$$" >>"{folder}/asked" # at once: some parts run together
    [[ "$1" != *sglang_probe* ]] || printf 'file\\n--disable-cuda-graph\\n'
    ;;
esac
"""


SERVER = "-m sglang.launch_server --grammar-backend none --tp-size 1".split()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="full"),
        pytest.param(("--small",), id="small", marks=pytest.mark.slow),
    ],
)
def asked(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[list[str]]:
    """The command lines of Python programs that all parts come to where each of them works; at the
    end the command line of a server, as the program that starts servers gives it on.
    """
    folder = tmp_path_factory.mktemp("gpu_check")
    python = folder / "python"
    python.write_text(RECORDING.format(python=sys.executable, folder=folder))
    python.chmod(0o755)
    for number, text in enumerate(("half of", " a model")):  # carried apart
        (folder / f"weights_{number}").mkdir()
        (folder / f"weights_{number}" / f"smollm2.gguf.{number}").write_text(text)
    flags = ("--output", str(folder / "out"), "--pack", str(folder / "kept.tar.gz"), *request.param)
    flags += ("--weights", str(folder))
    done = run(*flags, "--minutes", "9", PYTHON=str(python))
    report = json.loads((folder / "out" / "report.json").read_text())
    assert done.returncode == 0, (done.stderr, report)
    assert [part["part"] for part in report["parts"]] == ORDER.split()
    with tarfile.open(folder / "kept.tar.gz") as kept:
        assert {"./report.md", "./report.json", "./endure.log"} <= set(kept.getnames())
    subprocess.run([folder / "out/.sglang/python", *SERVER], check=True)
    return [line.split("\0")[:-1] for line in (folder / "asked").read_text().splitlines()]


def test_every_command_exists_with_its_flags(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tool's own parser reads what the script says to it, and the trainer's what is meant for
    it.
    """
    monkeypatch.syspath_prepend(ROOT / "tools/benchmarks")
    command_line = importlib.import_module("ragen_mega.commands.command_line")

    def only_parse(manual: str, *flags: Any, takes_others: bool = False) -> Callable[..., Any]:
        def read(argv: list[str]) -> argparse.Namespace:
            return command_line.parse(manual, *flags, argv=argv, takes_others=takes_others)

        return lambda work: read

    monkeypatch.setattr(command_line, "command", only_parse)
    *commands, server = asked
    assert server[: len(SERVER)] == SERVER and server[-1] == "--disable-cuda-graph"
    tools, recipes = set(), []
    for program, *arguments in commands:
        if program == "-m" and arguments[0] == "ragen_mega.commands.launch":
            assert arguments[1] == "--nproc-per-node" and arguments[3].startswith("examples/")
            recipes.append(config.parse(arguments[4:]))
            assert int(arguments[2]) == 1 + recipes[-1].parallel.rollout_ranks
            continue
        if program == "-m":
            files = [Path(word) for word in arguments if word.startswith("tests/")]
            assert arguments[0] == "pytest" and files and all((ROOT / f).exists() for f in files)
            # the repository's flags ask for a plug-in that a machine may lack
            assert arguments[1:3] == ["-o", "addopts="]
            continue
        tools.add(program)
        parsed = runpy.run_path(str(ROOT / program), run_name="tool")["main"](arguments)
        config.parse(["--rollout-engine", "sglang", "--bf16", *getattr(parsed, "training", ())])
    named = set(re.findall(r"tools/[\w/]+\.py", (ROOT / "tools" / "gpu_check.sh").read_text()))
    assert tools == named - {"tools/gpu_schedule.py"}
    sampled = [
        (one.rollout.weight_transfer, one.rollout.rollout_deterministic, one.train.seed)
        for one in recipes
        if not one.parallel.rollout_ranks
    ]
    learn, repeat, bandit = ("file", False), ("file", True, 0), ("auto", False, 0)
    assert sampled == [
        (*learn, 0), (*learn, 0), repeat, repeat, bandit,
        (*learn, 1), (*learn, 1), (*learn, 2), (*learn, 2),
    ]  # fmt: skip
    loaded = {one.model.load for one in recipes} - {None}
    assert {Path(file).read_text() for file in loaded} <= {"half of a model"}


STUCK = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
open(os.environ["OUT"], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def test_a_part_that_hangs_leaves_the_others_their_time_and_no_process(tmp_path: Path) -> None:
    """A Python that hangs in the first part and, as ranks and servers are, has a child in another
    session.
    """
    python, started = tmp_path / "python", tmp_path / "pids"
    (tmp_path / "stuck.py").write_text(STUCK)
    python.write_text(
        "#!/usr/bin/env bash\n"
        'if [[ "$1 $2" = *tools/benchmarks/bench_reshard.py* ]]; then\n'
        f"    OUT={started} exec {sys.executable} {tmp_path / 'stuck.py'}\nfi\n"
        f'if [[ "$2" = *is_available* ]]; then exec echo yes; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    flags = ("--output", str(tmp_path / "out"), "--minutes", "1", "reshard", "versions")
    run(*flags, PYTHON=str(python), SHARES="reshard=6 versions=54")
    parts = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    assert [part["result"] for part in parts][0] == "out of time" and parts[0]["seconds"] < 30
    assert (
        parts[1]["result"] != "no time left"
        and "torch" in (tmp_path / "out" / "versions.log").read_text()
    )
    for pid in started.read_text().split():
        assert (
            not Path(f"/proc/{pid}").exists()
            or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("kernel",), "unknown part or flag kernel"),
        (("--archives", "/no/such"), "--archives /no/such is no directory"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], message: str) -> None:
    done = run(*flags)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_help_lists_the_parts() -> None:
    assert ORDER in " ".join(run("--help").stdout.split())


@pytest.fixture
def schedule() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_schedule", ROOT / "tools/gpu_schedule.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_fits_into_what_a_machine_prints(schedule: Any) -> None:
    long = {"date": "d", "commit": "c", "versions": ["name 1.0"] * 900}
    long["parts"] = [schedule.row_of(part, "passed", 1.0, "x" * 160) for part in schedule.PARTS]
    page = schedule.page(long)
    assert len(page.splitlines()) <= 80 and len(page) < 12_000


def test_measured_figures_stand_beside_predicted_ones(schedule: Any, tmp_path: Path) -> None:
    figures = [
        {"figure": "seconds", "where": "step/runs/0/seconds", "predicted": 4.25},
        {"figure": "tokens", "where": "step/tokens", "predicted": 9000},
        {"figure": "bits", "where": "repeat/repeats", "predicted": True},
        {"figure": "second run", "where": "step/runs/1/seconds", "predicted": 1},
        {"figure": "below a number", "where": "step/tokens/0", "predicted": 1},
    ]
    schedule.FIGURES = tmp_path / "figures.json"
    schedule.FIGURES.write_text(json.dumps({"hardware": "H200", "figures": figures}))
    step = {"runs": [{"seconds": 5.125}], "tokens": 12345.6}
    page = schedule.page(
        {"date": "d", "commit": "c", "parts": [], "step": step, "repeat": {"repeats": False}}
    )
    assert page.splitlines()[4:11] == [
        "| figure | predicted, H200 | measured |",
        "|---|---|---|",
        "| seconds | 4.25 | 5.12 |",
        "| tokens | 9,000 | 12,346 |",
        "| bits | True | False |",
        "| second run | 1 | not run |",
        "| below a number | 1 | not run |",
    ]


FAULTY = """#!/usr/bin/env bash
case "$*" in
*"tests/kernels "*) sleep 600 ;;
*test_offload*) kill -SEGV $$ ;;
*"--recipe bandit"*) dd if=/dev/zero of="{output}/filled.log" bs=1M status=none; exit 1 ;;
*bench_kernels*) exit 3 ;;
*is_available*) echo yes ;;
*"import torch, "* | *"import xdist"*) exit 0 ;;
*) exec {python} "$@" ;;
esac
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_parts_that_hang_crash_fill_the_disk_or_write_nothing_leave_a_report(
    tmp_path: Path,
) -> None:
    """With the script's own time-keeping, on a disk of 40 MiB."""
    output, python = tmp_path / "out", tmp_path / "python"
    output.mkdir()
    python.write_text(FAULTY.format(output=output, python=sys.executable))
    python.chmod(0o755)
    parts = "kernels te train bench versions"
    script = f"""
        mount -t tmpfs -o size=40m tmpfs {output} || exit 99
        PYTHON={python} SHARES='kernels=15 te=15 train=15 bench=15 versions=50' \\
            bash {ROOT}/tools/gpu_check.sh --minutes 3 --output {output} \\
            --pack {tmp_path}/kept.tar.gz {parts} >{tmp_path}/said 2>&1
        code=$?
        cp {output}/report.json {output}/report.md {tmp_path}/
        exit $code
    """
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], timeout=280, check=False)
    if done.returncode == 99:
        pytest.skip("this machine mounts no disk")
    said = (tmp_path / "said").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    results = {part["part"]: part["result"] for part in report["parts"]}
    assert [*results] == parts.split(), said
    assert results["kernels"] == "out of time" and results["te"].startswith("failed")
    assert results["train"].startswith("failed") and results["bench"] == "failed (3)"
    assert "| kernels | out of time |" in (tmp_path / "report.md").read_text() and "| te |" in said
    with tarfile.open(tmp_path / "kept.tar.gz") as kept:
        assert "./report.json" in kept.getnames()
