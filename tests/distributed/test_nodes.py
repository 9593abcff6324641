"""A job on two nodes: namespaces with an address, processes, /tmp and /dev/shm each, real launchers
and their rendezvous.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from ragen_mega.commands import launch
from ragen_mega.run import fetching
from ragen_mega.run.nodes import disagreement
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.train import main
from tests.support.faulty_runs import FLAGS as TINY
from tests.support.faulty_runs import WARM_START, start_of
from tests.support.forked_ranks import join_ranks, wait_for
from tests.support.pretend_nodes import (
    ROOT,
    Node,
    fork_on_nodes,
    launcher,
    reason_against,
    two_nodes,
)
from tests.support.runs import launch as launch_ranks
from tests.support.runs import metrics, state
from tests.support.sglang_server import PYTHON
from tests.support.training import FLAGS

SCRIPT = ROOT / "examples" / "pretrain_starpo.sh"
STEPS = 12
PATHS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
MEET = """
    import sys

    import torch

    from ragen_mega.config import parse
    from ragen_mega.ranks import collectives
    from ragen_mega.report.console import fail
    from ragen_mega.run.nodes import join_job

    try:
        join_job(parse(sys.argv[1:]))
        total = collectives.sum_over_ranks(torch.tensor([1 << collectives.rank()]))
        print(f"met {int(total)}", flush=True)
    except ValueError as error:
        fail(str(error))
"""
"""What a training does first, without its models."""

needs_nodes = pytest.mark.skipif(bool(reason := reason_against()), reason=reason or "")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with two_nodes(tmp_path) as nodes:
        yield nodes


def outcome(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, list[str]]]:
    """Exit code and lines of each, once all have ended."""
    lines = [process.communicate()[0].splitlines() for process in processes]
    return [(process.returncode, said) for process, said in zip(processes, lines)]


def program(folder: Path, source: str) -> Path:
    path = folder / "meet.py"
    path.write_text(textwrap.dedent(source))
    return path


def run_on(
    nodes: list[Node], script: Path, *flags: object, ranks: int = 1, **environment: str
) -> list[tuple[int, list[str]]]:
    """Start a script on both, and wait."""
    return outcome(
        [
            node.start(
                *launcher(index, nodes[0].address, script, *flags, ranks=ranks),
                **PATHS,
                **environment,
            )
            for index, node in enumerate(nodes)
        ]
    )


@needs_nodes
def test_two_nodes_meet(nodes: list[Node], tmp_path: Path) -> None:
    """Their host names lead nowhere, or to the loopback, and gloo would listen there. All listen
    where the other node reaches them and nowhere else, also those who meet as two parts.
    """
    source = textwrap.dedent(MEET).replace(
        '    print(f"met',
        """    part = divide(parse(sys.argv[1:]))
    part.link.send(str(part.samples).encode())
    assert part.link.receive(60.0) == str(not part.samples).encode()
    print(*sorted(listening(psutil.Process().parent())))
    part.link.close()
    print(f"met""",
    )
    source = f"""import psutil
from ragen_mega.run.separate import divide
from tests.support.sockets import listening
{source}"""
    flags = ("--output", tmp_path / "runs", "--placement", "separate", "--rollout-ranks", 1)
    found = run_on(nodes, program(tmp_path, source), *flags)
    assert found == [(0, [node.address, "met 3"]) for node in nodes]
    assert not list((tmp_path / "runs").iterdir())


PARTS = {
    "flags": {"train.lr": 1e-6, "rollout.num_groups": 8},
    "code": {"ragen_mega.train": "1f", "world": "2e"},
    "files": {"load": "3e", "sft_file": "not there"},
    "packages": {"torch": "2.11.0", "sglang": "none"},
    "hardware": {"device": "8 x NVIDIA H100"},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"flags": PARTS["flags"] | {"train.lr": 1e-5}}, "train.lr is 1e-06"),
        ({"code": {"ragen_mega.train": "1e"}}, "ragen_mega.train is 1f"),
        ({"code": {"ragen_mega.train": "1f", "plugin": "3d"}}, None),
        ({"files": PARTS["files"] | {"load": "4d"}}, "load is 3e"),
        ({"packages": PARTS["packages"] | {"torch": "2.11.1"}}, "torch is 2.11.0"),
        ({"hardware": {"device": "8 x NVIDIA H200"}}, "nodes of one kind"),
    ],
)
def test_what_differs_between_nodes_is_named(change: dict, said: str | None) -> None:
    found = disagreement([PARTS | {"host": "a"}, PARTS | change | {"host": "b"}])
    assert found == said if said is None else said in str(found)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--node-rank 2 --master-addr 127.0.0.1", "--node-rank must be from 0 to 1"),
        ("--node-rank 0 --master-addr none.invalid", "none.invalid is unknown"),
        ("--node-rank 0 --master-addr 192.0.2.1", "192.0.2.1 is not an address"),
        ("--node-rank 0 --master-addr 127.0.0.1", "{port} is free (Address already"),
    ],
)
def test_nodes_that_cannot_meet_are_told_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, flags: str, said: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    handlers = {number: signal.getsignal(number) for number in launch.SIGNALS}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        argv = ["--nnodes", "2", *flags.split(), "--master-port", str(port), "none.py"]
        assert launch.main(argv) == 2
    for number, handler in handlers.items():
        signal.signal(number, handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said.format(port=port) in line, line


# Faults of the second node: (set-up there, variables there, its flags, what both say)
_DARK = """ip link add dark type veth peer name end
ip address add 10.99.0.2/24 dev dark
ip link set dark up
ip link set end up
"""
_OTHER_CODE = f"""mkdir /tmp/o
cp -r {ROOT}/ragen_mega /tmp/o
echo >> /tmp/o/ragen_mega/run/nodes.py
"""
_OWN_PATHS = f"/tmp/o:{PATHS['PYTHONPATH']}"
FAULTS = {
    "no such interface": ("", {"GLOO_SOCKET_IFNAME": "eth7"}, "",
        "node 1 (node1): GLOO_SOCKET_IFNAME eth7 must be an interface"),
    "loopback": ("", {"GLOO_SOCKET_IFNAME": "lo"}, "",
        "and GLOO_SOCKET_IFNAME names the loopback"),
    "interface that leads nowhere": (_DARK, {"GLOO_SOCKET_IFNAME": "dark"}, "",
        "node 0 (node0): cannot reach node 1 at 10.99.0.2"),
    "own disk": ("", {}, "--output /tmp/own", "run directory must be on storage"),
    "other flags": ("", {}, "--num-groups 4", "rollout.num_groups is 8"),
    "other code": (_OTHER_CODE, {"PYTHONPATH": _OWN_PATHS}, "",
        "same code: ragen_mega.run.nodes"),
}  # fmt: skip


@pytest.mark.slow
@needs_nodes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_node_is_one_line_of_each(
    nodes: list[Node], tmp_path: Path, fault: str
) -> None:
    before, variables, flags, said = FAULTS[fault]
    outcome([nodes[1].start("bash", "-c", before)])
    script, output = program(tmp_path, MEET), ("--output", tmp_path / "runs")
    if fault == "own disk":
        output = ("--output", "/tmp/own")
    started = [
        node.start(
            *launcher(index, nodes[0].address, script, *output, *(flags.split() if index else ())),
            **PATHS | (variables if index else {}),
        )
        for index, node in enumerate(nodes)
    ]
    for code, lines in outcome(started):
        assert (code, len(lines)) == (2, 1), lines
        assert lines[0].startswith("error: ") and said in lines[0], lines


@pytest.mark.slow
@needs_nodes
def test_a_first_node_that_cannot_be_reached(nodes: list[Node], tmp_path: Path) -> None:
    (found,) = outcome([nodes[1].start(*launcher(1, "10.77.0.9", tmp_path / "none.py"), **PATHS)])
    assert (found[0], len(found[1])) == (2, 1), found
    assert "--master-addr 10.77.0.9 cannot be reached" in found[1][0]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `start`, a small model."""
    output = tmp_path_factory.mktemp("nodes")
    launch_ranks(output, "start", 1, *TINY, *WARM_START)
    return output


def assert_equal(one: Path, two: Path) -> None:
    """Metrics of all steps, and every tensor of the last checkpoint, to the bit."""
    assert metrics(one) == metrics(two) and len(metrics(one)) == STEPS
    ours, theirs = state(one, STEPS), state(two, STEPS)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.forks
@needs_nodes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout", [("--use-distributed-optimizer",), ("--pipeline-model-parallel-size", "2")]
)
def test_two_nodes_compute_what_two_ranks_of_one_do(output: Path, layout: tuple[str, ...]) -> None:
    """Also where a node dies on the way, and the run goes on from its last checkpoint."""
    load = ("--load", str(start_of(output)), "--save-interval", "1", "--num-steps", str(STEPS))
    flags = (*TINY, *load, *layout)
    name = layout[0].strip("-")
    one = launch_ranks(output, f"one-{name}", 2, *flags)
    two = output / f"two-{name}"
    argv = [*flags, "--output", str(output), "--name", two.name, "--resume"]
    with two_nodes(output) as nodes:
        ranks = fork_on_nodes(nodes, lambda: main(argv))
        wait_for(two / "checkpoints" / "step_00000002", ranks)
        ranks[1].kill()
        ranks[0].join()
        assert ranks[0].exitcode == 2
    with two_nodes(output) as nodes:
        join_ranks(fork_on_nodes(nodes, lambda: main(argv)))
    assert_equal(one, two)


@pytest.mark.slow
@pytest.mark.forks
@needs_nodes
@pytest.mark.skipif(not PYTHON, reason="needs an environment with SGLang")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", ["trainer", "node"])
def test_what_dies_while_weights_are_on_their_way_loses_nothing(
    victim: str, output: Path, capfd: pytest.CaptureFixture
) -> None:
    """Node 0 trains, node 1 samples with a real server. While the second weights are on their way
    the trainer is killed, or the other node loses its cable and its power.
    """
    name, steps, mark = f"apart-{victim}", 4, output / f"{victim}-fetches"
    flags = f"""--load {start_of(output)} --num-steps {steps} --save-interval 1
        --placement separate --rollout-ranks 1 --max-staleness 1 --importance-cap 2
        --rollout-engine sglang --sglang-python {PYTHON} --sglang-start-timeout 900
        --output {output} --name {name} --resume""".split()

    def train(*, disturbed: bool) -> None:
        broadcast, versions = fetching._Group.broadcast, []

        def fail(self: fetching._Group, memory: torch.Tensor) -> Callable[[], None]:
            versions.append(len(memory))  # a small model is one part
            hit = victim if disturbed and len(versions) == 2 else None
            if hit == "trainer" and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if hit == "node" and os.environ["RANK"] == "1":
                mark.touch()
                signal.pause()
            return broadcast(self, memory)

        fetching._Group.broadcast = fail
        # a server of a busy machine takes longer than a minute to start
        main([*TINY, *flags, "--sampler-timeout", "60" if disturbed else "1800"])

    with two_nodes(output) as nodes:
        ranks = fork_on_nodes(nodes, lambda: train(disturbed=True))
        while victim == "node" and not mark.exists():
            assert all(rank.is_alive() for rank in ranks)
            time.sleep(0.1)
        if victim == "node":
            nodes[1].unplug()
            ranks[1].kill()
        for rank in ranks:
            rank.join()
        codes = [rank.exitcode for rank in ranks]
    assert codes == ([-signal.SIGKILL, 2] if victim == "trainer" else [2, -signal.SIGKILL])
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "--resume goes on from the last checkpoint" in said[0], said
    with two_nodes(output) as nodes:
        join_ranks(fork_on_nodes(nodes, lambda: train(disturbed=False)))
    rows, store = metrics(output / name), RolloutStore(output / name / "rollouts")
    assert [row["step"] for row in rows] == [*range(steps)]
    assert rows[0]["mismatch/logprob_max_abs_diff"] < 1e-4
    for step in range(steps):
        groups = store.read(step).groups
        assert {one.weight_version for group in groups for one in group.trajectories} == {
            max(0, step - 1)
        }


TRAINING = (*FLAGS, "--save-interval", "1", "--keep-last", "0", "--eval-interval", "0")


SRUN = """
    import os, signal, subprocess, sys

    words = sys.argv[1:]
    while words[0].startswith("--"):
        words.pop(0)
    inside = ["--net", "--mount", "--uts", "--ipc", "--pid", f"--wd={os.getcwd()}", *words]
    tasks = [
        subprocess.Popen(
            ["nsenter", "--target", pid, *inside], env=os.environ | {"SLURM_NODEID": str(index)}
        )
        for index, pid in enumerate(os.environ["PRETEND_NODES"].split())
    ]
    sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """
    import os, sys

    if sys.argv[1] == "requeue":
        print("requeued", sys.argv[2])
    else:
        print(*sys.argv[3].split(","), sep="\\n")
"""


class Slurm:
    """Starts the batch script on pretend nodes, with Slurm's two commands that it calls."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, source in (("srun", SRUN), ("scontrol", SCONTROL)):
            path = self.bin / name
            path.write_text(f"#!{sys.executable}{textwrap.dedent(source)}")
            path.chmod(0o755)

    def sbatch(self, nodes: list[Node], *flags: str) -> "subprocess.Popen[str]":
        environment = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PRETEND_NODES": " ".join(str(node.pid) for node in nodes),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": ",".join(node.address for node in nodes),
            "SLURM_NNODES": str(len(nodes)),
            "PYTHON": sys.executable,
            "TARGET": "cpu",
            "NPROC_PER_NODE": "1",
        }
        return subprocess.Popen(
            ["bash", ROOT / "examples" / "slurm" / "train.sbatch", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | PATHS | environment,
        )


def await_checkpoint(run: Path, step: int, process: "subprocess.Popen[str]") -> None:
    while not (run / "checkpoints" / f"step_{step:08d}").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
@needs_nodes
@pytest.mark.timeout(3600)
def test_a_job_that_is_warned_of_its_time_limit_is_requeued_and_goes_on(tmp_path: Path) -> None:
    slurm, run = Slurm(tmp_path), tmp_path / "two"
    flags = ("--recipe", "none", *TRAINING, "--output", str(tmp_path), "--name", "two")
    with two_nodes(tmp_path) as nodes:
        job = slurm.sbatch(nodes, *flags)
        await_checkpoint(run, 1, job)
        for process in psutil.Process(job.pid).children(recursive=True):
            words = process.cmdline()
            if words[:1] == [sys.executable] and words[1].endswith("launch.py"):
                process.send_signal(signal.SIGUSR1)
        said = job.communicate()[0]
        assert job.returncode == 0 and said.splitlines()[-1] == "requeued 7", said
        assert said.count("SIGUSR1: writing a checkpoint") == 1
        assert said.count("ready for cpu") == 2

        job = slurm.sbatch(nodes, *flags)
        said = job.communicate()[0]
        assert job.returncode == 0 and "resumed from" in said, said
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]


@pytest.mark.slow
@needs_nodes
@pytest.mark.skipif(not PYTHON, reason="needs an environment with SGLang")
@pytest.mark.timeout(1800)
def test_every_node_has_servers_of_its_own(nodes: list[Node], tmp_path: Path) -> None:
    """They listen on the loopback, and leave key and sockets on their node."""
    flags = (*TRAINING, "--num-steps", "1", "--rollout-engine", "sglang",
             "--sglang-python", PYTHON, "--output", tmp_path, "--name", "two")  # fmt: skip
    started = [
        node.start(*launcher(index, nodes[0].address, SCRIPT, "--recipe", "none", *flags), **PATHS)
        for index, node in enumerate(nodes)
    ]
    run, seen = tmp_path / "two", [set[str]() for _ in nodes]
    while any(process.poll() is None for process in started):
        for index, node in enumerate(nodes):
            log = run / "sglang" / f"rank_{index:05d}" / "server.log"
            if log.exists() and (found := re.match(r"--- start 1, port (\d+)", log.read_text())):
                seen[index] |= node.listens_on(int(found[1]))
        time.sleep(0.5)
    for code, lines in outcome(started):
        assert code == 0, lines
    assert metrics(run)[0]["mismatch/logprob_max_abs_diff"] < 1e-4
    assert seen == [{"0100007F"}] * 2, "127.0.0.1"
    kept = {path.name for path in (run / "sglang" / "rank_00001").iterdir()}
    assert kept == {"model", "ragen_mega", "server.log"}
