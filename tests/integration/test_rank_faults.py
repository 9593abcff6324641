"""Faults seen from outside: full disks, ranks of which one is bad or dies; exit codes, one line,
nothing lost.
"""

import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from ragen_mega.algorithm.credit import CreditInputs
from ragen_mega.algorithm.tables import ESTIMATORS, FILTERS, Estimator, Filter
from ragen_mega.config.recorded import CONFIG_FILE
from ragen_mega.megatron.initialize import shutdown
from ragen_mega.models.huggingface import load_tokenizer
from ragen_mega.ranks.launcher import PROGRAM
from ragen_mega.run.stop import RANK_LOST
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.storage.run_directory import FINAL_EXPORT, SUMMARY_FILE
from ragen_mega.train import main
from tests.support.faulty_runs import FLAGS, WARM_START, open_run, poison, record_moves, start_of
from tests.support.forked_ranks import on_ranks, wait_for
from tests.support.runs import finish, launch, metrics, start_ranks
from tools.chaos import write_mixture

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.forks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `start`, a small model, and `straight`, four steps from there in one process; and
    `mixture`, a model with experts.
    """
    output = tmp_path_factory.mktemp("faults")
    launch(output, "start", 1, *FLAGS, *WARM_START)
    write_mixture(output / "mixture", load_tokenizer(str(start_of(output))))
    launch(output, "straight", 1, *FLAGS, "--load", str(start_of(output)))
    return output


def test_other_ranks_leave_when_one_is_killed_and_the_run_goes_on(
    output: Path, capfd: pytest.CaptureFixture
) -> None:
    flags = (
        *FLAGS, "--load", str(start_of(output)), "--use-distributed-optimizer", "--num-steps", "30",
        "--save-interval", "1",
    )  # fmt: skip
    processes = start_ranks(output, "killed", 2, *flags)
    wait_for(output / "killed" / "checkpoints" / "step_00000002", processes)
    capfd.readouterr()
    processes[1].kill()
    processes[0].join()
    assert processes[0].exitcode == 2
    assert capfd.readouterr().err == f"error: {RANK_LOST}\n"
    assert len(metrics(launch(output, "killed", 2, *flags, "--num-steps", "6", "--resume"))) >= 6


@pytest.mark.parametrize(
    "layout",
    [
        ("--use-distributed-optimizer",),
        ("--tensor-model-parallel-size", "2"),
        ("--pipeline-model-parallel-size", "2"),
        ("--expert-model-parallel-size", "2"),
    ],
    ids=["dp2_distributed_optimizer", "tp2", "pp2", "ep2"],
)
def test_what_is_bad_on_one_rank_is_skipped_on_all(output: Path, layout: tuple[str, ...]) -> None:
    """One token of one trajectory, which one data-parallel rank holds; a weight of one rank."""

    def work() -> None:
        load = ("--load", str(output / "mixture")) if "--expert" in layout[0] else ()
        run = open_run(output, "-".join(("shares", *layout)), "--num-steps", "1", *load, *layout)
        run.finish = lambda: None
        bad_weight = {3: ("actor", math.nan)} if os.environ["RANK"] == "1" else {}
        poison(run, {1: ("advantages", 1e25), 2: ("returns", 1e25)} | bad_weight)
        moves = record_moves(run)
        finish(run)
        assert moves == {
            "actor": [True, False, True, False],
            "critic": [True, True, False, True],
        }, moves

    on_ranks(work, 2)


def test_weights_that_diverge_stop_all_ranks(output: Path, capfd: pytest.CaptureFixture) -> None:
    """A learning rate that ruins the weights in its first update: the next rollout or value is not
    finite on two ranks.
    """
    for flag in ("--lr", "--critic-lr"):
        processes = start_ranks(
            output,
            f"diverged{flag}",
            2,
            *FLAGS,
            "--load",
            str(start_of(output)),
            flag,
            "1e30",
            "--lr-decay",
            "constant",
        )
        for process in processes:
            process.join(300)
        said = capfd.readouterr().err
        assert [process.exitcode for process in processes] == [
            2,
            2,
        ] and "Traceback" not in said, said


@pytest.mark.parametrize("part", ["estimator", "filter"])
def test_a_function_of_the_user_that_fails_on_one_rank_ends_all_with_one_line(
    output: Path, capfd: pytest.CaptureFixture, part: str
) -> None:
    """As for want of memory there; after a checkpoint, for which ranks wait before they say so."""

    def fail_once_saved() -> None:
        if os.environ["RANK"] == "1" and saved.exists():
            raise RuntimeError("out of memory")

    def estimate(inputs: CreditInputs) -> tuple[Tensor, None]:
        fail_once_saved()
        return inputs.per_token(inputs.scores), None

    def choose(returns: Sequence[Sequence[float]], **options: object) -> list[int]:
        fail_once_saved()
        return [*range(len(returns))]

    saved = output / f"{part}_fails" / "checkpoints"
    if part == "estimator":
        ESTIMATORS.register("failing", Estimator(estimate))
    else:
        FILTERS.register("failing", Filter(choose))
    flag = {"estimator": "--advantage-estimator", "filter": "--filter-strategy"}[part]
    flags = (*FLAGS, "--load", str(start_of(output)), "--save-interval", "1", flag, "failing")
    processes = start_ranks(output, f"{part}_fails", 2, *flags)
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [2, 2]
    assert "failing failed: RuntimeError: out of memory" in capfd.readouterr().err


def test_torchrun_restarts_and_the_run_goes_on(output: Path) -> None:
    """SIGKILL of a rank under torchrun --max-restarts: the restarted ranks resume."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    launch(
        output,
        "restarted",
        1,
        *FLAGS,
        "--load",
        str(start_of(output)),
        "--save-interval",
        "1",
        "--num-steps",
        "2",
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts",
        "1", "--monitor-interval", "0.2", "-m", "ragen_mega.train", *FLAGS, "--load",
        str(start_of(output)), "--output", str(output), "--name", "restarted", "--num-steps", "12",
        "--save-interval", "1", "--resume",
    ]  # fmt: skip
    with subprocess.Popen(command, env=environment, cwd=ROOT) as process:
        while not (output / "restarted" / "checkpoints" / "step_00000004").exists():
            assert process.poll() is None
            time.sleep(0.05)
        ranks = [
            child
            for child in psutil.Process(process.pid).children()
            if "ragen_mega.train" in child.cmdline()
        ]
        ranks[-1].send_signal(signal.SIGKILL)
        assert process.wait(600) == 0
    assert [row["step"] for row in metrics(output / "restarted")] == list(range(12))


@contextmanager
def training(
    output: Path, place: Path, *command: str, flags: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """The launch script in its own process group, as in a terminal, once a step is logged."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "NPROC_PER_NODE": "2",
    }
    script = str(ROOT / "examples" / "pretrain_starpo.sh")
    tiny = [
        "--recipe", "none", *FLAGS, "--load", str(start_of(output)), "--num-steps", "9999",
        "--save-interval", "0", "--lr-decay", "constant", "--output", str(place), "--name", "run",
    ]  # fmt: skip
    with subprocess.Popen(
        [*command, script, *tiny, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        while not (place / "run" / "metrics.jsonl").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        yield process


@pytest.mark.parametrize("command", [("bash",), ("torchrun",)], ids=["bash", "torchrun"])
def test_ctrl_c_writes_a_checkpoint_first(
    output: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The whole process group gets the signal; of the script, two ranks, nothing else is heard."""
    with training(output, tmp_path, *command) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1].splitlines()
    line = "SIGINT: writing a checkpoint; the same again leaves without one"
    assert said.count(line) == 1
    if command == ("bash",):  # torchrun adds its own report
        assert (process.returncode, said) == (128 + signal.SIGINT, [line])
    assert not any(member.is_running() for member in family)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_ranks_end_with_a_launcher_that_is_killed(output: Path, tmp_path: Path) -> None:
    with training(output, tmp_path, "bash") as process:
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=300)
        assert not alive
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_replay_on_two_ranks(output: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--module",
        "--", PROGRAM, "replay", "--run", str(output / "straight"), "--step", "3",
        "--tensor-model-parallel-size", "2", "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["world_size"] == 2 and 0 < result["largest_difference"] < 1e-4


def in_a_process(work: Callable[[], None]) -> int:
    """Exit code of `work` in a forked process."""
    shutdown()
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(250)
    return process.exitcode


def test_a_run_whose_checkpoints_cannot_be_written_keeps_all_else(
    output: Path, capfd: pytest.CaptureFixture
) -> None:
    """The limit on a file's size lets rollouts and the export pass and no checkpoint."""
    largest = max(path.stat().st_size for path in (output / "straight" / "rollouts").iterdir())
    smallest = min(
        path.stat().st_size for path in (output / "straight" / "checkpoints").glob("*/rank*")
    )
    assert largest < smallest / 2
    capfd.readouterr()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (smallest // 2, smallest // 2))
        main([*FLAGS, "--load", str(start_of(output)), "--output", str(output), "--name", "full"])

    assert in_a_process(work) == 2
    said, error = capfd.readouterr()
    assert "cannot write a checkpoint of step 2" in said and "tries again" in said
    assert len(error.splitlines()) == 1 and error.startswith(
        "error: cannot write a checkpoint of step 4 to "
    ), error
    assert "File too large" in error and "rank_00000" in error and "(ulimit -f" in error
    assert [row["step"] for row in metrics(output / "full")] == [0, 1, 2, 3]
    assert json.loads((output / "full" / SUMMARY_FILE).read_text())["steps"] == 4
    assert (output / "full" / FINAL_EXPORT / "model.safetensors").exists()
    assert not list((output / "full" / "checkpoints").iterdir())
    store = RolloutStore(output / "full" / "rollouts")
    assert all(store.read(step).groups for step in store.steps()) and store.steps() == [0, 1, 2, 3]


def test_a_rollout_that_cannot_be_written_is_one_line(
    output: Path, capfd: pytest.CaptureFixture
) -> None:
    straight = output / "straight"
    limit = min(path.stat().st_size for path in (straight / "rollouts").iterdir()) - 1
    assert (straight / CONFIG_FILE).stat().st_size < limit  # it is written before

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        main([*FLAGS, "--load", str(start_of(output)), "--output", str(output), "--name", "fuller"])

    assert in_a_process(work) == 2
    said = capfd.readouterr().err
    assert (
        len(said.splitlines()) == 1
        and "error: cannot write" in said
        and "rollouts/step_00000000.safetensors" in said
    ), said
