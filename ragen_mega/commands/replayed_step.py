"""A step of a run, repeated from its files and compared with what the run logged."""

import argparse
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ragen_mega.agents.repetition import find_difference
from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import (
    STARTS,
    WITHOUT_EFFECT,
    flat,
    known_config,
    read_recorded,
    runnable,
    under_recorded,
)
from ragen_mega.data.exchange import read_on_main
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.reference_players import Baselines
from ragen_mega.megatron.initialize import initialize
from ragen_mega.models.huggingface import load_config
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.ranks.launcher import is_rank
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import METRICS_FILE, RunLogger, read_metrics
from ragen_mega.report.provenance import read_settings
from ragen_mega.report.step_metrics import OF_COMPUTED
from ragen_mega.rollout.renderer import load_renderer
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.build import build_models, set_fields
from ragen_mega.run.evaluation import KnownBaselines
from ragen_mega.run.placement import Colocated
from ragen_mega.run.rollouts import Rollouts
from ragen_mega.run.run import Run
from ragen_mega.run.timers import Timers
from ragen_mega.storage.checkpoints import CHECKPOINTS, find_latest
from ragen_mega.storage.model_sources import local_directory
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore
from ragen_mega.train import train_step
from ragen_mega.warm_start.small_model import BASE, Start, find_warm_start

STAGES = ("rollout/", "filter/", "mismatch/", "critic/", "actor/", "update/")
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "use_distributed_optimizer",
)
OF_LAYOUT = ("per_second", "context_gbytes")
"""Endings of metrics that the clock or the layout decides."""
OF_EVALUATIONS = (
    *("evaluation.eval_interval", "evaluation.eval_prompts", "evaluation.eval_samples"),
    *("evaluation.eval_temperature", "evaluation.stop_at_success"),
)
"""Settings without effect on a step; `boards` are left out of the states that it draws."""
EXCLUDED = ("rollout/random", "rollout/optimum")  # for the evaluation boards, not the step


class RecordedRollouts(Rollouts):
    """Rollouts that are read from the disk, whoever has sampled them."""

    def __init__(self, files: RolloutStore, tasks: TaskSampler) -> None:
        self.files, self.samplers, self._tasks = files, None, tasks

    def recall(self, step: int) -> list[TrajectoryGroup] | None:
        """Read the groups of a step. Collective."""
        groups = read_on_main(lambda: self.files.read(step).groups)
        self._tasks.sample_again(step, len(groups or ()))
        return groups


def replay(arguments: argparse.Namespace) -> dict[str, Any]:
    """Replay the step and compare. Raises ValueError or OSError if files are missing or damaged."""
    config, _ = read_config(arguments)
    logged = read_row(config.run_directory / METRICS_FILE, arguments.step)
    run, origin = open_replay(config, arguments.step)
    if collectives.is_main():
        steps = span([run.step, arguments.step])
        print(f"repeating {steps} from {origin}", file=sys.stderr, flush=True)
    metrics = repeat(run, arguments.step)
    keys = compare(logged, metrics, same_layout=has_layout_of_run(arguments))
    worst = max((row["difference"] for row in keys.values()), default=0.0)
    return {
        "run": str(config.run_directory),
        "step": arguments.step,
        "from": origin,
        "world_size": collectives.world_size(),
        "tolerance": arguments.tolerance,
        "largest_difference": worst,
        "equal": worst <= arguments.tolerance,
        "keys": keys,
    }


def replay_agents(arguments: argparse.Namespace) -> list[str]:
    """Play the episodes of agents of a step with the recorded answers; returns a line for each that
    differs, and one about all. Raises ValueError if there are none.
    """
    config, _ = read_config(arguments)
    directory = config.run_directory
    base = local_directory(config.model.load) if config.model.load else directory / BASE
    renderer = load_renderer(str(base), think=config.environment.think)
    groups = RolloutStore(directory / ROLLOUTS).read(arguments.step).groups
    recorded = [member for group in groups for member in group.trajectories if member.is_tree]
    if not recorded:
        raise ValueError(
            f"step {arguments.step} of {directory} has no episode of an agent; drop --agent-calls"
        )
    found = [(each, find_difference(config, renderer, each, arguments.step)) for each in recorded]
    lines = [
        f"{each.environment}, seed {each.seed}, outcome seed {each.outcome_seed}: {said}"
        for each, said in found
        if said is not None
    ]
    num_equal = len(recorded) - len(lines)
    return [
        *lines,
        f"step {arguments.step} of {directory}: {num_equal} of {len(recorded)} episodes of agents"
        " are repeated to the token",
    ]


def repeat(run: Run, last_step: int) -> dict[str, float]:
    """Repeat the steps up to the last one from the disk; returns its metrics. Raises ValueError if
    a rollout is missing.
    """
    on_main(lambda: check_rollouts(run, last_step))
    on_main(lambda: check_settings(run, last_step))
    run.rollouts = RecordedRollouts(run.rollouts.files, run.tasks)
    for step in range(run.step, last_step + 1):
        log = run.log.begin(step)
        train_step(run, step, log)
    return log.result()


def check_rollouts(run: Run, last_step: int) -> None:
    """Raise ValueError unless the rollouts up to the step are on the disk, and the guard has not
    returned to earlier weights on the way, which is not repeated.
    """
    files = run.rollouts.files
    starts, held = {0, *run.checkpoints.steps()}, set(files.steps())
    since = {step: max(start for start in starts if start <= step) for step in held}
    missing = [step for step in range(run.step, last_step + 1) if step not in held]
    if missing:
        whole = [step for step in sorted(held) if held.issuperset(range(since[step], step + 1))]
        raise ValueError(
            f"step {last_step} would be repeated from step {missing[0]}, whose rollout is not in"
            f" {files.directory}; this run can repeat {span(whole)}. Train with --keep-rollouts 0"
            " to keep more"
        )
    rows = {row["step"]: row for row in read_metrics(files.directory.parent / METRICS_FILE)}
    before = rows.get(run.step - 1, {}).get("guard/rollbacks") or 0
    for step in range(run.step, last_step):
        if (rows.get(step, {}).get("guard/rollbacks") or 0) > before:
            raise ValueError(
                f"step {last_step} would be repeated from step {run.step}, and behind step {step}"
                " the run went back to earlier weights, which a replay does not; replay a step up"
                f" to {step}, or one that a later checkpoint begins"
            )


def check_settings(run: Run, last_step: int) -> None:
    """Raise ValueError if a start of the run changed settings on the way to the step: a replay
    repeats all steps under the settings of the last one.
    """
    directory = run.rollouts.files.directory.parent
    before = _settings_of(directory, run.step)
    starts = {start["first_step"] for start in read_recorded(directory).get(STARTS, [])}
    for step in sorted(each for each in starts if run.step < each <= last_step):
        now = _settings_of(directory, step)
        is_constant = now["train.lr_decay"] == "constant"
        aside = (*OF_EVALUATIONS, *["train.num_steps"] * is_constant)
        changed = [
            f"{key} was {before.get(key)} and is {value}"
            for key, value in now.items()
            if before.get(key) != value and key not in aside
        ]
        if changed:
            raise ValueError(
                f"step {last_step} would be repeated from step {run.step}, and from step {step} on"
                f" the run had other settings ({', '.join(changed)}), while a replay has those of"
                f" step {last_step} in all steps; replay a step up to {step - 1}, or one that a"
                " later checkpoint begins"
            )


def _settings_of(run: Path, step: int) -> dict[str, Any]:
    """Return a map: section.flag -> value under which a step was trained, but for sections
    WITHOUT_EFFECT.
    """
    settings, _ = read_settings(run, step)
    return flat({name: settings[name] for name in settings if name not in WITHOUT_EFFECT})


def read_config(arguments: argparse.Namespace) -> tuple[StarPOConfig, int]:
    """Return the configuration that the step was trained under, in the run's current directory,
    with the layout of the run unless the flags change it; and how many ranks it takes.
    """
    settings, start = read_settings(arguments.run, arguments.step)
    if start:
        settings["parallel"] = start["parallel"]
    given = {name: getattr(arguments, name) for name in LAYOUT}
    given = {name: value for name, value in given.items() if value is not None}
    settings, directory = runnable(settings, given), arguments.run.resolve()
    settings["parallel"] |= given
    settings["logging"] |= {
        "output": str(directory.parent),
        "name": directory.name,
        "overwrite": False,
        "trace_groups": 0,
    }
    num_ranks = arguments.num_ranks or (check_ranks(start) if start else 1)
    if not given:  # it has run so, whatever the rules are now
        return known_config(settings), num_ranks
    with under_recorded(arguments.run, "replay it on its own layout, or give another one"):
        return StarPOConfig.from_dict(settings), num_ranks


def has_layout_of_run(arguments: argparse.Namespace) -> bool:
    """Return whether this job has as many ranks as the step was trained on, in the same layout."""
    _, start = read_settings(arguments.run, arguments.step)
    if start is None:  # an older run, which has not recorded its ranks
        return False
    return collectives.world_size() == start["world_size"] and all(
        getattr(arguments, name) in (None, start["parallel"].get(name)) for name in LAYOUT
    )


def check_ranks(start: Mapping[str, Any]) -> int:
    """Return the ranks of a start of a run. Raises ValueError if they cannot be started here."""
    num_ranks, num_gpus = start["world_size"], torch.cuda.device_count()
    remedy = "--num-ranks replays it on another layout, equal to rounding"
    if not is_rank() and num_ranks != start["ranks_per_node"]:
        raise ValueError(
            f"the run had {num_ranks} ranks, {start['ranks_per_node']} on each node, and this tool"
            f" starts those of one node; start it by torchrun on as many nodes, or {remedy}"
        )
    if start["device"] == "cuda" and num_gpus < start["ranks_per_node"]:
        raise ValueError(
            f"the run had {start['ranks_per_node']} GPUs on {start['host']}, and here are"
            f" {num_gpus}; {remedy}"
        )
    return num_ranks


def read_row(path: Path, step: int) -> dict[str, Any]:
    """Read the metrics that the run logged for the step."""
    rows = {row["step"]: row for row in read_metrics(path)} if path.exists() else {}
    if step not in rows:
        remedy = "replay one of these" if rows else "train the run further"
        raise ValueError(f"step {step} is not in {path}, which has {span(sorted(rows))}; {remedy}")
    return rows[step]


def open_replay(config: StarPOConfig, step: int) -> tuple[Run, str]:
    """Return everything that the loop needs to repeat `step`, and where it starts from."""
    groups = initialize(config.parallel, config.train.seed)
    directory = config.run_directory
    tell = partial(print, file=sys.stderr)
    checkpoint = find_latest(directory / CHECKPOINTS, tell, last=step)
    base = local_directory(config.model.load) if config.model.load else directory / BASE
    hf = load_config(str(base))
    set_fields(config, hf)
    start = Start(base, None)
    if config.has_warm_start and (found := find_warm_start(config)) is not None:
        start = found
    elif config.has_warm_start and (checkpoint is None or config.needs_reference):
        raise ValueError(
            f"no checkpoint at or before step {step} and no whole warm start in {directory};"
            " replay a later step"
        )
    if config.model.critic_load:
        start = start._replace(critic=local_directory(config.model.critic_load))
    placement = Colocated(config.parallel.offload)
    renderer = load_renderer(str(base), think=config.environment.think)
    console = Console(is_writer=False, num_steps=config.train.num_steps)
    policy, critic, teacher = build_models(config, hf, groups, start, placement, renderer)
    unknown = Baselines("", 0, math.nan, math.nan, math.nan, None, None, False)
    run = Run(
        config=config,
        policy=policy,
        critic=critic,
        teacher=teacher,
        engine=EmbeddedEngine(hf, max_context=config.rollout.max_context_length, max_sessions=1),
        renderer=renderer,
        tasks=TaskSampler(config),
        prompts={},
        references=KnownBaselines(dict.fromkeys(config.environment.shares, unknown)),
        logger=RunLogger(directory, is_writer=False),
        console=console,
        placement=placement,
        timers=Timers(),
    )
    run.guard.directory = None  # nothing is written into the run
    if checkpoint:
        run.restore(checkpoint)
        return run, str(checkpoint.directory)
    return run, "the weights that training started from"


def compare(
    logged: Mapping[str, float | None], replayed: Mapping[str, float], *, same_layout: bool = True
) -> dict[str, dict[str, Any]]:
    """Return a map: key -> logged, replayed and their difference relative to max(1, |logged|);
    infinite where only one is a number. Without `same_layout` it leaves out OF_COMPUTED.
    """
    left_out = OF_LAYOUT if same_layout else (*OF_LAYOUT, *OF_COMPUTED)
    keys = {}
    for key in sorted(logged.keys() | replayed.keys()):
        if not key.startswith(STAGES) or key.endswith(left_out) or key in EXCLUDED:
            continue
        before, now = logged.get(key), replayed.get(key)
        if now is not None and not math.isfinite(now):
            now = None  # as in the log
        difference = 0.0 if before is now else math.inf
        if before is not None and now is not None:
            difference = abs(before - now) / max(1.0, abs(before))
        keys[key] = {"logged": before, "replayed": now, "difference": difference}
    return keys


def span(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"


def report(result: Mapping[str, Any]) -> None:
    """Print the numbers that differ and a summary line."""
    for key, row in result["keys"].items():
        if row["difference"] > 0:
            print(
                f"{key:40} logged {row['logged']}  replayed {row['replayed']}  difference"
                f" {row['difference']:.1e}"
            )
    print(
        f"step {result['step']} of {result['run']}, replayed from {result['from']} on"
        f" {result['world_size']} ranks:"
        f" {len(result['keys'])} numbers, largest difference {result['largest_difference']:.1e},"
        f" {'within' if result['equal'] else 'beyond'} {result['tolerance']:g}"
    )
