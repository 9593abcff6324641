"""Evaluations on held-out initial states: of the policy that a run trains, whenever they are due,
and of a policy that is stored, in a run, a Hugging Face directory or on the Hub.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch

from ragen_mega.agents.examples import find_references
from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import (
    is_run,
    read_recorded,
    runnable,
    under_recorded,
    unknown_note,
)
from ragen_mega.config.rules import Sections, section_types
from ragen_mega.config.sections.environment import json_object, parse_shares
from ragen_mega.config.sections.section import flag_of
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.environments.protocol import check_seed
from ragen_mega.environments.reference_players import Baselines, Prompt
from ragen_mega.models.huggingface import load_config
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.report.console import Console, set_titles
from ragen_mega.report.step_metrics import evaluation_metrics
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.held_out import EvaluationResult, HeldOut, evaluate_each
from ragen_mega.rollout.renderer import ChatRenderer, load_renderer
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.rollout.tasks import evaluation_prompts, held_out_note, play_settings
from ragen_mega.run.guards import HeldOutStarts
from ragen_mega.run.log import RunLog, StepLog
from ragen_mega.run.nodes import minutes_to_wait
from ragen_mega.run.timers import Timers
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.model_sources import local_directory
from ragen_mega.storage.run_directory import FINAL_EXPORT, SUMMARY_FILE
from ragen_mega.system.paths import expanded

MAX_SESSIONS = 256
"""Trajectories decoded at a time."""
PLAYED = ("environment", "agent", "rollout", "parallel")
"""Sections of the configuration that say how a policy plays."""
_LIMITS = ("max_turns", "max_actions_per_turn", "max_actions", "max_response_length")


class KnownBaselines(dict[str, Baselines]):
    """The reference players of a run by environment, an entry of its checkpoints."""

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return their results, as JSON takes them."""
        return {name: asdict(reference) for name, reference in self.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the results of a checkpoint, unless the run has found its own, under other rules."""
        if not self:
            self.update({name: Baselines(**saved) for name, saved in state.items()})


class RunEvaluation:
    """The evaluations of a run. Methods are collective over the ranks that train."""

    def __init__(
        self,
        config: StarPOConfig,
        engine: RolloutEngine,
        renderer: ChatRenderer,
        prompts: Mapping[str, Sequence[Prompt]],
        references: KnownBaselines,
        starts: HeldOutStarts,
        *,
        lend_device: Callable[[], AbstractContextManager[None]],
        sync: WeightSync,
        timers: Timers,
        log: RunLog,
        console: Console,
    ) -> None:
        """`prompts`: initial states of each environment; `starts` counts those that training has
        met, on the first rank; `lend_device()` gives the device to the engine for its block.
        """
        self.references, self.starts = references, starts
        self.warm_start: dict[str, dict[str, Any]] = {}
        """Results of the policy before reinforcement learning, by environment."""
        self.last: dict[str, EvaluationResult] = {}
        """The evaluation after the last step, once it has been made."""
        self._config, self._engine, self._renderer = config, engine, renderer
        self._prompts, self._lend_device, self._sync = prompts, lend_device, sync
        self._timers, self._log, self._console = timers, log, console

    def play_if_due(self, log: StepLog) -> None:
        """Evaluate after the last step, and every `--eval-interval` steps."""
        config, done = self._config.evaluation, log.step + 1
        is_last = done == self._config.train.num_steps
        trained = [*self._config.environment.shares]
        if log.step == 0:
            log.add("eval", evaluation_metrics(self.warm_start, trained, "initial_"))
        if not is_last and not (config.eval_interval and done % config.eval_interval == 0):
            return
        results = self.play(done, config.eval_samples if is_last else 1)
        numbers = {name: result.to_dict() for name, result in results.items()}
        log.add("eval", evaluation_metrics(numbers, trained))
        if is_last:
            self.last = results
        else:
            log.success = self.mean_success(results)

    def play(self, step: int, samples: int = 1) -> dict[str, EvaluationResult]:
        """Play `samples` episodes from every held-out initial state of every trained environment,
        and of --eval-environments, under the present weights. The engine counts nothing of it but
        lost servers: its other counts are of rollouts.
        """
        config, rollouts = self._config, replace(self._engine.counts)
        settings = play_settings(config, temperature=config.evaluation.eval_temperature, seed=0)
        sets = {
            name: HeldOut(config, settings, self._prompts[name], self.references[name])
            for name in config.environment.evaluated
        }
        with self._timers.timeline_only("evaluation"), self._lend_device():
            self._sync.send()
            results = evaluate_each(
                self._engine,
                self._renderer,
                self._console,
                sets,
                samples_per_prompt=samples,
                send_again=self._sync.send_again,
                watch=partial(self._watch, step),
            )
        found = self._engine.counts
        self._engine.counts = replace(rollouts, restarts=found.restarts, reissued=found.reissued)
        counts = on_main(lambda: {name: self.starts.count(name) for name in sets})
        for name in config.environment.shares:
            if (count := counts[name]) is not None:
                met, num = count
                results[name] = replace(results[name], starts_met=met, starts=num)
        titles = set_titles(results)
        for name, result in results.items():
            self._console.say(f"after {step} steps, {titles[name]}: {result}", "bold")
        return results

    def mean_success(self, results: Mapping[str, EvaluationResult]) -> float:
        """Return the average success over the trained environments."""
        return fmean(results[name].success for name in self._config.environment.shares)

    def _watch(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        self._log.trace_evaluation(step, name, groups, self._prompts[name])
        on_main(lambda: self.starts.evaluated(groups))


def evaluate(
    load: str | Path,
    environment: str,
    *,
    boards: str | None = None,
    num_prompts: int = 256,
    samples_per_prompt: int = 8,
    temperature: float = 0.5,
    seed: int = 0,
    rules: Mapping[str, Any] | None = None,
) -> EvaluationResult:
    """Play `samples_per_prompt` episodes from each of `num_prompts` held-out initial states, and
    compare with the random and the optimal player. Collective on the ranks of a job.

        >>> result = evaluate("runs/quick", "bandit", num_prompts=8, samples_per_prompt=2)
        >>> result.ci_low <= result.success <= result.ci_high, result.random, result.optimum
        (True, 0.5, 1.0)

    A run is evaluated under its own rules of play, anything else under the defaults; `rules` are
    settings of the sections PLAYED that replace them, `environment_options` only of environments
    that it names. `boards` is a file of initial states. Raises ValueError on bad input.
    """
    (result,) = evaluate_sets(
        load,
        [environment],
        boards={environment: boards},
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        seed=seed,
        rules=rules,
    ).values()
    return result


def _policy_of(run: str | Path) -> Path:
    """Return the directory of a run's final policy. Raises ValueError if it has none yet."""
    directory = Path(run) / FINAL_EXPORT
    missing = [path.name for path in (directory, Path(run) / SUMMARY_FILE) if not path.exists()]
    if missing:
        raise ValueError(
            f"--load {run} is a run that has no policy yet ({missing[0]} is missing): let it"
            " finish, or write the policy of its newest checkpoint by ragen-mega convert --from"
            f" {run} --to my-model --format huggingface, and give --load my-model"
        )
    return directory


def evaluate_sets(
    load: str | Path,
    environments: Sequence[str],
    *,
    boards: Mapping[str, str | None] = MappingProxyType({}),
    num_prompts: int = 256,
    samples_per_prompt: int = 8,
    temperature: float = 0.5,
    seed: int = 0,
    rules: Mapping[str, Any] | None = None,
) -> dict[str, EvaluationResult]:
    """`evaluate` for several environments with one engine: name -> result. `boards`: name -> file
    of initial states; an environment without a file has its own states.
    """
    if num_prompts < 1 or samples_per_prompt < 1:
        raise ValueError(
            f"num_prompts ({num_prompts}) and samples_per_prompt ({samples_per_prompt}) must be"
            " positive"
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0 (greedy), not {temperature}")
    check_seed(seed)
    options = json_object("environment_options", (rules or {}).get("environment_options", "{}"))
    if unknown := set(options) - set(environments):
        raise ValueError(
            f"environment_options names {', '.join(sorted(unknown))}, which is not evaluated"
            f" ({', '.join(environments)}); drop it or add it to --environment"
        )
    load = expanded(str(load))
    load = os.path.abspath(load) if os.path.exists(load) else load  # worlds may change directories
    files = {name: os.path.abspath(expanded(file)) for name, file in boards.items() if file}
    of_run = is_run(Path(load))
    recorded = read_recorded(Path(load)) if of_run else {"model": {"load": load}}
    with under_recorded(load) if of_run else nullcontext():
        settings = {name: _settings(recorded, name, rules or {}) for name in environments}
    collectives.start(max(map(minutes_to_wait, settings.values())))
    console = Console(is_writer=collectives.is_main(), num_steps=0)
    if note := unknown_note(recorded):
        console.say(note)
    directory = _policy_of(load) if of_run else local_directory(load)
    reader, hf = open_model(directory), load_config(str(directory))
    first = next(iter(settings.values()))
    rollout, renderer = first.rollout, load_renderer(str(directory), think=first.environment.think)
    if rollout.max_context_length > hf.max_position_embeddings:
        console.say(
            f"episodes end at {hf.max_position_embeddings} tokens, the positions of {load}"
            f" (max_position_embeddings in config.json), and not at {rollout.max_context_length}"
        )
        rollout = replace(rollout, max_context_length=hf.max_position_embeddings)
    sets = {}
    for name, config in settings.items():
        config = replace(config, rollout=rollout)
        prompts = evaluation_prompts(config.environment, name, num_prompts, files.get(name))
        if note := held_out_note(name, len(prompts), num_prompts):
            console.say(note)
        console.say(f"{name}: random and optimal play of {len(prompts)} initial states", "dim")
        reference = find_references(config, name, prompts)
        for note in reference.notes:
            console.say(note)
        play = play_settings(config, temperature=temperature, seed=seed)
        foreign = _foreign(recorded["environment"], name, config, rules or {}) if of_run else None
        sets[name] = HeldOut(config, play, prompts, reference, foreign)
    num_tasks = max(len(evaluation.prompts) for evaluation in sets.values()) * samples_per_prompt
    per_rank = -(-num_tasks // collectives.world_size())
    # Only here, for it brings a compiler (numba).
    from ragen_mega.engines.embedded.engine import EmbeddedEngine

    if rollout.rollout_engine != "embedded":
        console.say(f"the embedded engine plays, not {rollout.rollout_engine}", "dim")
    engine = EmbeddedEngine(
        hf,
        max_context=rollout.max_context_length,
        max_sessions=min(per_rank, MAX_SESSIONS),
        dtype=torch.bfloat16 if first.parallel.bf16 else torch.float32,
    )
    sync = WeightSync(engine, lambda shard: ((name, reader.read(name)) for name in reader.names()))
    with engine.awake():
        sync.send()
        return evaluate_each(engine, renderer, console, sets, samples_per_prompt=samples_per_prompt)


def _settings(
    recorded: Mapping[str, Mapping[str, Any]], environment: str, rules: Mapping[str, Any]
) -> Sections:
    """Return the settings that an environment is played under: those that a run has recorded, or
    the defaults, with the `rules` in their place. Raises ValueError for a rule that is no setting.
    """
    sections = {name: section_types()[name] for name in ("model", *PLAYED)}
    known = {name: {item.name for item in fields(kind)} for name, kind in sections.items()}
    if unknown := set(rules).difference(*known.values()):
        raise ValueError(
            f"rules must be settings of {', '.join(PLAYED)}, and {', '.join(sorted(unknown))} is"
            " none; correct the name"
        )
    given = json_object("environment_options", rules.get("environment_options", "{}"))
    own = recorded.get("environment", {}).get("environment_options", "{}")
    options = given.get(environment, json.loads(own).get(environment))
    # Only the rules: worlds, rewards and estimators that the run names are not imported.
    rules = dict(rules) | {
        "environments": environment,
        "eval_environments": "",
        "environment_options": json.dumps({environment: options} if options else {}),
        "curriculum": "{}",
        "curriculum_success": None,
    }
    settings = runnable(recorded, rules)
    parts: dict[str, Any] = {
        name: kind(**{key: rules.get(key, settings[name][key]) for key in known[name]})
        for name, kind in sections.items()
    }
    return Sections(**parts).located()


def _foreign(
    trained: Mapping[str, Any], name: str, config: Sections, rules: Mapping[str, Any]
) -> str | None:
    """Return what a run brings from the environments that it was trained on to one that it does not
    know: limits, and the vocabulary of a small model. None if it knows the environment.
    """
    names = parse_shares(trained["environments"])
    if name in names:
        return None
    known = ", ".join(names)
    limits = [
        f"{flag_of(limit)} {value}"
        for limit in _LIMITS
        if limit not in rules and (value := getattr(config.environment, limit)) is not None
    ]
    said = [f"the run was trained on {known}"]
    if limits:
        said.append(f"whose limits hold here too, unless flags change them: {' '.join(limits)}")
    if config.model.load is None:
        said.append(f"its small model has words of {known} alone, and reads others byte by byte")
    return "; ".join(said)
