"""The launch scripts as a person starts them: two languages in one file, recipes, threads, exit
codes, signals.
"""

import ast
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ragen_mega.config import parse, read_flags, with_recipe
from tools import launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/pretrain_starpo.sh"
RECIPES = ROOT / "ragen_mega/config/recipes"
LAUNCH = (sys.executable, str(ROOT / "tools/launch.py"))


def environment(**changes: str) -> dict[str, str]:
    """This environment with the tests' interpreter first on PATH, as after activation, and no trace
    of a torchrun.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TORCHELASTIC", "OMP_", "NPROC_"))
    }
    return (
        kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | changes
    )


def execute(
    *command: object, timeout: float = 240, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**changes),
    )


def program(directory: Path, source: str) -> Path:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(source))
    return path


class TestPolyglot:
    def test_is_python(self):
        ast.parse(SCRIPT.read_text())

    def test_is_bash_up_to_the_closing_quotes(self):
        bash_half = SCRIPT.read_text().split('":"""')[0]
        process = subprocess.run(["bash", "-n"], input=bash_half, capture_output=True, text=True)
        assert (process.returncode, process.stderr) == (0, "")
        assert bash_half.rstrip().splitlines()[-1].startswith("exec "), (
            "signals must reach torchrun, not a shell"
        )

    @pytest.mark.parametrize(
        "command", [("bash",), ("torchrun", "--nproc-per-node", "2")], ids=["bash", "torchrun"]
    )
    def test_help(self, command):
        process = execute(*command, SCRIPT, "--help", NPROC_PER_NODE="1")  # for bash alone
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("usage:") == 1, "one rank prints the help"
        assert "--tensor-model-parallel-size" in process.stdout

    def test_is_importable_without_training(self):
        # Checkpoint writers start processes that run the main file under another name.
        program = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__mp_main__')"
        process = execute(sys.executable, "-c", program)
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")

    def test_unknown_flag_is_one_line_of_two_ranks_and_a_failure(self):
        process = execute("bash", SCRIPT, "--learning-rat", "1", NPROC_PER_NODE="2")
        assert process.returncode == 2
        assert len(process.stderr.splitlines()) == 1, process.stderr
        assert "--learning-rat" in process.stderr

    def test_unknown_recipe_is_one_line_and_a_failure(self):
        process = execute("bash", SCRIPT, "--recipe", "chess", NPROC_PER_NODE="1")
        assert process.returncode == 2
        assert len(process.stderr.splitlines()) == 1, process.stderr
        assert "frozen_lake" in process.stderr and "'chess'" in process.stderr


class TestCheck:
    """What the script does before ranks start: flags are refused before anything heavy is there."""

    @pytest.mark.parametrize(
        ("flags", "code", "said"),
        [
            (["--help"], 100, "--tensor-model-parallel-size"),
            (["--learning-rat", "1"], 2, "unknown flag --learning-rat"),
            (["--tensor-model-parallel-size", "3"], 2, "must divide the world size (2)"),
            (["--rollout-engine", "sglang", "--rollout-tensor-parallel-size", "4"], 2, "divide"),
            (["--rollout-engine", "sglang", "--sglang-python", "/none"], 2, "does not exist"),
            (["--environments", "nothing:World"], 2, "cannot import nothing"),
            ([], 0, ""),
        ],
    )
    def test_neither_torch_nor_transformers_is_imported(self, tmp_path, flags, code, said):
        source = f"""
            import sys

            from ragen_mega.run.check import main

            sys.argv = ["check", "2", *{flags!r}]
            code = 0
            try:
                main()
            except SystemExit as error:
                code = error.code
            assert not {{"torch", "transformers", "megatron"}} & set(sys.modules)
            sys.exit(code)
            """
        process = execute(sys.executable, program(tmp_path, source))
        assert process.returncode == code, process.stderr
        assert said in process.stdout + process.stderr
        assert len(process.stderr.splitlines()) == (code == 2)


class TestRecipes:
    def test_command_line_comes_last(self, tmp_path):
        flags = "# why\n--lr 1e-3  # because\n--environment-options '{\"a\": 1}'\n\n--bf16\n"
        (tmp_path / "lake.flags").write_text(flags)
        expected = ["--lr", "1e-3", "--environment-options", '{"a": 1}', "--bf16", "--lr", "2"]
        for argv in (
            ["--lr", "2"],
            ["--lr", "2", "--recipe", "lake"],
            ["--recipe=lake", "--lr", "2"],
        ):
            assert with_recipe(argv, directory=tmp_path, default="lake") == expected
        assert with_recipe(
            ["--recipe", "none", "--lr", "2"], directory=tmp_path, default="lake"
        ) == ["--lr", "2"]

    @pytest.mark.parametrize("argv", [["--recipe", "sea"], ["--recipe"], ["--recipe", "../lake"]])
    def test_unknown(self, tmp_path, argv):
        (tmp_path / "lake.flags").write_text("")
        with pytest.raises(ValueError, match="must name one of lake, none"):
            with_recipe(argv, directory=tmp_path, default="lake")

    @pytest.mark.parametrize("path", sorted(RECIPES.glob("*.flags")), ids=lambda path: path.stem)
    def test_shipped_recipes_are_valid_and_the_command_line_wins(self, path):
        assert parse([*read_flags(path), "--seed", "7"]).train.seed == 7


class TestLaunch:
    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_cores_are_shared_among_ranks_unless_said_otherwise(self, tmp_path, num_ranks):
        script = program(
            tmp_path,
            """
            import os
            line = f"{os.environ['OMP_NUM_THREADS']} {os.environ['WORLD_SIZE']}\\n"
            os.write(1, line.encode())  # at once: ranks run unbuffered, and their lines would mix
            """,
        )
        expected = f"{max(1, len(os.sched_getaffinity(0)) // num_ranks)} {num_ranks}"
        process = execute(*LAUNCH, "--nproc-per-node", num_ranks, script)
        assert process.stdout.splitlines() == [expected] * num_ranks
        assert process.stderr == ""
        assert execute(*LAUNCH, script, OMP_NUM_THREADS="3").stdout == "3 1\n"

    def test_the_exit_code_is_that_of_the_rank_that_failed(self, tmp_path):
        script = program(
            tmp_path,
            """
            import os, sys, time
            if os.environ["RANK"] == "1":
                sys.exit("error: the reason")
            time.sleep(600)  # longer than the test may take
            """,
        )
        process = execute(*LAUNCH, "--nproc-per-node", 2, script)
        assert (process.returncode, process.stderr) == (1, "error: the reason\n")

    def test_a_killed_rank_is_reported(self, tmp_path):
        script = program(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        process = execute(*LAUNCH, script)
        assert process.returncode == 128 + signal.SIGKILL
        assert process.stderr.startswith("error: rank 0 was killed by SIGKILL")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_stop_every_rank(self, tmp_path, number):
        script = program(
            tmp_path,
            """
            import os, sys, time
            # at once: ranks run unbuffered, and their lines would mix
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(600)
            """,
        )
        process = subprocess.Popen(
            [*LAUNCH, "--nproc-per-node", "2", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        _, stderr = process.communicate()
        assert process.returncode == 128 + number
        assert "torch/distributed" not in stderr
        for rank in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(rank, 0)


class TestSetup:
    """A copy of the scripts whose environment holds a pip that fails as told, and an interpreter
    that only says so.
    """

    @pytest.fixture
    def copy(self, tmp_path):
        copy = tmp_path / "clone"
        shutil.copytree(
            ROOT / "tools",
            copy / "tools",
            ignore=shutil.ignore_patterns("__pycache__", "sglang_cpu"),
        )
        (copy / "examples").mkdir()
        for name in (
            "setup.py",
            "pyproject.toml",
            "constraints.txt",
            "examples/pretrain_starpo.sh",
        ):
            shutil.copy(ROOT / name, copy / name)
        python = copy / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(
            textwrap.dedent(f"""\
                #!/usr/bin/env bash
                case "$*" in
                *"pip --version"* | *"ragen_mega.run.check"*) ;;
                *"pip install"*)
                    if [ -e {copy}/fail-pip ]; then echo "ERROR: no route" >&2; exit 1; fi ;;
                "- "*) if [ -e {copy}/lacks ]; then echo numpy; exit 3; fi ;;
                *) echo "started" ;;
                esac
                """)
        )
        python.chmod(0o755)
        return copy

    def start(self, copy, path="/usr/local/bin:/usr/bin:/bin"):
        return execute("bash", copy / "examples/pretrain_starpo.sh", PATH=path)

    @pytest.mark.parametrize("fault", ["fail-pip", "lacks"])
    def test_a_failed_installation_is_not_complete_and_the_same_command_repairs_it(
        self, copy, fault
    ):
        (copy / fault).touch()
        for _ in range(2):
            process = self.start(copy)
            assert process.returncode == 1
            assert process.stderr.splitlines()[-1].startswith("error: setup failed")
            assert "started" not in process.stdout
            assert not list((copy / ".venv").glob(".installed*"))
        (copy / fault).unlink()
        process = self.start(copy)
        assert (process.returncode, process.stdout) == (0, "started\n"), process.stderr
        assert (copy / ".venv/.installed").read_text()
        assert "setup: installing" not in self.start(copy).stderr, "it is installed once"

    def test_without_a_python_that_is_new_enough_one_line_says_so(self, copy, tmp_path):
        shutil.rmtree(copy / ".venv")
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("bash", "cat", "cksum", "dirname", "env", "flock", "grep", "mkdir", "nproc"):
            (tools / name).symlink_to(shutil.which(name))
        process = self.start(copy, path=str(tools))
        assert process.returncode == 1
        said, needed, failed = process.stderr.splitlines()
        assert said.startswith("setup: installing") and "Python 3.11, 3.12 or 3.13" in needed
        assert failed.startswith("error: setup failed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fresh_copy_installs_itself(tmp_path):
    """What a newcomer has: a clone, Python, and no environment."""
    copy = tmp_path / "clone"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build", "__pycache__")
    )
    base = tmp_path / "bin"
    base.mkdir()
    (base / "python3.11").symlink_to(
        Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    )
    bare = environment(PATH=f"{base}:/usr/local/bin:/usr/bin:/bin")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"):
        bare.pop(name, None)
    for attempt, expected in enumerate((1, 0)):  # only the first command installs
        command = ["bash", "examples/pretrain_starpo.sh", "--help"]
        process = subprocess.run(command, cwd=copy, env=bare, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert process.stderr.count("setup: installing") == expected, (
            f"command {attempt + 1}: {process.stderr}"
        )


@pytest.mark.parametrize(
    ("has_gpu", "flags", "bound"),
    [(True, (), "node"), (True, ("--numa-binding", "socket"), "socket"), (False, (), None)],
)
def test_ranks_are_bound_to_the_cpus_beside_their_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, flags: tuple[str, ...], bound: str | None
) -> None:
    started = []
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(launch.run, "run", started.append)
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch.main(["--nproc-per-node", "2", *flags, "train.py"]) == 0
    assert [one.numa_binding for one in started] == [bound]
