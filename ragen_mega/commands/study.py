"""Run a study of several arms and seeds, side by side, and write its table, page and plot.

    ragen-mega study filter                       # three seeds of every arm
    ragen-mega study my/study.toml --seeds 5 --jobs 2
    ragen-mega study filter --slurm lines.txt     # a command a line, for a job array
    ragen-mega study filter --report              # what there is so far
    ragen-mega study --list
    ragen-mega study scaling --models 0.2M,3M --layouts all
    ragen-mega study pretrained --preset paper --hardware H100 --predict    # hours and money
    ragen-mega study --signals studies            # what foretold success and collapse in them

Runs lie in studies/NAME-PRESET/ARM-seedK; the same command goes on where an earlier one was
stopped. Every arm has the same seeds, and with them the same warm start and training prompts;
evaluation prompts are the same for all. A warm start that several arms have is made once, by the
runs that go first, or taken from another study beside this one. If the code or the study has
changed since the first run, their results are not mixed; --mixed accepts that, and the report says
so.

--match steps gives every arm as many optimizer steps as the first one, --match tokens as many
sampled trajectories; none takes the number of steps from the arms.
"""

import argparse
import hashlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from ragen_mega.commands import study_scaling, study_signals
from ragen_mega.commands.command_line import PROGRAM, command, flag, ranks_command
from ragen_mega.commands.plan import find_machine
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.config.cli import RECIPES
from ragen_mega.models.hardware import Machine
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics, write_json
from ragen_mega.report.provenance import provenance
from ragen_mega.report.study import PRESETS, Arm, Estimate, Study, estimate, percent
from ragen_mega.storage.run_directory import CONFIG_FILE

STUDIES = RECIPES.parent / "studies"
IDENTITY = "study.json"
_STOPPED = -signal.SIGTERM


def find(name: str, preset: str | None) -> Study:
    """The study of this name, or in this file. Raises ValueError if there is none."""
    path = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in STUDIES.glob("*.toml")))
        raise ValueError(f"there is no study {name}; give a .toml file or one of {known}")
    return Study.read(path, preset)


def flags_of(study: Study, arm: Arm, match: str) -> list[str]:
    """The flags of one arm's training, without seed and name."""
    flags = ["--recipe", study.recipe, *study.flags, *arm.flags]
    if match == "none":
        return flags
    amount = {"steps": optimizer_steps, "tokens": trajectories}[match]
    first = parse(["--recipe", study.recipe, *study.flags, *study.arms[0].flags])
    wanted = amount(first) * first.train.num_steps
    return [*flags, "--num-steps", str(max(1, round(wanted / amount(parse(flags)))))]


def trajectories(config: StarPOConfig) -> float:
    """Trajectories sampled in a step."""
    return config.rollout.num_groups * config.rollout.group_size


def optimizer_steps(config: StarPOConfig) -> float:
    """Optimizer steps in a step of StarPO. Raises ValueError if the filter's share is not fixed."""
    name, share = config.filter.filter_strategy, 1.0
    if name != "none":
        if name != "top_fraction":
            raise ValueError(
                f"--match steps needs to know how much the filter keeps, and {name} decides by"
                " what is played; use --match tokens or none"
            )
        share = config.filter.value
    minibatches = max(1, round(share * trajectories(config) / config.train.minibatch_size))
    return minibatches * config.train.updates_per_rollout


def code_digest() -> str:
    """Digest of all code and data that a run depends on, committed or not."""
    digest = hashlib.sha256()
    for package in ("ragen_mega", "ragen_kernels"):
        root = Path(find_spec(package).origin).parent
        for path in sorted(root.rglob("*")):
            place = path.relative_to(root)
            if path.suffix in (".py", ".flags", ".jsonl") and place.parts[0] != "commands":
                digest.update(f"{package}/{place}".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def claim_folder(
    folder: Path, study: Study, match: str, *, mixed: bool, only_report: bool = False
) -> bool:
    """Record in the folder the code and study of its runs; returns whether there are several. A
    report runs nothing, so that the code may be newer than the runs, whose record stays.

    Raises ValueError if it holds runs of others and `mixed` does not accept that.
    """
    told = {"code": code_digest(), "study": asdict(study), "match": match}
    now = json.loads(json.dumps(told | {"place": provenance(), "is_mixed": False}))
    path = folder / IDENTITY
    if path.exists():
        before = json.loads(path.read_text())
        if only_report:
            now |= {key: before[key] for key in ("code", "place")}
        differing = [key for key in told if not _is_same(key, before[key], now[key])]
        now["is_mixed"] = before["is_mixed"] or bool(differing)
        if differing and not mixed:
            raise ValueError(
                f"{folder} holds results of another {' and '.join(differing)}; delete it or take"
                " another --output for new ones, or add --mixed to go on with both"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, now)
    return now["is_mixed"]


def _is_same(key: str, before: Any, now: Any) -> bool:
    """Whether runs can be compared. A study may get another text, and arms more."""
    if key != "study":
        return before == now
    arms = {arm["name"]: arm["flags"] for arm in before["arms"]}
    return all(before[part] == now[part] for part in ("recipe", "flags")) and all(
        arms.get(arm["name"], arm["flags"]) == arm["flags"] for arm in now["arms"]
    )


def training(study: Study, arm: Arm, seed: int, folder: Path, match: str, ranks: int) -> list[str]:
    """The command that begins or goes on with one run."""
    name = ("--output", folder, "--name", f"{arm.name}-seed{seed}", "--seed", seed, "--resume")
    return ranks_command(arm.ranks or ranks, PROGRAM, "train", *flags_of(study, arm, match), *name)


def chosen(study: Study, models: str | None, layouts: str | None) -> list[Arm]:
    """The arms of these models under these layouts, names with commas between; by default all
    models under the first layout. Raises ValueError for a name that the study does not have.
    """
    if study.target is None:
        if models or layouts:
            raise ValueError(f"study {study.name} has no models and layouts; drop those flags")
        return list(study.arms)
    picked = {}
    for flag_name, kind, text in (("--models", "model", models), ("--layouts", "layout", layouts)):
        known = list(dict.fromkeys(getattr(arm, kind) for arm in study.arms))
        default = known if kind == "model" else known[:1]
        names = known if text == "all" else text.split(",") if text else default
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"{flag_name} names {', '.join(unknown)}; study {study.name} has"
                f" {', '.join(known)}, or all"
            )
        picked[kind] = names
    return [arm for arm in study.arms if all(getattr(arm, kind) in picked[kind] for kind in picked)]


@dataclass(frozen=True, slots=True)
class Job:
    """A run to begin or to go on with."""

    name: str
    command: Sequence[str]
    log: Path
    source: Path | None
    """Another run whose warm start it takes if that is there by then."""

    def words(self) -> list[str]:
        """The command as it is to be run now."""
        if self.source is None or not has_warm_start(self.source):
            return [*self.command]
        return [*self.command, "--warm-start-from", str(self.source)]


def has_warm_start(run: Path) -> bool:
    """Whether a run has made its warm start, which it has before it writes metrics."""
    return (run / METRICS_FILE).exists()


def find_jobs(
    study: Study, arms: Sequence[Arm], seeds: Sequence[int], folder: Path, match: str, ranks: int
) -> list[Job]:
    """The runs that have not finished: first those that make a warm start, then those that can take
    it from one of them or from another study of the same code beside `folder`; of either kind whole
    comparisons first.
    """
    jobs: list[Job] = []
    makers = warm_starts_beside(folder)
    for seed in seeds:
        for arm in arms:
            if seed - seeds[0] >= (arm.seeds or len(seeds)):
                continue
            run = folder / f"{arm.name}-seed{seed}"
            config = parse([*flags_of(study, arm, match), "--seed", str(seed)])
            maker = run  # a loaded model is its own start
            if config.model.load is None:
                maker = makers.setdefault(warm_start_key(config), run)
            if not (run / SUMMARY_FILE).exists():
                command = training(study, arm, seed, folder, match, ranks)
                source = None if maker == run else maker
                jobs.append(Job(run.name, command, folder / f"{run.name}.log", source))
    return sorted(jobs, key=lambda job: job.source is not None)


def warm_starts_beside(folder: Path) -> dict[str, Path]:
    """Key -> a run that has made this warm start, of studies of the same code in the same place."""
    found: dict[str, Path] = {}
    code = code_digest()
    for path in sorted(folder.parent.glob(f"*/{IDENTITY}")):
        if path.parent == folder or json.loads(path.read_text())["code"] != code:
            continue
        for run in filter(has_warm_start, sorted(path.parent.iterdir())):
            config = StarPOConfig.from_dict(json.loads((run / CONFIG_FILE).read_text()))
            if config.model.load is None:
                found.setdefault(warm_start_key(config), run)
    return found


def warm_start_key(config: StarPOConfig) -> str:
    """Equal for runs that have the same warm start."""
    settings, train, environment = config.to_dict(), config.train, config.environment
    world = settings["environment"] | {"eval_environments": None, "environment_timeout": None}
    world["environment_options"] = {name: environment.options(name) for name in environment.shares}
    start = settings["warm_start"] | {"warm_start_from": None}
    of_critic = [settings["advantage"], settings["loss"]] if config.warm_starts_critic else None
    optimizer = [train.clip_grad, train.adam_beta1, train.max_tokens_per_microbatch, train.seed]
    parts = [settings["model"], world, settings["parallel"], start, optimizer, of_critic]
    return json.dumps(parts, sort_keys=True)


class Runner:
    """Works through jobs, some at a time."""

    def __init__(self, jobs: Sequence[Job], threads: int) -> None:
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            self._waiting.put(job)
        self._total, self._threads = len(jobs), threads
        self._running: dict[str, subprocess.Popen] = {}
        self._lock = threading.Lock()
        self._is_stopped = False
        self._started = time.monotonic()
        self.done = 0
        self.failed: list[str] = []

    def run(self, at_a_time: int) -> None:
        """Run all commands. On Ctrl-C or SIGTERM the runs get SIGTERM and write a checkpoint; then
        raises KeyboardInterrupt.
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        workers = [threading.Thread(target=self._work) for _ in range(at_a_time)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.2)
        except KeyboardInterrupt:
            with self._lock:
                self._is_stopped = True
                for process in self._running.values():
                    process.terminate()
            for worker in workers:
                worker.join()
            raise

    def _work(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(self._threads)}
        while not self._waiting.empty():
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                return
            with self._lock:
                if self._is_stopped:
                    return
                with job.log.open("a") as file:
                    output = {"stdout": file, "stderr": subprocess.STDOUT}
                    alone = {"start_new_session": True}  # Ctrl-C reaches it once, as SIGTERM
                    process = subprocess.Popen(job.words(), env=environment, **output, **alone)
                self._running[job.name] = process
            self._close(job.name, process.wait(), job.log)

    def _close(self, name: str, status: int, log: Path) -> None:
        with self._lock:
            del self._running[name]
            if self._is_stopped:
                return
            self.done += 1
            if status:
                self.failed.append(name)
                last = (log.read_text().strip().splitlines() or ["no output"])[-1]
                print(f"{name} failed ({status}): {last}; all of it in {log}", flush=True)
            left = (time.monotonic() - self._started) / self.done * (self._total - self.done)
            print(f"{self.done}/{self._total} runs, {name}; about {left / 60:.0f} min left")


def collect(study: Study, folder: Path, seeds: Sequence[int]) -> dict[str, dict[int, dict]]:
    """Arm -> seed -> summary with `cost`, of the runs that have finished."""
    found: dict[str, dict[int, dict]] = {arm.name: {} for arm in study.arms}
    for arm in study.arms:
        for seed in seeds:
            run = folder / f"{arm.name}-seed{seed}"
            if (run / SUMMARY_FILE).exists():
                summary = json.loads((run / SUMMARY_FILE).read_text())
                records = read_metrics(run / METRICS_FILE)
                tokens = sum(record.get("rollout/sampled_tokens") or 0 for record in records)
                cost = {"tokens": tokens, "seconds": summary["seconds"]}
                found[arm.name][seed] = summary | {
                    "cost": cost, "records": records, "directory": run
                }  # fmt: skip
    return found


def rates(runs: dict[int, dict], name: str, seeds: Sequence[int]) -> np.ndarray:
    """[seeds, prompts] success on an evaluated set."""
    return np.array([runs[seed]["sets"][name]["prompt_success"] for seed in seeds])


def compare(study: Study, found: dict[str, dict[int, dict]]) -> dict[str, Any]:
    """For every evaluated set: each arm, its paired difference to the first arm, and the claims."""
    some = [summary for runs in found.values() for summary in runs.values()]
    names = list(dict.fromkeys(name for summary in some for name in summary["sets"]))
    sets = {}
    for name in names:
        arms = {
            arm: estimate(rates(runs, name, list(runs)))
            for arm, runs in found.items()
            if runs and all(name in run["sets"] for run in runs.values())
        }
        one = next(summary["sets"][name] for summary in some if name in summary["sets"])
        sets[name] = {
            "random": one["random"],
            "optimum": one["optimum"],
            "arms": arms,
            "differences": {
                arm: difference(found, name, arm, study.arms[0].name)
                for arm in list(arms)
                if arm != study.arms[0].name and study.arms[0].name in arms
            },
        }
    claims = [
        (claim, difference(found, claim.set, claim.better, claim.worse))
        for claim in study.claims
        if claim.set in sets and {claim.better, claim.worse} <= sets[claim.set]["arms"].keys()
    ]
    return {"sets": sets, "claims": claims}


def difference(found: dict[str, dict[int, dict]], name: str, a: str, b: str) -> Estimate | None:
    """Success of arm `a` minus that of `b` on the seeds and prompts that both have."""
    shared = sorted(set(found[a]) & set(found[b]))
    if not shared:
        return None
    return estimate(rates(found[a], name, shared) - rates(found[b], name, shared), least=-1.0)


def markdown(study: Study, result: dict[str, Any], found: dict, place: dict, mixed: bool) -> str:
    """The report as text."""
    parts = [
        f"# {study.title}",
        f"After {study.source}. Preset `{study.preset}`, recipe `{study.recipe}`"
        f" {shlex.join(study.flags)}.",
        f"{place['hardware']}; commit {place['commit']}; {place['date'][:10]}.",
    ]
    if mixed:
        parts.append("**Runs of different code or of another version of this study are mixed.**")
    if study.confounds:
        parts.append("Confounds of this preset: " + "; ".join(study.confounds) + ".")
    for name, of in result["sets"].items():
        rows = []
        for arm, mean in of["arms"].items():
            runs = found[arm].values()
            less = of["differences"].get(arm)
            rows.append(
                (
                    arm,
                    percent(mean),
                    ", ".join(f"{run['sets'][name]['success']:.1%}" for run in runs),
                    "" if less is None else f"{percent(less, signed=True)}, {less.verdict}",
                    f"{np.mean([run['cost']['tokens'] for run in runs]) / 1e6:.2f}",
                    f"{np.mean([run['cost']['seconds'] for run in runs]) / 60:.1f}",
                )
            )
        players = [
            (f"{player} player", "-" if of[player] is None else f"{of[player]:.1%}", *[""] * 4)
            for player in ("random", "optimum")
        ]
        first = f"less {study.arms[0].name}"
        head = ("arm", "success (95% interval)", "seeds", first, "Mtokens", "minutes")
        parts += [f"## {name}", table(head, [*rows, *players])]
    if result["claims"]:
        rows = [
            (claim.says, claim.set, f"{claim.better} - {claim.worse}", *judged(less))
            for claim, less in result["claims"]
        ]
        parts += [
            "## What the source says",
            table(("claim", "set", "difference", "here", "verdict"), rows),
        ]
    if study.notes:
        parts.append(study.notes.strip())
    parts.append(f"![curves]({study.name}.svg)")
    parts.append(
        "Intervals allow for other seeds and other prompts; differences are paired by seed and"
        " prompt. Minutes depend on what else the machine did."
    )
    return "\n\n".join(parts) + "\n"


def judged(less: Estimate | None) -> tuple[str, str]:
    """A measured difference, and what it says of a claim that it is positive."""
    if less is None:
        return "-", "not run"
    verdict = {"higher": "reproduced", "lower": "contradicted"}.get(less.verdict, less.verdict)
    return percent(less, signed=True), verdict


def plot(study: Study, found: dict[str, dict[int, dict]], path: Path) -> None:
    """Each metric of the study over the steps: the mean of an arm's seeds, and their range."""
    figure, grid = pyplot.subplots(
        1, len(study.metrics), figsize=(4.2 * len(study.metrics), 3.4), layout="constrained"
    )
    for axes, key in zip(np.atleast_1d(grid), study.metrics):
        for arm, runs in found.items():
            lines = [
                {record["step"]: record[key] for record in run["records"] if record.get(key)}
                for run in runs.values()
            ]
            steps = sorted(set.intersection(*map(set, lines))) if lines else []
            values = np.array([[line[step] for step in steps] for line in lines])
            if len(steps):
                (line,) = axes.plot(steps, values.mean(axis=0), label=arm)
                axes.fill_between(steps, values.min(0), values.max(0), alpha=0.15, lw=0)
        axes.set(title=key, xlabel="step")
    np.atleast_1d(grid)[0].legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def write_report(
    study: Study,
    folder: Path,
    output: Path,
    seeds: Sequence[int],
    mixed: bool,
    machine: Machine | None,
) -> None:
    """NAME.md, NAME.json and NAME.svg of the runs that have finished; those of a scaling study
    beside what is predicted for `machine`. Raises ValueError if none has.
    """
    found = collect(study, folder, seeds)
    if not any(found.values()):
        raise ValueError(f"no run of {folder} has finished; there is nothing to report")
    place = json.loads((folder / IDENTITY).read_text())["place"]
    if study.target is not None:
        return study_scaling.write(study, found, output, place, mixed, machine)
    result = compare(study, found)
    output.mkdir(parents=True, exist_ok=True)
    text = markdown(study, result, found, place, mixed)
    (output / f"{study.name}.md").write_text(text)
    report = {"study": asdict(study), "place": place, "is_mixed": mixed}
    report["sets"] = {
        name: {
            "random": of["random"],
            "optimum": of["optimum"],
            "arms": {arm: asdict(mean) for arm, mean in of["arms"].items()},
            "differences": {arm: less and asdict(less) for arm, less in of["differences"].items()},
        }
        for name, of in result["sets"].items()
    }
    report["runs"] = {
        f"{arm}-seed{seed}": {name: of["success"] for name, of in run["sets"].items()}
        for arm, runs in found.items()
        for seed, run in runs.items()
    }
    write_json(output / f"{study.name}.json", report)
    plot(study, found, output / f"{study.name}.svg")
    print(text)


@command(
    __doc__,
    ("study", {"nargs": "?", "help": "name that --list shows, or a .toml file"}),
    flag("--list", "name the studies", False),
    flag("--preset", "small: here (default); paper: as published, confounds included"),
    flag("--seeds", "seeds of every arm", 3),
    flag("--first-seed", "the first of them", 0),
    flag("--match", "steps, tokens or none: what all arms have the same of", "none"),
    flag("--jobs", "runs at a time", 1),
    flag("--ranks", "ranks of a run", 1),
    flag("--models", "of a scaling study: which, with commas between (default: all)"),
    flag("--layouts", "of a scaling study: which, or all (default: its first; to --predict all)"),
    flag("--hardware", "predict for this GPU, or for what --calibrate wrote"),
    flag("--predict", "only predict what the study takes and costs, and run nothing", False),
    flag("--flags", "further flags of every run, e.g. '--num-steps 2'", ""),
    flag("--output", "folder of the runs (default: studies/NAME-PRESET)", type=Path),
    flag("--reports", "folder of the report", Path("docs/results/studies")),
    flag("--mixed", "go on although code or study has changed", False),
    flag("--report", "only report what has finished", False),
    flag("--signals", "only correlate signals with outcomes, over the studies in here", type=Path),
    flag("--slurm", "write the commands here, one a line, instead of running them", type=Path),
)
def main(arguments: argparse.Namespace) -> int | None:
    if arguments.signals:
        return study_signals.write(arguments.signals, arguments.reports)
    if arguments.list or not arguments.study:
        for path in sorted(STUDIES.glob("*.toml")):
            study = Study.read(path)
            print(f"{study.name:16} {study.title} ({study.source}); {len(study.arms)} arms")
        return 0
    matches = ("steps", "tokens", "none")
    if arguments.preset not in (None, *PRESETS) or arguments.match not in matches:
        raise ValueError("--preset is small or paper, --match is steps, tokens or none")
    if min(arguments.seeds, arguments.jobs, arguments.ranks) < 1:
        raise ValueError("--seeds, --jobs and --ranks must be at least 1")
    study = find(arguments.study, arguments.preset)
    study = replace(study, flags=(*study.flags, *shlex.split(arguments.flags)))
    scales = study.target is not None
    layouts = arguments.layouts or ("all" if arguments.predict and scales else None)
    arms = chosen(study, arguments.models, layouts)
    folder = arguments.output or Path("studies") / f"{study.name}-{study.preset}"
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for arm in study.arms:
        parse(flags_of(study, arm, arguments.match))  # a wrong flag is said before anything runs
    machine = find_machine(arguments.hardware) if arguments.hardware else None
    if arguments.predict:
        if machine is None:
            raise ValueError("--predict needs to know the GPU; add --hardware")
        whole = [
            replace(
                arm,
                flags=tuple(flags_of(study, arm, arguments.match)),
                ranks=arm.ranks or arguments.ranks,
            )
            for arm in arms
        ]
        return study_scaling.write_predicted(
            study, whole, machine, arguments.reports, arguments.seeds
        )
    mixed = claim_folder(
        folder, study, arguments.match, mixed=arguments.mixed, only_report=arguments.report
    )
    if arguments.report:
        return write_report(study, folder, arguments.reports, seeds, mixed, machine)
    jobs = find_jobs(study, arms, seeds, folder, arguments.match, arguments.ranks)
    if arguments.slurm:
        arguments.slurm.write_text("".join(shlex.join(job.command) + "\n" for job in jobs))
        print(f"{len(jobs)} commands in {arguments.slurm}; then --report")
        return 0
    cores = len(os.sched_getaffinity(0))
    ranks = max(arm.ranks or arguments.ranks for arm in arms)
    runner = Runner(jobs, max(1, cores // (arguments.jobs * ranks)))
    print(f"{len(jobs)} runs to go, {arguments.jobs} at a time, in {folder}", flush=True)
    try:
        runner.run(arguments.jobs)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the checkpoints", file=sys.stderr)
        return 130
    write_report(study, folder, arguments.reports, seeds, mixed, machine)
    return 1 if runner.failed else 0
