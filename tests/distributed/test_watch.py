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
from typing import Any

import pytest
import torch.distributed as dist

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
def ranks_of(hang: Callable[[], None], who: int = 1) -> Iterator[list[Process]]:
    """Three ranks, of which one hangs while the others wait for it."""

    def rank() -> None:
        collectives.start()
        watch.begin(collectives.board(), collectives.rank(), 3, PATIENCE)
        collectives.barrier()
        here.step = 7
        if collectives.rank() == who:
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


@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named_by_those_that_answer(
    who: int, capfd: pytest.CaptureFixture
) -> None:
    with ranks_of(lambda: os.kill(os.getpid(), signal.SIGSTOP), who) as processes:
        first, *others = read_report(capfd)
    assert f"rank {who} (process {processes[who].pid} on " in first and "stopped, killed" in first
    assert [line.split(":")[0] for line in others] == [f"  rank {1 - who}", "  rank 2"]


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


class Counted:
    """A store that notes each key that its rank asks for, once for each kind of request."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.asked = store, set[tuple[str, str]]()

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        def request(keys: str | list[str], *arguments: Any) -> Any:
            self.asked |= {(kind, key) for key in ([keys] if isinstance(keys, str) else keys)}
            return getattr(self._store, kind)(keys, *arguments)

        return request


@pytest.mark.parametrize(
    ("only_if_still", "num_begun", "first"),
    [
        (False, 18, "the job waits for rank "),
        (False, 17, "the job waits for rank 17 (which has not begun): no answer within 6 s"),
        (True, 18, None),
    ],
)
def test_what_a_rank_asks_of_the_store_for_a_report_does_not_grow_with_the_ranks(
    only_if_still: bool,
    num_begun: int,
    first: str | None,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank of each node reads what all have said, and only where a report is due: the one
    thread of the store would be busy for minutes if each of a thousand ranks read a thousand keys.
    """
    # of a busy machine, unless one rank never answers
    monkeypatch.setattr(watch, "_SECONDS_TO_ANSWER", 6.0 if num_begun < 18 else 60.0)
    store, stores, watches = dist.HashStore(), [], []
    for rank in range(num_begun):
        monkeypatch.setenv("GROUP_RANK", str(rank // 9))
        stores.append(Counted(dist.PrefixStore("board", store.clone())))
        watches.append(watch.Watch(stores[-1], rank, 18, 1000.0))
    assert watches[0].ask(60.0, only_if_still=only_if_still)
    for each in watches:
        each.end()
    assert max(len(each.asked) for each in stores) <= 14
    num_reports = 0 if first is None else 2  # one a node
    assert sum(("get", "names") in each.asked for each in stores) == num_reports
    said = capfd.readouterr().err.splitlines()
    assert sum(line.startswith(first or "the job") for line in said) == num_reports
    assert len(said) == num_reports * (1 + num_begun)


@pytest.mark.slow
def test_a_job_whose_store_is_silent_is_told_by_each_rank(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the node that keeps it has lost its power."""

    class Silent:
        def append(self, key: str, value: str) -> None:
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
