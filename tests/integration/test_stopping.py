"""Signals to a job, whatever its ranks wait in: C++ code that holds the interpreter, a rendezvous,
nothing at all because they are stopped. All processes end in the stated time.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-P", "-m", "ragen_mega.commands.launch", "--nproc-per-node", "2")

HANGING = {
    "in C++ that holds the interpreter": "[ctypes.PyDLL(None).pthread_mutex_lock(m) for _ in m]",
    "in C++ that does not": "[ctypes.CDLL(None).pthread_mutex_lock(m) for _ in m]",
    "in a thread that is joined": "threading.Thread(target=time.sleep, args=(600,)).start()",
    "under SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP)",
    "deaf to signals": "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)",
}
QUICK = [("in C++ that holds the interpreter", 1)]
LISTENS = """
import ctypes, os, signal, subprocess, threading, time
from ragen_mega.run.stop import StopSignal, end_with_launcher, exit_on_signal
end_with_launcher()
stop = StopSignal()
stop.listen()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
m = ctypes.create_string_buffer(64)  # a mutex, whose second lock waits for ever
os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
"""


@contextmanager
def job(folder: Path, program: str, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of a program, in a session of their launcher's own."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    kept = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    folders = {"TMPDIR": str(folder / "temporary")}
    (folder / "temporary").mkdir()
    with subprocess.Popen(
        [*LAUNCH, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | paths | folders | changes,
        start_new_session=True,
    ) as process:
        yield process
    while [*(folder / "temporary").iterdir()]:  # for as long as the test may take
        time.sleep(0.05)


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait for the lines of both ranks, and return the processes that they name."""
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    return [psutil.Process(pid) for pid in pids]


def ended(family: list[psutil.Process]) -> bool:
    """Wait until all have ended, for as long as the test may take; nobody may reap them."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    while any(map(lives, family)):
        time.sleep(0.05)
    return True


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("hanging", "numbers"),
    [
        pytest.param(
            program,
            numbers,
            id=f"{name}, {len(numbers)} signals",
            marks=() if (name, len(numbers)) in QUICK else pytest.mark.slow,
        )
        for name, program in HANGING.items()
        for numbers in ((15,), (2, 15, 9))
    ],
)
def test_ranks_end_in_time_whatever_they_wait_in(tmp_path, hanging, numbers):
    with job(tmp_path, LISTENS + hanging, RAGEN_SECONDS_TO_STOP="3") as process:
        family = family_of(process)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)
        assert ended(family)
        said = process.communicate()[1]
    assert process.returncode == (143 if numbers == (15,) else -9), said
    assert "Traceback" not in said


@pytest.mark.timeout(180)
def test_ranks_end_with_a_launcher_that_is_killed_while_they_import(tmp_path):
    program = """
        import os, time
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(600)
    """
    with job(tmp_path, program) as process:
        family = family_of(process)
        os.killpg(process.pid, signal.SIGKILL)  # as `timeout -k` does
        assert ended(family)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_ranks_end_in_the_rendezvous_and_say_that_they_wait(tmp_path, number):
    program = """
        import os, time
        from ragen_mega.ranks import collectives
        from ragen_mega.run.stop import end_with_launcher, exit_on_signal
        exit_on_signal()
        end_with_launcher()
        os.write(1, f"{os.getpid()}\\n".encode())
        collectives._SECONDS_OF_SILENCE = 0.5
        if os.environ["RANK"] == "1":
            time.sleep(600)
        collectives.start()
    """
    with job(tmp_path, program) as process:
        family = family_of(process)
        word = process.stderr.readline()
        assert word.startswith("rank 0 waits for the other ranks to join, 2 in all")
        process.send_signal(number)
        assert ended(family)
        assert process.communicate()[1] in ("", f"stopped by {number.name} at once\n")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_signal_that_its_sender_doubles_counts_once(tmp_path):
    """`timeout` sends it to the launcher and to its group, a scheduler to the ranks as well."""
    program = """
        import os, sys, time
        from ragen_mega.run.stop import StopSignal
        stop = StopSignal()
        stop.listen()
        os.write(1, f"{os.getpid()}\\n".encode())
        while not stop.received:
            time.sleep(0.01)
        time.sleep(2)
        os.write(1, b"checkpoint\\n")
        sys.exit(stop.exit_code)
    """
    with job(tmp_path, program) as process:
        family = family_of(process)
        process.send_signal(signal.SIGTERM)
        for rank in family:
            rank.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.communicate()[0] == "checkpoint\n" * 2
    assert process.returncode == 143


def patch_launcher(tmp_path, monkeypatch, patch="guardian.SECONDS_TO_WAIT = 2.0") -> None:
    """Have `job` start a launcher after the statements of `patch`."""
    launcher = tmp_path / "patched.py"
    launcher.write_text(
        "import sys\nfrom ragen_mega.commands import guardian, launch\n"
        f"{textwrap.dedent(patch)}\nsys.exit(launch.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(
        sys.modules[__name__],
        "LAUNCH",
        (sys.executable, "-P", str(launcher), "--nproc-per-node", "2"),
    )


@pytest.mark.timeout(180)
def test_a_signal_before_the_first_line_of_what_torchrun_times(tmp_path, monkeypatch):
    """Its `prof` reads the clock inside its `try`, and subtracts that time in its `finally`."""
    patch = """
        import os, signal
        from torch.distributed.elastic.metrics import api

        class Clock:
            def time():
                if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                    os.kill(os.getpid(), signal.SIGTERM)
                return 0.0

        api.time = Clock
    """
    patch_launcher(tmp_path, monkeypatch, patch)
    with job(tmp_path, "import time; time.sleep(600)") as process:
        said = process.communicate()[1]
    assert process.returncode == 143 and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_that_compute_get_the_time_that_they_need(tmp_path, monkeypatch):
    """Longer than a rank that waits gets."""
    program = """
        import os, sys, time
        from ragen_mega.run.stop import StopSignal
        stop = StopSignal()
        stop.listen()
        os.write(1, f"{os.getpid()}\\n".encode())
        while not stop.received:
            time.sleep(0.01)
        end = time.monotonic() + 6
        while time.monotonic() < end and os.environ["RANK"] == "0":
            pass
        os.write(1, b"checkpoint\\n")
        sys.exit(stop.exit_code)
    """
    patch_launcher(tmp_path, monkeypatch)
    with job(tmp_path, program) as process:
        family_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[0] == "checkpoint\n" * 2
    assert process.returncode == 143


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_that_compute_do_not_outlive_a_killed_launcher(tmp_path, monkeypatch):
    """Its first signal was not SIGKILL, and they never come to the end of their step."""
    program = """
        import os
        from ragen_mega.run.stop import StopSignal
        stop = StopSignal()
        stop.listen()
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            pass
    """
    patch_launcher(tmp_path, monkeypatch)
    with job(tmp_path, program) as process:
        family = family_of(process)
        process.send_signal(signal.SIGKILL)
        assert ended(family)


def test_a_job_ends_well_without_its_guardian(tmp_path):
    program = f"""
        import os, psutil, signal
        from ragen_mega.commands.guardian import guarded

        with guarded({str(tmp_path / "folder")!r}, (signal.SIGTERM,)):
            own = psutil.Process()
            (guardian,) = (
                each for each in psutil.process_iter(["cmdline"])
                if each.info["cmdline"] == own.cmdline() and each != own
            )
            guardian.kill()
            while guardian.is_running() and guardian.status() != psutil.STATUS_ZOMBIE:
                pass
        """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_limit_that_is_none_is_one_line(tmp_path):
    with job(tmp_path, "", RAGEN_SECONDS_TO_STOP="soon") as process:
        said = process.communicate()[1]
    assert process.returncode == 2
    assert said.startswith("error: RAGEN_SECONDS_TO_STOP must be a number of seconds")
