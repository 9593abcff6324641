"""Runs of a study: their commands, the choice of those that are left to do, and their execution
side by side.
"""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.ranks.launcher import PROGRAM, SIGNALS, handle_signals, ranks_command
from ragen_mega.report.metrics import METRICS_FILE, SUMMARY_FILE, write_json
from ragen_mega.report.provenance import provenance
from ragen_mega.studies.definitions import Arm, Study

IDENTITY = "study.json"
PACKAGES = ("ragen_mega", "ragen_kernels")
BESIDE = ("commands", "planning", "studies")
"""Folders of the package that change no result of a run."""
_SECONDS_TO_HEAR = 1.0
"""Longest delay of a signal."""
_MODULE = re.compile(r"[A-Za-z_][\w.]*(?=:[A-Za-z_])")
"""Module of an import path; in `agent:my_module:run` the second match is one."""


def flags_of(study: Study, arm: Arm, match: str) -> list[str]:
    """List the flags of one arm's training, without seed and name."""
    flags = ["--recipe", study.recipe, *study.flags, *arm.flags]
    if match == "none":
        return flags
    amount = {"steps": optimizer_steps, "tokens": trajectories}[match]
    first = parse(["--recipe", study.recipe, *study.flags, *study.arms[0].flags])
    wanted = amount(first) * first.train.num_steps
    return [*flags, "--num-steps", str(max(1, round(wanted / amount(parse(flags)))))]


def check_ranks(study: Study, match: str, ranks: int) -> None:
    """Raise ValueError, with the arm's name, for a layout that does not fit an arm's ranks."""
    for arm in study.arms:
        try:
            parse(flags_of(study, arm, match)).parallel.num_trainers(arm.ranks or ranks)
        except ValueError as error:
            raise ValueError(f"arm {arm.name}: {error}; or give --ranks") from None


def trajectories(config: StarPOConfig) -> float:
    """Count the trajectories sampled in a step."""
    return config.rollout.num_groups * config.rollout.group_size


def optimizer_steps(config: StarPOConfig) -> float:
    """Count the optimizer steps in a step of StarPO, if no group is constant. Raises ValueError if
    the filter keeps no fixed number of groups.
    """
    kept = config.filter.num_kept(config.rollout.num_groups)
    if kept is None:
        raise ValueError(
            "--match steps needs to know how much the filter keeps, and"
            f" {config.filter.filter_strategy} decides by what is played; use --match tokens or"
            " none"
        )
    from ragen_mega.data.packing import count_minibatches  # with torch, which takes seconds

    minibatches = count_minibatches(
        int(kept) * config.rollout.group_size, config.train.minibatch_size
    )
    return minibatches * config.train.updates_per_rollout


def code_digest() -> str:
    """Compute the digest of all code and data of the package that a run depends on, committed or
    not.
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)  # an import would bring torch
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*")):
            place = path.relative_to(root)
            if path.suffix in (".py", ".flags", ".jsonl") and place.parts[0] not in BESIDE:
                digest.update(f"{package}/{place}".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def user_files(config: StarPOConfig) -> dict[str, str]:
    """Return a map: file -> digest, of the user's files that a run depends on. They are the modules
    that its settings name by import path, what is loaded from beside these, and named files of
    tasks, boards or conversations. Installed packages are not among them, nor is a loaded model.
    """
    settings, environment = config.to_dict(), config.environment
    for section in ("model", "logging", "checkpoint"):
        del settings[section]
    options = [json.loads(environment.environment_options), json.loads(environment.curriculum)]
    folders = {"", *_texts([values.get("directory") for values in options[0].values()])}
    texts = [*environment.evaluated, *_texts([*settings.values(), *options])]
    paths = {path for text in texts for path in _modules_of(text)}
    for text in texts:
        path = os.path.expanduser(text.removeprefix("tasks:"))
        paths |= {Path(os.path.expanduser(folder), path) for folder in folders}
    return {
        os.path.relpath(path): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(paths)
        if os.path.isfile(path)  # of any text, however long
    }


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value as JSON has it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _modules_of(text: str) -> Iterator[Path]:
    """Yield the files of the user's modules that a text names by import path, and of those that are
    loaded from the same folders.
    """
    for name in _MODULE.findall(text):
        found = None
        if name.partition(".")[0] not in (*sys.stdlib_module_names, *PACKAGES):
            with suppress(ImportError, ValueError):  # a text that is no import path
                found = find_spec(name)
        if found is None or not found.has_location or found.origin is None:
            continue
        loaded = {name: found.origin} | {
            other: getattr(module, "__file__", None) for other, module in [*sys.modules.items()]
        }
        for other, origin in loaded.items():
            file, package = Path(origin or ""), other.partition(".")[0]
            is_users = package not in ("__main__", *PACKAGES) and "site-packages" not in file.parts
            if is_users and file.is_relative_to(Path(found.origin).parent):
                yield file


def claim_folder(folder: Path, study: Study, match: str, *, mixed: bool, ranks: int = 1) -> bool:
    """Record in the folder the code, the user's files and the study of its runs and the ranks of
    each; returns whether there are several. Raises ValueError if it holds runs of others and
    `mixed` does not accept that.
    """
    known = {"code": code_digest(), "study": asdict(study), "match": match, "ranks": ranks}
    known["files"] = {
        file: digest
        for arm in study.arms
        for file, digest in user_files(parse(flags_of(study, arm, match))).items()
    }
    now = json.loads(json.dumps(known | {"place": provenance(), "is_mixed": False}))
    path = folder / IDENTITY
    if path.exists():
        before = {"ranks": ranks} | json.loads(path.read_text())  # an old record says none
        differing = _differences(before, now)
        now["is_mixed"] = before["is_mixed"] or bool(differing)
        if differing and not mixed:
            raise ValueError(
                f"{folder} holds results of other {' and '.join(differing)}; give what it has,"
                " delete it or take another --output for new ones, or add --mixed to go on with"
                " both"
            )
        now["files"] = before.get("files", {}) | now["files"]
        arms = now["study"]["arms"]  # one that is gone for now has left its runs here
        names = {arm["name"] for arm in arms}
        arms += [arm for arm in before["study"]["arms"] if arm["name"] not in names]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, now)
    return now["is_mixed"]


def recorded(
    folder: Path, study: Study, match: str | None, *, mixed: bool
) -> tuple[Study, str, bool]:
    """Read the study and `match` with which the folder's runs were made, further flags included,
    and whether they are several. Nothing is run, so that the code may be newer than the runs, and
    their record stays as it is.

    Raises ValueError if there is no record, or one of another study or `match` (None: any) and
    `mixed` does not accept that.
    """
    path = folder / IDENTITY
    if not path.exists():
        raise ValueError(
            f"{folder} holds no study: it has no {IDENTITY}; run the study first, or give the"
            " --output and --preset of its runs"
        )
    record = json.loads(path.read_text())
    known = {"study": asdict(study), "match": match or record["match"]}
    now = record | json.loads(json.dumps(known))
    flags = record["study"]["flags"]
    if flags[: len(study.flags)] == now["study"]["flags"]:  # the others were given by --flags
        now["study"]["flags"] = flags
    differing = _differences(record, now)
    if differing and not mixed:
        raise ValueError(
            f"{folder} holds results of other {' and '.join(differing)}; give the --preset,"
            " --match and --flags of its runs (the last two may be left out), or add --mixed to"
            " report them all the same"
        )
    is_mixed = record["is_mixed"] or bool(differing)
    return replace(study, flags=tuple(flags)), record["match"], is_mixed


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List why runs of two records cannot be compared, each with both values. A study may get
    another text, and further arms with further files.
    """
    old, new = before["study"], now["study"]
    pairs = {key: (before.get(key), now.get(key)) for key in ("code", "match", "ranks")}
    pairs |= {f"study {key}": (old[key], new[key]) for key in ("preset", "recipe", "flags")}
    files = before.get("files", {})  # an old record says none
    pairs |= {file: (files.get(file, seen), seen) for file, seen in now.get("files", {}).items()}
    arms = {arm["name"]: arm for arm in old["arms"]}
    for arm in new["arms"]:
        known, name = arms.get(arm["name"], arm), f"study arm {arm['name']}"
        pairs[name] = known["flags"], arm["flags"]
        pairs[f"ranks of {name}"] = known.get("ranks"), arm.get("ranks")

    def shown(value: Any) -> str:
        return (shlex.join(value) or "no flags") if isinstance(value, list) else str(value)

    return [f"{key} ({shown(a)}, not {shown(b)})" for key, (a, b) in pairs.items() if a != b]


def found_seeds(study: Study, folder: Path) -> list[int]:
    """List the seeds that any arm has a run of in this folder, in ascending order."""
    named = (
        run.name.removeprefix(f"{arm.name}-seed")
        for arm in study.arms
        for run in folder.glob(f"{arm.name}-seed*/")
    )
    return sorted({int(seed) for seed in named if seed.isdecimal()})


def training(study: Study, arm: Arm, seed: int, folder: Path, match: str, ranks: int) -> list[str]:
    """Write the command that begins or goes on with one run."""
    name = ("--output", folder, "--name", f"{arm.name}-seed{seed}", "--seed", seed, "--resume")
    return ranks_command(arm.ranks or ranks, PROGRAM, "train", *flags_of(study, arm, match), *name)


@dataclass(frozen=True, slots=True)
class Job:
    """A run to begin or to go on with."""

    name: str
    command: Sequence[str]
    log: Path
    source: Path | None
    """Another run whose warm start it takes if that is there by then."""

    def words(self) -> list[str]:
        """Return the command as it is to be run now."""
        if self.source is None or not has_warm_start(self.source):
            return [*self.command]
        return [*self.command, "--warm-start-from", str(self.source)]


def has_warm_start(run: Path) -> bool:
    """Return whether a run has made its warm start, which it has before it writes metrics."""
    return (run / METRICS_FILE).exists()


def find_jobs(
    study: Study, seeds: Sequence[int], folder: Path, match: str, ranks: int, *, mixed: bool
) -> list[Job]:
    """List the runs that have not finished: first those that make a warm start, then those that can
    take one from such a run; of either kind whole comparisons first. In a mixed study each makes
    its own, since those that are there may be of other code or of another world.
    """
    jobs: list[Job] = []
    makers: dict[str, Path] = {}
    for seed in seeds:
        for arm in study.arms:
            run = folder / f"{arm.name}-seed{seed}"
            config = parse([*flags_of(study, arm, match), "--seed", str(seed)])
            maker = run  # a loaded model is its own start
            if config.model.load is None and not mixed:
                maker = makers.setdefault(warm_start_key(config), run)
            if not (run / SUMMARY_FILE).exists():
                command = training(study, arm, seed, folder, match, ranks)
                source = None if maker == run else maker
                jobs.append(Job(run.name, command, folder / f"{run.name}.log", source))
    return sorted(jobs, key=lambda job: job.source is not None)


def warm_start_key(config: StarPOConfig) -> str:
    """Make a key that is equal for runs with the same warm start."""
    settings, train, environment = config.to_dict(), config.train, config.environment
    world = settings["environment"] | {"eval_environments": None, "environment_timeout": None}
    world["environment_options"] = {name: environment.options(name) for name in environment.shares}
    start = settings["warm_start"] | {
        "warm_start_from": None,
        "warm_start_seed": config.seed_of_warm_start,
    }
    of_critic = [settings["advantage"], settings["loss"]] if config.warm_starts_critic else None
    optimizer = [train.clip_grad, train.adam_beta1, train.max_tokens_per_microbatch]
    parts = [settings["model"], world, settings["parallel"], start, optimizer, of_critic]
    return json.dumps(parts, sort_keys=True)


class Runner:
    """A queue of jobs of which some run at a time."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._running: dict[str, subprocess.Popen] = {}
        self._lock = threading.RLock()  # of the thread that a signal interrupts, as well
        self._started = time.monotonic()
        self.stopped_by: signal.Signals | None = None
        self.done = 0
        self.failed: list[str] = []

    def run(self, at_a_time: int) -> None:
        """Run all commands. On one of SIGNALS the runs get SIGTERM and write a checkpoint, and
        `stopped_by` says so. They get one for every further signal but SIGUSR1 as well: the second
        ends them without a checkpoint, even those that hang.
        """
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # Nothing is raised: it could come where nobody catches it, and leave the runs unstopped.
        handle_signals(self._stop)
        try:
            with ThreadPoolExecutor(at_a_time) as pool:
                runs = [pool.submit(self._work, job) for job in self._jobs]
                # A signal that comes just before a wait is handled after it.
                while wait(runs, timeout=_SECONDS_TO_HEAR).not_done:
                    pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for run in runs:
            run.result()

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        with self._lock:
            if self.stopped_by and signum == signal.SIGUSR1:
                return
            self.stopped_by = self.stopped_by or signal.Signals(signum)
            for process in self._running.values():
                process.terminate()

    def _work(self, job: Job) -> None:
        # Not as many as there are cores: sums would depend on --jobs in their last bits.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        with self._lock:
            if self.stopped_by:
                return
            try:
                with job.log.open("a") as file:
                    process = subprocess.Popen(
                        job.words(),
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches it once, as SIGTERM
                    )
            except OSError as error:  # e.g. a full disk; the other runs may still be possible
                return self._close(job.name, f"failed: it could not be started ({error})")
            self._running[job.name] = process
        status = process.wait()
        with self._lock:
            del self._running[job.name]
            if not self.stopped_by:
                self._close(job.name, f"failed ({status}): {_told(job.log)}" if status else None)

    def _close(self, name: str, failure: str | None) -> None:
        """Count a run that is over; `failure` says why it failed, if it did. The lock is held."""
        self.done += 1
        if failure:
            self.failed.append(name)
            print(f"{name} {failure}", flush=True)
        left = (time.monotonic() - self._started) / self.done * (len(self._jobs) - self.done)
        print(f"{self.done}/{len(self._jobs)} runs, {name}; about {left / 60:.0f} min left")


def _told(log: Path) -> str:
    """Read the last line of a log, whatever bytes a run or a library has written to it."""
    last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
    return f"{last}; all of it in {log}"
