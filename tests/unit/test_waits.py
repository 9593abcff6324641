"""What a process says while its user waits."""

import gc
import io
import sys
import threading
import time
from contextlib import suppress

import pytest

from ragen_mega.system.imports import importing
from ragen_mega.system.outputs import waiting


def test_a_long_wait_says_what_it_is_for_and_a_short_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another thread speaks, and pytest's own capture may lose what is written while it is read.
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.delenv("RANK", raising=False)
    with waiting("short"):
        pass
    with waiting("importing a library", seconds=0.0):
        while not said.getvalue().endswith("\n"):
            time.sleep(0.001)
    assert said.getvalue() == "importing a library ...\n"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(threading.Timer, "start", lambda timer: pytest.fail("another rank speaks"))
    with waiting("another rank", seconds=0.0):
        pass
    assert said.getvalue() == "importing a library ...\n"


def test_no_garbage_is_collected_while_modules_are_imported() -> None:
    with suppress(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
