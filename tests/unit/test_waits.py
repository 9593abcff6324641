"""What a process says while its user waits."""

import threading

import pytest

from ragen_mega.system.outputs import waiting


def test_a_long_wait_says_what_it_is_for_and_a_short_one_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    before = threading.active_count()
    with waiting("short"):
        pass
    said = ""
    with waiting("importing a library", seconds=0.0):
        while not said:  # until the other thread has spoken
            said = capfd.readouterr().err
    assert said == "importing a library ...\n"
    monkeypatch.setenv("RANK", "1")
    with waiting("another rank", seconds=0.0):
        assert threading.active_count() <= before + 1
    assert capfd.readouterr() == ("", "")
