"""Success of any policy on fixed initial states: a run, a Hugging Face or Megatron directory, or a
Hub model, played by the embedded engine.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragen_mega.config import EnvironmentConfig, RolloutConfig
from ragen_mega.config.recorded import CONFIG_FILE, read_recorded
from ragen_mega.config.sections.environment import json_object
from ragen_mega.data import distributed
from ragen_mega.models.huggingface import load_config, local_directory
from ragen_mega.report.console import Console
from ragen_mega.rollout.evaluate import EvaluationResult, HeldOut, evaluate_each
from ragen_mega.rollout.renderer import load_renderer
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.rollout.tasks import evaluation_prompts, play_settings
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.run_directory import FINAL_EXPORT

MAX_SESSIONS = 256
"""Trajectories decoded at a time."""


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

    A run is evaluated under its own rules of play, anything else under the defaults; `rules` are
    fields of `EnvironmentConfig` that replace them, `environment_options` only of environments that
    it names. `boards` is a file of initial states. Raises ValueError on bad input.
    """
    (result,) = evaluate_sets(
        load,
        [environment],
        boards=boards,
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        seed=seed,
        rules=rules,
    ).values()
    return result


def evaluate_sets(
    load: str | Path,
    environments: Sequence[str],
    *,
    boards: str | None = None,
    num_prompts: int = 256,
    samples_per_prompt: int = 8,
    temperature: float = 0.5,
    seed: int = 0,
    rules: Mapping[str, Any] | None = None,
) -> dict[str, EvaluationResult]:
    """`evaluate` for several environments with one engine: name -> result."""
    if num_prompts < 1 or samples_per_prompt < 1:
        raise ValueError(
            f"num_prompts ({num_prompts}) and samples_per_prompt ({samples_per_prompt}) must be"
            " positive"
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0 (greedy), not {temperature}")
    options = json_object("environment_options", (rules or {}).get("environment_options", "{}"))
    if unknown := set(options) - set(environments):
        raise ValueError(
            f"environment_options names {', '.join(sorted(unknown))}, which is not evaluated"
            f" ({', '.join(environments)}); drop it or add it to --environment"
        )
    distributed.start()
    sets = {}
    for name in environments:
        directory, config, rollout = _settings(load, name, rules or {})
        settings = play_settings(rollout, config, temperature=temperature, seed=seed)
        prompts = evaluation_prompts(config, name, num_prompts, boards)
        sets[name] = HeldOut(config, settings, prompts)
    reader = open_model(directory)
    num_tasks = max(len(evaluation.prompts) for evaluation in sets.values()) * samples_per_prompt
    per_rank = -(-num_tasks // distributed.world_size())
    # Only here, for it brings a compiler (numba).
    from ragen_mega.engines.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine(
        load_config(str(directory)),
        max_context=rollout.max_context_length,
        max_sessions=min(per_rank, MAX_SESSIONS),
    )
    console = Console(is_writer=distributed.is_main(), num_steps=0)
    renderer = load_renderer(str(directory), think=config.think)
    sync = WeightSync(engine, lambda shard: ((name, reader(name)) for name in reader.names()))
    with engine.awake():
        sync.send()
        return evaluate_each(engine, renderer, console, sets, samples_per_prompt=samples_per_prompt)


def _settings(
    load: str | Path, environment: str, rules: Mapping[str, Any]
) -> tuple[Path, EnvironmentConfig, RolloutConfig]:
    """Return the model directory, rules of play and limits of what is to be evaluated."""
    directory = Path(load)
    rules = dict(rules)
    given = json_object("environment_options", rules.pop("environment_options", "{}"))
    if environment in given:  # options of other sets do not apply
        rules["environment_options"] = json.dumps({environment: given[environment]})
    if not ((directory / CONFIG_FILE).exists() and (directory / FINAL_EXPORT).exists()):
        played = EnvironmentConfig(environments=environment)
        return local_directory(str(load)), replace(played, **rules), RolloutConfig()
    recorded = read_recorded(directory)
    own = json.loads(recorded["environment"]["environment_options"]).get(environment)
    # Only the rules: worlds, rewards and estimators that the run names are not imported.
    played = recorded["environment"] | {
        "environments": environment,
        "eval_environments": "",
        "environment_options": json.dumps({environment: own} if own else {}),
        "curriculum": "{}",
    }
    rollout = RolloutConfig(**recorded["rollout"])
    return directory / FINAL_EXPORT, EnvironmentConfig(**played | rules), rollout
