"""Who waits for whom: whatever a rank hangs in, the first line that the job prints names it."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess as Process

import pytest

from ragen_mega.engines.sglang.http_json import JSONClient
from ragen_mega.engines.sglang.requests import Requests
from ragen_mega.environments.pool import Worker
from ragen_mega.ranks import collectives, watch
from ragen_mega.ranks.waits import here
from tests.support.forked_ranks import fork_ranks, kill_ranks

pytestmark = pytest.mark.forks
PATIENCE = 3.0


def in_a_world() -> None:
    """A step of an environment never returns; a thread calls it."""

    async def play() -> None:
        await Worker(0.0).call(step_of_a_world)

    with here.in_stage("rollout"):
        asyncio.run(play())


def step_of_a_world() -> None:
    time.sleep(1000)


def in_a_request() -> None:
    """A server accepts and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        requests = Requests(lambda client: True, hang_timeout=1000.0)
        asyncio.run(requests.ask(JSONClient(f"127.0.0.1:{port}", "Bearer key"), {}))


def in_another_collective() -> None:
    collectives.gather_objects("a word")


def not_at_all() -> None:
    while True:
        time.sleep(0.01)
        here.moved()


@contextmanager
def ranks_of(hang: Callable[[], None], patience: float = PATIENCE) -> Iterator[list[Process]]:
    """Three ranks, of which rank 1 hangs while the others wait for it."""

    def rank() -> None:
        collectives.start()
        watch.begin(collectives.board(), collectives.rank(), 3, patience)
        collectives.barrier()
        here.step = 7
        if collectives.rank() == 1:
            hang()
        collectives.barrier()

    processes = fork_ranks(rank, 3)
    try:
        yield processes
    finally:
        kill_ranks(processes)


def read_report(capfd: pytest.CaptureFixture, seconds: float = 60.0) -> list[str]:
    """The first report that the ranks print: a line of the job, and one of each that answers."""
    said, end = "", time.monotonic() + seconds
    while "waits for" not in said or said.count("\n  rank ") + said.count("no answer") < 3:
        assert time.monotonic() < end, said
        said += capfd.readouterr().err
        time.sleep(0.05)
    return said[said.index("the job ") :].splitlines()


@pytest.mark.parametrize(
    ("hang", "places"),
    [
        (in_a_world, ["rollout", "1 environments work, the first in step_of_a_world (test_watch"]),
        (in_a_request, ["open requests is /generate to 127.0.0.1:"]),
        (in_another_collective, ["a word of every rank", "all_gather ("]),
    ],
)
def test_the_first_line_names_the_rank_that_hangs(
    hang: Callable[[], None], places: list[str], capfd: pytest.CaptureFixture
) -> None:
    with ranks_of(hang) as processes:
        first, *others = read_report(capfd)
    assert first.startswith(f"the job waits for rank 1 (process {processes[1].pid} on ")
    assert [line.split(":")[0] for line in others] == ["  rank 0", "  rank 1", "  rank 2"]
    assert all(line.split(": ")[1].startswith("step 7, ") for line in others)
    assert all(place in others[1] for place in places), others[1]
    assert "waits for all ranks" in others[0] and "barrier (" in others[0]


def test_a_stopped_rank_is_named_by_those_that_answer(capfd: pytest.CaptureFixture) -> None:
    with ranks_of(lambda: os.kill(os.getpid(), signal.SIGSTOP)) as processes:
        first, *others = read_report(capfd)
    assert f"rank 1 (process {processes[1].pid} on " in first and "stopped, killed" in first
    assert [line.split(":")[0] for line in others] == ["  rank 0", "  rank 2"]


def test_a_rank_that_works_for_long_is_no_hang_but_whoever_asks_is_told(
    capfd: pytest.CaptureFixture,
) -> None:
    def work() -> None:
        signal.signal(signal.SIGUSR2, lambda number, frame: watch.ask())
        not_at_all()

    with ranks_of(work) as processes:
        time.sleep(3 * PATIENCE)
        assert not capfd.readouterr().err
        os.kill(processes[1].pid, signal.SIGUSR2)
        first, *others = read_report(capfd)
    assert "waits for rank 1 (" in first and "not_at_all (test_watch.py:" in others[1]


@pytest.mark.slow
def test_a_job_whose_store_is_silent_is_told_by_each_rank(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the node that keeps it has lost its power."""

    class Silent:
        def set(self, key: str, value: str) -> None:
            threading.Event().wait()

    monkeypatch.setattr(watch, "_SECONDS_TO_TELL", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    watching = watch.Watch(Silent(), 4, 8, 1.0)
    end = time.monotonic() + 30.0
    said = ""
    while "rank 4" not in said:
        assert time.monotonic() < end, said
        time.sleep(1.5)  # one line
        said += capfd.readouterr().err
    watching.end()
    assert said.startswith("the job's store, which node 0 keeps (node-0), has not answered")
