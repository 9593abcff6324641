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
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import (
    WITHOUT_EFFECT,
    flat,
    plays_alike,
    unknown_note,
    with_defaults,
)
from ragen_mega.ranks import collectives
from ragen_mega.storage.integrity import (
    check_files,
    describe_file,
    read_manifest,
    sync,
    write_manifest,
    write_remedy,
    write_whole,
)
from ragen_mega.storage.run_directory import with_name

CHECKPOINTS = "checkpoints"
SET_ASIDE = "set_aside"
"""Folder of the checkpoints that did not verify and were in the way of later ones."""
STATE = "state.json"
FORMAT = 2
_NAME = re.compile(r"step_(\d{8})")
_OF_EVALUATION = ("evaluation.boards", "evaluation.eval_prompts", "evaluation.eval_temperature")
"""Settings that change a score, beside those that `plays_alike` compares."""
_FIXED = ("parallel.bf16", "advantage.advantage_estimator", "lora.lora_rank")
_OF_THE_START = ("warm_start.", "lora.lora_load")
_FIXED_WITH_ADAPTERS = ("lora.lora_alpha", "lora.lora_targets")
BASE_MODEL = "base"
"""Key in `models` of the model beside which adapters stand."""
_SECONDS_TO_GATHER = 600.0
"""Time that rank 0 waits for the files of the others after its own is written."""
_NOTHING_OF = "no file of rank"

Stage = Callable[[Path], Callable[[], Sequence[Path]]]
"""Copies the state of this rank, collectively; the function that it returns writes it to the
directory, from any thread, and returns the paths of the files that hold this rank's part.
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
    models: dict[str, str]
    """Flag -> digest of the content of the model that it loads."""
    state: dict[str, Any]


class DirectoryInUse(ValueError):
    """Another process has the lock of a run directory."""


def lock_named(config: StarPOConfig, least: int = 1) -> tuple[StarPOConfig, str | None, TextIO]:
    """Return the configuration with the name of its run, a message about a name that was chosen for
    it, and the lock of its directory. A chosen name ends in `least` or a higher number. If two
    processes start without --name at the same time, the second takes the next one. Raises
    ValueError as `lock_run` does.
    """
    may_choose = config.logging.name is None and not (
        config.checkpoint.resume or config.logging.overwrite
    )
    named, said = with_name(config, least)
    try:
        return named, said, lock_run(named.run_directory)
    except DirectoryInUse:
        if not may_choose:
            raise
    return lock_named(config, least + 1)


def lock_run(directory: Path) -> TextIO:
    """Claim a run directory for as long as the returned file is open, at most until this process
    ends, however it ends.

    The lock file is beside the directory, which may be deleted and recreated; only its owner can
    open it, since whoever can read it could hold the lock. Raises DirectoryInUse if another process
    has it, on another node too, and ValueError if the file system has no locks.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # some file systems make directories themselves
        raise ValueError(
            f"run directory {directory}: {error.filename} cannot be made ({error.strerror}); choose"
            " another --output"
        ) from None
    directory = directory.resolve()  # one lock, whatever links lead to it
    path = directory.parent / f".{directory.name}.lock"
    file = open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))
    os.fchmod(file.fileno(), 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DirectoryInUse(
            f"another process works in run directory {directory}; wait for it, stop it, or choose"
            " another --name"
        ) from None
    except OSError as error:  # ENOLCK of NFS, ENOSYS of Lustre
        file.close()
        raise ValueError(
            f"run directory {directory} must be on storage that can lock files ({error.strerror});"
            " choose another --output, or mount Lustre with -o flock"
        ) from None
    return file


def find_latest(
    directory: Path, report: Callable[[str], None], *, last: int | None = None
) -> Checkpoint | None:
    """Return the newest checkpoint in `directory` that verifies, of at most `last` steps;
    `report` gets a line, on rank 0, for each newer one that does not. Raises OSError if one cannot
    be read: it may be intact. Collective.
    """
    for path in collectives.on_main(lambda: _published(directory)):
        if last is not None and path.name > _name(last):
            continue
        try:
            return read_checkpoint(path)
        except ValueError as error:
            if collectives.is_main():
                report(f"checkpoint {path} is skipped: {error}")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of a checkpoint; each rank reads a share, because one process would take
    more than an hour for the largest. Raises, on all ranks, ValueError that explains a bad file,
    and OSError if one cannot be read. Collective.
    """
    manifest = collectives.on_main(lambda: read_manifest(path, format=FORMAT))
    share = slice(collectives.rank(), None, collectives.world_size())
    collectives.on_each(lambda: check_files(path, manifest["files"], share=share))
    facts = {name: manifest[name] for name in ("step", "score", "config", "models")}
    state = collectives.on_main(lambda: json.loads((path / STATE).read_bytes()))
    return Checkpoint(path, **facts, state=state)


def check_config(
    checkpoint: Checkpoint, config: Mapping[str, Any], models: Mapping[str, str]
) -> list[str]:
    """Return the settings that differ from the checkpoint's, one line each. Raises ValueError if
    one may not differ. A model may have moved: `models` is the content of the present ones.
    """
    before = flat(with_defaults(checkpoint.config))
    now = flat(json.loads(json.dumps(config)))
    changed = [key for key in sorted(before.keys() & now.keys()) if before[key] != now[key]]
    moved = {
        f"model.{flag}" for flag, digest in models.items() if checkpoint.models.get(flag) == digest
    }
    known, found = checkpoint.models.get(BASE_MODEL), models.get(BASE_MODEL)
    if known != found and known and before.get("lora.lora_rank") == now.get("lora.lora_rank"):
        raise ValueError(
            f"the adapters in {checkpoint.directory} belong to a model with the digest {known}, and"
            f" the present one has {found}; resume with the files of that model"
        )
    further = _FIXED_WITH_ADAPTERS if before.get("lora.lora_rank") else ()
    fixed = [k for k in changed if k.startswith("model.") or k in (*_FIXED, *further)]
    if fixed := [key for key in fixed if key not in moved]:
        raise ValueError(
            f"{fixed[0]} was {before[fixed[0]]} in {checkpoint.directory} and is"
            f" {now[fixed[0]]} now; resume with the model, precision and estimator of the run"
        )
    note = unknown_note(checkpoint.config)
    return ([note] if note else []) + [
        f"{key} was {before[key]} and is {now[key]} now"
        + ", which changes nothing after the start" * key.startswith(_OF_THE_START)
        for key in changed
        if key.partition(".")[0] not in WITHOUT_EFFECT
    ]


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, and deletes those that are not to be kept.
    Used by every rank.

    `keep_last` newest ones stay (0: all); with `keep_best` also the one with the highest score, and
    always those that a checkpoint which stays has pinned, since its run may go back to them. One
    that does not verify is never deleted: it is moved to the folder `set_aside`. A checkpoint that
    cannot be written, for example because the disk is full, is reported at once and costs the run
    nothing but that checkpoint: the next `save` tries again, and `require` raises the error.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        *,
        keep_last: int,
        keep_best: bool,
        models: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`models`: flag -> digest of the content of the model that it loads."""
        self.directory = directory
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.config = config
        self.models = models
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this process wrote or read."""
        self._saving = 0
        self._own: set[str] = set()  # names of checkpoints that this process wrote
        self._thread: threading.Thread | None = None
        self._error: str | None = None  # of this rank's last write
        self._failure: str | None = None  # why the newest checkpoint is not there, on every rank

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
        self._saving = step
        try:
            temporary = collectives.on_main(lambda: self._prepare(step))
        except OSError as error:
            self._failure = f"{self._cannot_write()}: {self._tell(error)}"
            return
        write = stage(temporary)
        text = json.dumps(state, indent=2) + "\n"  # now: the caller may change it afterwards
        self._thread = threading.Thread(
            target=self._write,
            args=(write, temporary, {"step": step, "score": score, "pinned": [*pinned]}, text),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when no rank has anything left to write, and the checkpoint is in its place or its
        remains are gone. Collective.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        everyone = collectives.gather_objects(self._error)
        errors = [error for error in everyone if error is not None]
        if not errors:
            self._failure, self.saved_step = None, self._saving
            return
        cause = min(errors, key=lambda error: error.startswith(_NOTHING_OF))  # not the echo
        self._failure = f"{self._cannot_write()}: {cause}"
        with contextlib.suppress(OSError):
            collectives.on_main(self._delete_unfinished)

    def require(self) -> None:
        """Wait as `wait` does. Raises OSError on all ranks if the newest checkpoint could not be
        written.
        """
        self.wait()
        if self._failure is not None:
            raise OSError(self._failure)

    def has(self, step: int) -> bool:
        """Return whether the newest checkpoint, which may still be being written, is the checkpoint
        of `step`.
        """
        return step == (self.saved_step if self._thread is None else self._saving)

    def read(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step, verified, on all ranks. Collective. Raises ValueError if
        it is missing or damaged.
        """
        self.wait()
        return read_checkpoint(self.directory / _name(step))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        return [int(path.name.removeprefix("step_")) for path in _published(self.directory)]

    def best_score(self, last: int) -> float | None:
        """Return the highest score of the checkpoints of at most `last` steps, None if there is
        none; on the first rank.
        """
        facts = {}
        for path in _published(self.directory):
            with contextlib.suppress(OSError, ValueError):
                facts[path] = read_manifest(path, format=FORMAT)
        scores = self._scores(facts)
        return max((scores[path] for path in scores if path.name <= _name(last)), default=None)

    def _scores(self, facts: Mapping[Path, Mapping[str, Any]]) -> dict[Path, float]:
        """Return the scores by checkpoint, but for scores of other evaluations than this run's."""
        return {
            path: fact["score"]
            for path, fact in facts.items()
            if fact["score"] is not None
            and plays_alike(fact["config"], self.config, *_OF_EVALUATION)
        }

    def last(self, change: str) -> str:
        """Return a sentence about the newest checkpoint, for a run that cannot go on without a
        `change`. Collective: waits for one that is being written.
        """
        self.wait()
        if self.saved_step is None:
            return f"there is no checkpoint yet: start again with {change}"
        path = self.directory / _name(self.saved_step)
        return (
            f"the last good checkpoint is {path}: --resume goes on from there, e.g. with {change}"
        )

    def _prepare(self, step: int) -> Path:
        """Return the folder to write a checkpoint into. Its name is new, because a rank of an
        earlier start may still be writing.
        """
        self.directory.mkdir(exist_ok=True)
        self._delete_unfinished()  # of a process that was killed while it wrote or deleted
        temporary = self.directory / f".{_name(step)}.{secrets.token_hex(4)}.tmp"
        temporary.mkdir()
        return temporary

    def _delete_unfinished(self) -> None:
        for path in self.directory.glob(".step_*"):
            shutil.rmtree(path)

    def _write(
        self,
        write: Callable[[], Sequence[Path]],
        temporary: Path,
        facts: Mapping[str, Any],
        state: str,
    ) -> None:
        marker = _marker(temporary, collectives.rank())
        self._error = None
        try:
            facts_of = {path.name: describe_file(path) for path in write()}
            write_whole(marker, json.dumps(facts_of).encode())
            if collectives.is_main():
                write_whole(temporary / STATE, state.encode())
                self._publish(temporary, facts)
        except Exception as error:  # whatever it is, there is no checkpoint
            self._error = self._tell(error)
            with contextlib.suppress(OSError):  # rank 0 need not wait
                write_whole(marker, json.dumps(self._error).encode())

    def _tell(self, error: Exception) -> str:
        """Return why there is no checkpoint, and print it on rank 0, which waits for the files of
        all and knows of every failure.
        """
        why = str(error) if isinstance(error, OSError) else repr(error)
        if isinstance(error, OSError) and error.errno is not None:
            why += f"; {write_remedy(error)}"
        if collectives.is_main():
            with contextlib.suppress(OSError):  # the output may be on the same full disk
                print(f"{self._cannot_write()}: {why}; the next one tries again", flush=True)
        return why

    def _cannot_write(self) -> str:
        return f"cannot write a checkpoint of step {self._saving} to {self.directory}"

    def _publish(self, temporary: Path, facts: Mapping[str, Any]) -> None:
        """Write the manifest on rank 0, once every rank's file is there, and give the directory its
        name.
        """
        files: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + _SECONDS_TO_GATHER
        for rank in range(collectives.world_size()):
            marker = _marker(temporary, rank)
            while not marker.exists():  # one question at a time: the storage may be far away
                if time.monotonic() > deadline:
                    raise OSError(f"{_NOTHING_OF} {rank} after {_SECONDS_TO_GATHER:.0f} s")
                time.sleep(0.02)
            content = json.loads(marker.read_text())
            if isinstance(content, str):
                raise OSError(content)  # without a number: it has its remedy
            files |= content
            marker.unlink()
        for path in list(temporary.iterdir()):
            if path.name not in files:
                sync(path)
                files[path.name] = describe_file(path)
        facts = {
            "format": FORMAT,
            **facts,
            "score_is": _SCORE + _CHOSEN * self.keep_best,
            "config": self.config,
            "models": dict(self.models),
        }
        write_manifest(temporary, facts, files)
        sync(temporary)
        final = self.directory / _name(facts["step"])
        for path in _published(self.directory):
            if path.name >= final.name:  # damaged and skipped, or of a run that went back
                self._retire(path)
        temporary.rename(final)
        sync(self.directory)
        self._own.add(final.name)
        self._prune()

    def _retire(self, path: Path) -> None:
        """Delete a checkpoint that this run has replaced, or set it aside if it does not verify."""
        try:
            if path.name not in self._own:
                check_files(path, read_manifest(path, format=FORMAT)["files"])
        except (OSError, ValueError) as error:
            _set_aside(path, str(error))
        else:
            _discard(path)

    def _prune(self) -> None:
        facts: dict[Path, dict[str, Any]] = {}
        for path in _published(self.directory):
            try:
                facts[path] = read_manifest(path, format=FORMAT)
            except ValueError as error:
                _set_aside(path, str(error))
            except OSError as error:  # it may be readable again when the next one is written
                print(f"checkpoint {path} cannot be read and is kept: {error}", flush=True)
        published = [*facts]  # newest first
        kept = set(published[: self.keep_last] if self.keep_last else published)
        scores = self._scores(facts)
        if self.keep_best and scores:
            kept.add(max(scores, key=lambda path: (scores[path], path.name)))
        pinned = {_name(step) for path in kept for step in facts[path].get("pinned", ())}
        for path in published:
            if path not in kept and path.name not in pinned:
                _discard(path)


_SCORE = "mean success over the environments in the evaluation at this step"
_CHOSEN = (
    "; with --keep-best the highest one has chosen its checkpoint, on the boards that it is the"
    " success on, so that it flatters: evaluate that checkpoint on other boards"
)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _published(directory: Path) -> list[Path]:
    """Return the published checkpoints, newest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), reverse=True)


def _marker(directory: Path, rank: int) -> Path:
    """Return the path of the file that holds the facts of this rank's file, or the reason why there
    is none.
    """
    return directory / f".written_{rank:05d}"


def _set_aside(path: Path, why: str) -> None:
    """Move a checkpoint that does not verify out of the way of later ones, and say so."""
    folder = path.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    names = (path.name, *(f"{path.name}-{number}" for number in range(2, 1000)))
    target = next(folder / name for name in names if not (folder / name).exists())
    path.rename(target)
    print(f"checkpoint {path} was moved to {target}: {why}", flush=True)


def _discard(path: Path) -> None:
    """Delete a checkpoint; nobody ever sees half of one."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)
