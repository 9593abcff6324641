"""The checkpoints of a run: there whole or not at all, verified before use, and pruned.

    <run>/checkpoints/step_00000012/    manifest.json  state.json  and what the trainers wrote

A checkpoint is written under a hidden name, by a thread while training goes on, and renamed once
every rank's file is on disk. `manifest.json` holds the SHA-256 of every file and of itself;
nothing that is read is executed. It holds no random states: every draw of a run is a function of
the seed, the step and the task.
"""

import contextlib
import fcntl
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ragen_mega.data import distributed
from ragen_mega.storage.integrity import (
    check_files,
    describe_file,
    read_manifest,
    sync,
    write_manifest,
    write_whole,
)

CHECKPOINTS = "checkpoints"
STATE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d{8})")
_FIXED = ("parallel.bf16", "advantage.advantage_estimator")
_SECONDS_TO_GATHER = 600.0
_NOTHING_OF = "no file of rank"
"""How long rank 0 waits for the files of the others after its own is written."""

T = TypeVar("T")
Stage = Callable[[Path], Callable[[], Path]]
"""Copies the state of this rank, collectively; the function that it returns writes it as one file
of the directory, from any thread.
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: what its manifest and `state.json` say."""

    directory: Path
    step: int
    """Steps that were complete; the next one has this number."""
    score: float | None
    """Success of the evaluation at this step, if there was one."""
    config: dict[str, Any]
    state: dict[str, Any]


class InUse(ValueError):
    """Another process works in a run directory."""


def lock_run(directory: Path) -> TextIO:
    """Claim a run directory for as long as the returned file is open, at most until this process
    ends, however it ends.

    The lock file is beside the directory, which may be deleted and recreated. Raises InUse if
    another process has it, on another node too, and ValueError if the file system has no locks.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # of a file system that makes its directories itself
        raise ValueError(
            f"run directory {directory}: {error.filename} cannot be made ({error.strerror}); choose"
            " another --output"
        ) from None
    file = (directory.parent / f".{directory.name}.lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InUse(
            f"another process works in run directory {directory}; wait for it, stop it, or choose"
            " another --name"
        ) from None
    return file


def find_latest(directory: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint in `directory` that verifies; `report` gets a line for each newer one
    that does not.
    """
    for path in _published(directory):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            report(f"checkpoint {path} is skipped: {error}")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of a checkpoint. Raises ValueError that explains the first bad one."""
    manifest = read_manifest(path, format=FORMAT)
    check_files(path, manifest["files"])
    state = json.loads((path / STATE).read_text())
    return Checkpoint(path, manifest["step"], manifest["score"], manifest["config"], state)


def check_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """The settings that differ from the checkpoint's, one line each. Raises ValueError if one may
    not differ.
    """
    before, now = (
        {
            f"{section}.{name}": value
            for section, entries in values.items()
            for name, value in entries.items()
        }
        for values in (checkpoint.config, json.loads(json.dumps(config)))
    )
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if fixed := [key for key in changed if key.startswith("model.") or key in _FIXED]:
        raise ValueError(
            f"{fixed[0]} was {before.get(fixed[0])} in {checkpoint.directory} and is"
            f" {now.get(fixed[0])} now; resume with the model, precision and estimator of the run"
        )
    return [
        f"{key} was {before.get(key)} and is {now.get(key)} now"
        for key in changed
        if not key.startswith(("logging.", "checkpoint.", "parallel."))
    ]


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, and deletes those that are not to be kept.
    Used by every rank.

    `keep_last` newest ones stay (0: all); with `keep_best` also the one with the highest score, and
    always those that a checkpoint which stays has pinned, since its run may go back to them. An
    error of the writing thread, such as a full disk, is raised by the next `save` or `wait`.
    """

    def __init__(
        self, directory: Path, config: Mapping[str, Any], *, keep_last: int, keep_best: bool
    ) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.config = config
        self.saved_step: int | None = None
        """Of the newest checkpoint that this process wrote or read."""
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def save(
        self,
        step: int,
        stage: Stage,
        state: Mapping[str, Any],
        score: float | None,
        pinned: Sequence[int] = (),
    ) -> None:
        """Copy the state and write it in the background; the checkpoints of the steps `pinned` stay
        as long as this one. Waits for the previous one. Collective.
        """
        self.wait()
        temporary = self.directory / f".{_name(step)}.tmp"
        distributed.on_main(lambda: self._prepare(temporary))
        write = stage(temporary)
        text = json.dumps(state, indent=2) + "\n"  # now: the caller may change it afterwards
        self.saved_step = step
        self._thread = threading.Thread(
            target=self._write,
            args=(write, temporary, {"step": step, "score": score, "pinned": [*pinned]}, text),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when every rank has nothing left to write and the checkpoint is in its place.
        Collective.

        Raises OSError on all ranks if one could not write.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        everyone = distributed.gather_objects(self._error)
        if errors := [error for error in everyone if error is not None]:
            cause = min(errors, key=lambda error: error.startswith(_NOTHING_OF))  # not the echo
            raise OSError(
                f"cannot write a checkpoint to {self.directory}: {cause}; free space or choose"
                " another --output"
            )

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of a step, verified, on all ranks. Collective. Raises ValueError if it is
        missing or damaged.
        """
        self.wait()
        return distributed.on_main(lambda: read_checkpoint(self.directory / _name(step)))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first."""
        return [int(path.name.removeprefix("step_")) for path in _published(self.directory)]

    def last(self, change: str) -> str:
        """A sentence about the newest checkpoint, for a run that cannot go on without a `change`.
        Collective: waits for one that is being written.
        """
        self.wait()
        if self.saved_step is None:
            return f"there is no checkpoint yet: start again with {change}"
        path = self.directory / _name(self.saved_step)
        return (
            f"the last good checkpoint is {path}: --resume goes on from there, e.g. with {change}"
        )

    def _prepare(self, temporary: Path) -> None:
        self.directory.mkdir(exist_ok=True)
        # of a process that was killed while it wrote or deleted
        for leftover in self.directory.glob(".step_*"):
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _write(
        self, write: Callable[[], Path], temporary: Path, facts: Mapping[str, Any], state: str
    ) -> None:
        marker = _marker(temporary, distributed.rank())
        try:
            path = write()
            write_whole(marker, json.dumps({path.name: describe_file(path)}).encode())
            if distributed.is_main():
                write_whole(temporary / STATE, state.encode())
                self._publish(temporary, facts)
        except OSError as error:
            self._error = str(error)
            with contextlib.suppress(OSError):  # rank 0 need not wait
                write_whole(marker, json.dumps(self._error).encode())

    def _publish(self, temporary: Path, facts: Mapping[str, Any]) -> None:
        """Rank 0: once every rank's file is there, write the manifest and give the directory its
        name.
        """
        files: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + _SECONDS_TO_GATHER
        for rank in range(distributed.world_size()):
            marker = _marker(temporary, rank)
            while not marker.exists():  # one question at a time: the storage may be far away
                if time.monotonic() > deadline:
                    raise OSError(f"{_NOTHING_OF} {rank} after {_SECONDS_TO_GATHER:.0f} s")
                time.sleep(0.02)
            told = json.loads(marker.read_text())
            if isinstance(told, str):
                raise OSError(told)
            files |= told
            marker.unlink()
        for path in list(temporary.iterdir()):
            if path.name not in files:
                sync(path)
                files[path.name] = describe_file(path)
        facts = {
            "format": FORMAT,
            **facts,
            "score_is": "mean success over the environments in the evaluation at this step",
            "config": self.config,
        }
        write_manifest(temporary, facts, files)
        sync(temporary)
        final = self.directory / _name(facts["step"])
        if final.exists():  # a damaged one that was skipped, or one of a run that went back
            _discard(final)
        temporary.rename(final)
        sync(self.directory)
        for path in _published(self.directory):
            if path.name > final.name:  # as damaged: this run began before it
                _discard(path)
        self._prune()

    def _prune(self) -> None:
        published = _published(self.directory)
        kept = set(published[: self.keep_last] if self.keep_last else published)
        if self.keep_best:
            scored = ((path, _fact(path, "score")) for path in published)
            scores = {path: score for path, score in scored if score is not None}
            kept |= {max(scores, key=lambda path: (scores[path], path.name))} if scores else set()
        pinned = {_name(step) for path in kept for step in _fact(path, "pinned") or ()}
        for path in published:
            if path not in kept and path.name not in pinned:
                _discard(path)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _published(directory: Path) -> list[Path]:
    """Newest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), reverse=True)


def _fact(path: Path, name: str) -> Any:
    """What the manifest of a checkpoint says; None if it does not, or is damaged."""
    try:
        return read_manifest(path, format=FORMAT).get(name)
    except ValueError:
        return None


def _marker(directory: Path, rank: int) -> Path:
    """In it is what this rank's file is, or why there is none."""
    return directory / f".written_{rank:05d}"


def _discard(path: Path) -> None:
    """Delete a checkpoint; nobody ever sees half of one."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)
