"""What a shell, a scheduler or a container hands over: homes in paths, copies of the process,
threads, processors, outputs without a reader, links to nothing, a lost working directory.
"""

import argparse
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_mega.commands.command_line import flag, target
from ragen_mega.commands.command_line import parse as parse_flags
from ragen_mega.config import EvaluationConfig, StarPOConfig, parse
from ragen_mega.config.cli import split_resumed
from ragen_mega.environments.registry import make
from ragen_mega.ranks import launcher
from ragen_mega.report.terminal import command_line
from ragen_mega.storage.integrity import atomic_directory, describe_error, describe_file
from ragen_mega.storage.run_directory import check_directory
from ragen_mega.studies.definitions import Study
from ragen_mega.system.paths import expanded, named

PROGRAM = [sys.executable, "-m", "ragen_mega.commands.program"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


PATHS = {
    "output": "logging",
    "load": "model",
    "critic_load": "model",
    "boards": "evaluation",
    "sglang_python": "rollout",
    "warm_start_from": "warm_start",
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_begins_at_home_wherever_it_is_written(name: str, home: Path) -> None:
    word = f"--{name.replace('_', '-')}=~/a folder/x"
    needed = {"sglang_python": ["--rollout-engine", "sglang"]}.get(name, [])
    (home / "my.flags").write_text(f"'{word}'\n")
    for flags in ([word], ["--recipe=~/my.flags"]):
        config = parse([*flags, *needed])
        assert getattr(getattr(config, PATHS[name]), name) == f"{home}/a folder/x"


def test_homes_in_studies_in_commands_and_from_python(home: Path) -> None:
    study = home / "own.toml"
    study.write_text(
        'title = "t"\nsource = "s"\n[small]\nrecipe = "bandit"\nflags = "--output=~/runs"\n'
        '[[arms]]\nname = "a"\nflags = "--boards=~/b.jsonl"\n'
    )
    read = Study.read(study)
    config = parse(["--recipe", read.recipe, *read.flags, *read.arms[0].flags])
    assert config.run_directory.parent == home / "runs"
    assert config.evaluation.boards == f"{home}/b.jsonl"
    assert StarPOConfig(evaluation=EvaluationConfig(boards="~/b")).evaluation.boards == f"{home}/b"
    assert split_resumed(["--resume=~/runs/a"])[0] == home / "runs" / "a"
    flags = (flag("--to", "a folder", type=Path), ("runs", {"nargs": "+", "type": Path}))
    found = parse_flags("", *flags, argv=["--to=~/x", "~/a", "b"])
    assert (found.to, found.runs) == (home / "x", [home / "a", Path.cwd() / "b"])
    assert target("~/out.json") == home / "out.json"


def agent(task, client) -> float:
    return 1.0


def test_homes_in_options_of_worlds_and_agents(home: Path) -> None:
    rows = [{"question": f"{n}?", "answer": n} for n in range(20)]
    for name, some in (("a", rows), ("b", rows[:3])):
        (home / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    options = {"tasks:~/a.jsonl": {"validation": "~/b.jsonl", "directory": "~/a folder"}}
    options[f"agent:{__name__}:agent"] = {"tasks": "~/a.jsonl", "validation": "~/b.jsonl"}
    options["webshop"] = {"data": "~/shop"}
    given = ["--environments", ",".join(options), "--environment-options", json.dumps(options)]
    config = parse([*given, "--num-groups", "6"]).environment.located()
    assert config.options("webshop")["data"] == f"{home}/shop"
    assert config.options("tasks:~/a.jsonl")["directory"] == f"{home}/a folder"
    for name in list(options)[:2]:
        found = [
            make(name, **config.options(name), split=split) for split in ("train", "validation")
        ]
        assert [world.num_tasks for world in found] == [20, 3]


def test_only_a_leading_tilde_of_a_known_user_is_a_home(home: Path) -> None:
    for path in ("./~/runs", "a/~", "Qwen/Qwen2.5-0.5B", "", "python"):
        assert expanded(path) == path
    with pytest.raises(ValueError, match=r"no such user has a home .* \./~nobody-here/x"):
        parse(["--output=~nobody-here/x"])
    with pytest.raises(argparse.ArgumentTypeError, match="no such user"):
        target("~nobody-here/x")


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
COPIES = {
    "srun": SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    "srun of an old Slurm": SLURM | {"SLURM_STEP_ID": "3"},
    "second task of srun": {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    "MPICH": {"PMI_SIZE": "4", "PMI_RANK": "3"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2"},
    "PMIx": {"PMIX_RANK": "1"},
    "a torchrun in each task": SLURM
    | {"SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0"},
}
ALONE = {
    "a terminal": {},
    "sbatch": SLURM,
    "salloc": SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    "batch step with a number": SLURM | {"SLURM_STEP_ID": "4294967291"},
    "srun of one": SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun of one": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "no number": {"PMI_SIZE": "", "PMI_RANK": "many"},
    "a rank of torchrun": COPIES["srun"]
    | {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "GROUP_WORLD_SIZE": "2"},
}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [*os.environ]:
        if name.startswith(
            ("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "GROUP_")
        ):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("case", COPIES)
def test_copies_by_another_launcher_are_refused(case: str, no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in COPIES[case].items():
        no_launcher.setenv(name, value)
    with pytest.raises(ValueError, match="several copies .* whole run; .*ntasks-per-node=1"):
        launcher.forget_foreign_ranks()


@pytest.mark.parametrize("case", ALONE)
def test_a_single_process_of_a_scheduler_is_not(case: str, no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in ALONE[case].items():
        no_launcher.setenv(name, value)
    launcher.forget_foreign_ranks()


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "300000 100000"}, 3),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/x": ""}, 2),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "cpu.max": "600000 100000"}, 2),
        ("0::/of/the/host", {"cpu.max": "max 100000"}, 8),
        (
            "4:cpu,cpuacct:/docker/1",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("5:memory:/", {"memory/cpu.max": "100000 100000"}, 8),
        (None, {}, 8),
    ],
)
def test_processors_are_those_of_the_quota(
    line: str | None,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    groups = tmp_path / "proc/self/cgroup"
    groups.parent.mkdir(parents=True)
    if line is not None:
        groups.write_text(f"1:name=systemd:/x\n{line}\n")
    assert launcher.num_processors(tmp_path) == expected


def test_a_number_of_threads_is_one_or_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("4", "4,2", " 2 "):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        launcher.check_process()
        assert os.environ["OMP_NUM_THREADS"] == value
    for value in ("", "  "):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        launcher.check_process()
        assert "OMP_NUM_THREADS" not in os.environ
    for value in ("0", "-1", "many", "4,0", "4,", "1.5"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        with pytest.raises(ValueError, match="OMP_NUM_THREADS must be a number of threads"):
            launcher.check_process()


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of Bash in which `program` is ours; the exit code is the program's."""
    line = f'set -o pipefail; program() {{ {" ".join(PROGRAM)} "$@"; }}; {command}'
    root = Path(__file__).parents[2]
    path = {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=os.environ | path, capture_output=True, text=True
    )


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    for command in ("train", "evaluate --load x", "report x"):
        done = run(f"mkdir -p gone; cd gone; rmdir ../gone; program {command}", tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: the working directory does not exist any more")


@pytest.mark.slow
def test_a_command_whose_reader_has_gone_ends_in_silence(tmp_path: Path) -> None:
    done = run("program study --list | true", tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    for command in ("--help", "doctor"):
        done = run(f"program {command} | true", tmp_path)
        assert done.stderr == "" and done.returncode in (0, 1)  # of doctor


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_output_is_named(tmp_path: Path) -> None:
    done = run("program --help > /dev/full", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: cannot write to standard output: No space left")


GOES_ON = """
import sys
from ragen_mega.system.outputs import guard_outputs
from ragen_mega.report.console import Console
guard_outputs(is_needed=False)
console = Console(is_writer=True, num_steps=3)
for step in range(20000):
    console.say(f"step {step}")
print("error output", file=sys.stderr)
open("done", "w").close()
"""


@pytest.mark.parametrize(
    ("outputs", "told"),
    [("| head -n 2", 1), ("2>&1 | head -n 2", 0), ("> /dev/full", 1), (">&-", 0), ("| cat", 0)],
)
def test_long_work_outlives_its_output(outputs: str, told: int, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(GOES_ON)
    done = run(f"{sys.executable} work.py {outputs}", tmp_path)
    assert done.returncode == 0 and (tmp_path / "done").exists()
    assert done.stderr.count("standard output cannot be written to any more") == told
    assert done.stderr.count("Traceback") == 0


def test_links_to_nothing_are_said_in_words(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone" / "deep")
    with pytest.raises(ValueError, match=r"link is a link to .*deep, which does not exist; make"):
        check_directory(link / "a", resume=False, overwrite=False)
    with pytest.raises(ValueError, match="link is a link to .*deep, which does not exist; make"):
        with atomic_directory(link):
            pass
    for write in (lambda: (link / "a").mkdir(parents=True), lambda: link.write_text("x")):
        with pytest.raises(OSError) as failed:
            write()
        assert "is a link to" in describe_error(failed.value)
    assert "is a link" not in describe_error(OSError(errno.ENOENT, "none", str(tmp_path / "a")))


def test_errors_of_reading_and_writing_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hashlib.file_digest", fail)
    with pytest.raises(OSError) as failed:
        describe_file(path)
    assert describe_error(failed.value).startswith(f"cannot read or write {path}: Input/output")
    nameless = describe_error(OSError(errno.EIO, os.strerror(errno.EIO)), tmp_path)
    assert str(tmp_path) in nameless and "storage answers" in nameless
    with pytest.raises(OSError) as kept, named(path):
        raise OSError(errno.ENOSPC, "full", "other")
    assert kept.value.filename == "other"


def test_printed_commands_can_be_pasted(tmp_path: Path) -> None:
    name = tmp_path / "it's a run; rm x"
    words = subprocess.run(
        ["bash", "-c", "ragen-mega() { printf '%s\\n' \"$@\"; }; source() { :; }\n"
         + command_line("view", name)], capture_output=True, text=True, check=True
    ).stdout.splitlines()  # fmt: skip
    assert words == ["view", str(name)]
