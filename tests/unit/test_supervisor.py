"""The supervisor with real processes and real SIGKILL: nothing that it started outlives it, its
owner or the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragen_mega.engines.sglang import supervisor
from tests.support.processes import command_of, is_alive, wait_until

# A command with a child, and with a grandchild in a session of its own whose parent is gone: the
# hardest to find again.
FAMILY = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper)
start = (
    "import subprocess, sys; from subprocess import DEVNULL;"
    "quiet = dict(stdout=DEVNULL, stderr=DEVNULL);"
    "print(subprocess.Popen(sys.argv[1:], start_new_session=True, **quiet).pid)"
)
orphan = subprocess.run([sys.executable, "-c", start, *sleeper], stdout=subprocess.PIPE, text=True)
open(sys.argv[1], "w").write(f"{child.pid} {orphan.stdout.strip()} ")
{then}
"""
SUPERVISED = (sys.executable, "-I", supervisor.__file__)
OWNER = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
time.sleep(600)
"""


class Family:
    """An owner, its supervisor, and the processes of the supervised command."""

    def __init__(self, directory: Path, then: str) -> None:
        self.file = directory / "pids"
        program = FAMILY.replace("{then}", then)
        self.weights = directory / "weights"
        self.weights.mkdir()
        command = [*SUPERVISED, str(self.weights), sys.executable, "-c", program, str(self.file)]
        self.owner = subprocess.Popen([sys.executable, "-c", OWNER, *command])
        wait_until(lambda: self.file.exists() and self.file.read_text().endswith(" "))
        self.supervisor = next(
            pid
            for pid in supervisor.descendants(self.owner.pid)
            if "supervisor.py" in command_of(pid)
        )
        self.members = [
            *supervisor.descendants(self.supervisor),
            *map(int, self.file.read_text().split()),
        ]

    def kill(self) -> None:
        for pid in (self.owner.pid, self.supervisor, *self.members):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.owner.wait()

    @property
    def command(self) -> int:
        return next(
            pid for pid in supervisor.descendants(self.supervisor) if "pids" in command_of(pid)
        )

    def wait_for_end(self) -> None:
        wait_until(lambda: not any(map(is_alive, [self.supervisor, *self.members])))


@pytest.fixture
def family(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Family]:
    family = Family(tmp_path, getattr(request, "param", "time.sleep(600)"))
    yield family
    family.kill()


@pytest.mark.parametrize("num_signals", [1, 200])
def test_everything_ends_when_the_supervisor_is_told_to(family: Family, num_signals: int) -> None:
    """Also if it is told again: `timeout` signals the supervisor and then its whole group, so that
    the second signal comes while it kills.
    """
    for _ in range(num_signals):
        os.kill(family.supervisor, signal.SIGTERM)
        time.sleep(0.0005)
        if not is_alive(family.supervisor):
            break
    family.wait_for_end()
    assert family.weights.exists()  # its owner still lives


def test_the_command_ends_when_the_supervisor_is_killed(family: Family) -> None:
    command = family.command
    os.kill(family.supervisor, signal.SIGKILL)
    wait_until(lambda: not is_alive(command))


@pytest.mark.parametrize("family", ["time.sleep(1)"], indirect=True)
def test_what_the_command_leaves_behind_ends_with_it(family: Family) -> None:
    family.wait_for_end()


SHARING = """
from multiprocessing import get_context, shared_memory
lock = get_context("spawn").Lock()
names = (prefix + f"test_{os.getpid()}" for prefix in ("sgl_shm_mq_", "other_"))
kept = [shared_memory.SharedMemory(name, create=True, size=64) for name in names]
time.sleep(600)
"""


@pytest.mark.parametrize("family", ["import os" + SHARING], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_ends_when_the_owner_is_killed(family: Family, number: signal.Signals) -> None:
    """The weights and the shared memory of the command too, and no other program's."""
    # The process that tracks the lock may have begun, too.
    assert len(set(family.members)) in (3, 4) and all(map(is_alive, family.members))
    other = Path(f"/dev/shm/other_test_{family.command}")
    wait_until(other.exists)
    wait_until(lambda: other.stat().st_ino in supervisor.shared_memory(family.supervisor))
    inodes = supervisor.shared_memory(family.supervisor)
    with os.scandir("/dev/shm") as found:  # other programs may delete theirs meanwhile
        shared = [Path(entry.path) for entry in found if entry.inode() in inodes]
    assert other in shared and len(shared) == 3  # the lock's and the queue's
    os.kill(family.owner.pid, number)
    family.owner.wait()
    family.wait_for_end()
    assert not family.weights.exists()
    assert [path for path in shared if path.exists()] == [other]
    other.unlink()


@pytest.mark.parametrize(
    ("command", "status"), [("import sys; sys.exit(7)", 7), ("import os; os.abort()", 1)]
)
def test_the_status_is_that_of_the_command(command: str, status: int) -> None:
    process = subprocess.Popen(
        [*SUPERVISED, "none", sys.executable, "-c", command],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.wait(30) == status
    process.stdin.close()


def test_a_byte_ends_the_command_and_keeps_the_directory(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*SUPERVISED, str(tmp_path), sys.executable, "-c", "import time; time.sleep(600)"],
        stdin=subprocess.PIPE,
    )
    process.communicate(b".", timeout=30)
    assert process.returncode == 1 and tmp_path.exists()


def test_a_command_that_does_not_exist_is_said() -> None:
    process = subprocess.run(
        [*SUPERVISED, "none", "/no/such/command"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert process.returncode == 1 and "cannot start /no/such/command" in process.stderr


def test_what_does_not_die_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a process in a driver, which no signal ends. The clock is the test's."""
    now, alive, killed = 0.0, {11: 5.0, 12: 1e9, 13: 1e9}, set()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(
        supervisor, "descendants", lambda root: [pid for pid, end in alive.items() if end > now]
    )
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.add((pid, number)))
    supervisor.kill_descendants(10)
    assert killed == {(pid, signal.SIGKILL) for pid in alive}
    assert 30.0 <= now < 31.0
    said = capsys.readouterr().err
    assert "12, 13" in said and "11" not in said and said.count("\n") == 1
