"""Checks that need no heavy import. The launch script makes them first, torchrun's ranks make them
again, and `build` does so for callers from Python.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ragen_mega.config import EnvironmentConfig, ModelConfig, StarPOConfig, parse
from ragen_mega.config.cli import DEFAULT_RECIPE, OWN_RECIPE, staying
from ragen_mega.config.flags import all_flags
from ragen_mega.config.recorded import CONFIG_FILE, read_recorded, with_defaults
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.config.sections.environment import parse_shares
from ragen_mega.config.sections.section import flag_of
from ragen_mega.config.sections.train import TrainConfig
from ragen_mega.config.sections.warm_start import WarmStartConfig
from ragen_mega.environments.boards import load_boards
from ragen_mega.environments.examples import read_conversations
from ragen_mega.environments.processes import opened
from ragen_mega.extensions.extras import is_found, lack
from ragen_mega.models.directory import check_model_directory
from ragen_mega.models.lora import adapted
from ragen_mega.models.shape import ModelShape, cut_error
from ragen_mega.ranks.launcher import forget_foreign_ranks
from ragen_mega.report.console import fail
from ragen_mega.storage.integrity import describe_error
from ragen_mega.storage.run_directory import (
    BASE,
    WARM_START,
    WARM_START_CRITIC,
    Finished,
    check_directory,
    check_finished,
    with_name,
)
from ragen_mega.system.outputs import waiting

_SIZES = tuple(
    item.name
    for item in fields(ModelConfig)
    if not item.name.startswith(("load", "critic_", "teacher_"))
)
_WARM_START = tuple(
    item.name for item in fields(WarmStartConfig) if item.name.startswith("warm_start_")
)
_OF_SMALL_MODEL = (
    *("warm_start_first_turn_steps", "warm_start_first_turns"),
    *("warm_start_steps", "warm_start_lr"),
)
_PLAYED = ("warm_start_trajectories", "warm_start_skill")
_MADE = tuple({*_WARM_START} - {"warm_start_from", "warm_start_critic_steps", "warm_start_skill"})
_CLIPS = ("clip_ratio_low", "clip_ratio_high", "dual_clip", "value_clip")
_OF_WORLDS = ("max_actions_per_turn", "max_actions", "system_prompt")


@staying()
def check(config: StarPOConfig, num_ranks: int, ranks_per_node: int) -> None:
    """Raise ValueError, in one line, if the run cannot work on this many ranks, and Finished if it
    is done. Checks that need torch, a GPU or the network come later.
    """
    config, _ = with_name(config.located())
    check_environments(config.environment)
    _check_agent_functions(config)
    trainers, own = config.parallel.num_trainers(num_ranks), config.at_trainers.rollout
    own.num_engines(trainers, min(trainers, ranks_per_node))  # evaluations too
    if samplers := config.parallel.rollout_ranks:
        config.rollout.num_engines(samplers, min(samplers, ranks_per_node))
    if config.environment.prompt_examples_file is not None:
        for name in config.environment.evaluated:
            read_conversations(config.environment.prompt_examples_file, name)
    if config.model.teacher_prompt_examples_file is not None:
        for name in config.environment.shares:
            read_conversations(config.model.teacher_prompt_examples_file, name)
    if config.warm_start.sft_file is not None:
        read_conversations(config.warm_start.sft_file)
    if config.evaluation.boards is not None:
        for name in config.environment.shares:
            load_boards(config.evaluation.boards, name, **config.environment.options(name))
    _check_models(config)
    _check_warm_start(config)
    if own.rollout_engine == "sglang" and not own.given_engines:
        _check_sglang(config.rollout.sglang_python)
    asked = (
        config.parallel.fp8 != "none" or config.parallel.transformer_impl == "transformer_engine"
    )
    if asked and not is_found("transformer_engine"):
        raise ValueError(
            f"fp8 {config.parallel.fp8} with transformer_impl {config.parallel.transformer_impl}"
            " needs Transformer Engine, which is not installed; drop them, or pip install"
            " --no-build-isolation 'ragen-mega[h100]' on a machine with GPUs"
        )
    if config.logging.wandb_project is not None and (reason := lack("wandb:init")):
        raise ValueError(
            f"wandb_project {config.logging.wandb_project} needs the package wandb, which {reason};"
            " run pip install wandb or drop --wandb-project"
        )
    check_directory(
        config.run_directory,
        resume=config.checkpoint.resume,
        overwrite=config.logging.overwrite,
    )
    check_finished(config)


def import_agents(config: EnvironmentConfig) -> None:
    """Import agents with their libraries, which take longer on a busy machine than an environment
    may take to be built. Raises ValueError if one cannot be imported.
    """
    for name in filter(is_agent, config.evaluated):
        from ragen_mega.agents.runner import import_agent  # it needs the extra `agents`

        with waiting(f"importing {name} and its libraries"):
            import_agent(name.partition(":")[2], in_processes=config.environment_processes > 0)


def check_environments(config: EnvironmentConfig) -> None:
    """Raise ValueError, in one line, if an environment cannot be built under its options, the
    curriculum's options included.
    """
    import_agents(config)
    for step in (None, *config.curriculum_steps):
        for name in config.evaluated:
            options = config.options(name) if step is None else config.training_options(name, step)
            with opened(config, name, options):
                pass


def _check_agent_functions(config: StarPOConfig) -> None:
    """Raise ValueError for a reward or an example of agents that cannot be called, and if a warm
    start would imitate an agent without an example.
    """
    agents, warm = [*filter(is_agent, config.environment.evaluated)], config.warm_start
    if agents:
        from ragen_mega.agents.runner import EXAMPLES, REWARDS  # as `import_agents`

        for registry, name, taken in (
            (REWARDS, config.agent.agent_reward, ["episode"]),
            (EXAMPLES, config.agent.agent_example, ["messages", "tools"]),
        ):
            if name is not None:
                registry.check_call(name, registry.get(name), *taken)
    is_imitated = warm.sft_steps > 0 and warm.sft_file is None
    if config.model.load is None:
        is_imitated = warm.warm_start_from is None
    if agents and is_imitated and config.agent.agent_example is None:
        raise ValueError(
            f"the warm start imitates play, and {agents[0]} has no example of it; set"
            " --agent-example my_module:example, or --load a model that can talk"
        )


def check_routing(config: StarPOConfig, shape: ModelShape) -> None:
    """Raise ValueError if a run repeats choices of experts that a model does not have."""
    source = config.train.routing_replay
    if source != "none" and not shape.num_experts:
        raise ValueError(
            f"routing_replay {source} repeats choices of experts, and a {shape.model_type} model"
            " has none; drop --routing-replay"
        )


def _check_models(config: StarPOConfig) -> None:
    model, parallel = config.model, config.parallel
    if model.load is None:
        shape: ModelShape | None = ModelShape.from_config(model.small_model(vocab_size=512))
    else:
        shape = check_model_directory("--load", model.load, needs_tokenizer=True)
    if model.critic_load is not None:
        check_model_directory("--critic-load", model.critic_load, needs_tokenizer=False)
    for name in model.teachers.values():
        check_model_directory("--teacher-load", name, needs_tokenizer=True)
    if shape is not None:
        check_routing(config, shape)
        adapted(shape, config.lora)
        if error := cut_error(shape, parallel.cut):
            raise ValueError(error)


def recipe_note(config: StarPOConfig) -> str | None:
    """Return which limits a run has whose recipe was chosen by itself."""
    if config.logging.recipe != OWN_RECIPE:
        return None
    return (
        f"recipe {OWN_RECIPE}: its limits follow from scripted play of"
        f" {', '.join(config.environment.shares)}, here"
        f" --max-context-length {config.rollout.max_context_length}; flags and --recipe change them"
    )


def flags_without_effect(config: StarPOConfig) -> list[str]:
    """Return a line for the flags, given or of a recipe, that do nothing for one reason: none of
    them is refused, because a recipe may have set it for another choice.
    """
    model, warm, train, world = config.model, config.warm_start, config.train, config.environment
    kept, estimator = config.filter.num_kept(config.rollout.num_groups), config.advantage
    is_one_update = (
        kept is not None
        and kept * config.rollout.group_size <= train.minibatch_size
        and train.updates_per_rollout == 1
        and config.old_logprobs_from(1) == "update"
    )
    later = [step for step in sorted(world.curriculum_steps) if step >= train.num_steps > 0]
    given = {name: value for part in config.to_dict().values() for name, value in part.items()}
    notes = [f"--curriculum does nothing from step {step} on, for the run ends" for step in later]
    for is_so, names, why in (
        (config.lora.rank, ("decoupled_lr",), "adapters leave embedding and LM head as they are"),
        (model.load, _SIZES, f"the size is that of --load {model.load}"),
        (not config.has_warm_start, _WARM_START, "--load without --sft-steps has no warm start"),
        (warm.sft_steps, _OF_SMALL_MODEL, "the model of --load has --sft-steps and --sft-lr"),
        (warm.sft_file, _PLAYED, "--sft-file is imitated in place of scripted play"),
        (warm.warm_start_from, _MADE, f"the warm start is that of {warm.warm_start_from}"),
        (model.critic_load, ("warm_start_critic_steps",), "the critic is that of --critic-load"),
        (
            not estimator.uses_critic,
            ("critic_lr", "value_clip", "warm_start_critic_steps", "warm_start_critic_lr"),
            f"--advantage-estimator {estimator.advantage_estimator} has no critic",
        ),
        (is_one_update, _CLIPS, "a step is one update, in which every ratio is 1"),
        (all(map(is_agent, world.evaluated)), _OF_WORLDS, "agents have their own rules of play"),
    ):
        idle = [
            flag_of(flag.name)
            for flag in all_flags()
            if flag.name in names and given[flag.name] not in (flag.default, None)
        ]
        if is_so and idle:
            notes.append(f"{', '.join(idle)} {'do' if idle[1:] else 'does'} nothing: {why}")
    return [f"note: {note}" for note in notes]


def warmup_note(config: TrainConfig) -> str | None:
    """Return a note on a run that ends before its policy is trained at the full learning rate."""
    num_updated = config.num_steps - config.critic_warmup
    if not 0 < num_updated < config.lr_warmup:
        return None
    share = num_updated / config.lr_warmup
    return (
        f"note: --lr-warmup {config.lr_warmup} is longer than the {num_updated} steps that update"
        f" the policy, so the last one has {share:.3g} of --lr {config.lr:g}; set --lr-warmup"
        f" {num_updated // 10} or raise --num-steps"
    )


def task_notes(config: EnvironmentConfig) -> list[str]:
    """Return notes on tasks of files: those that are repeated, or trained on and evaluated, and
    those that hide how an answer is read, where nothing else tells it.
    """
    notes, kinds = [], ["split_note"]
    if not config.prompt_examples and "<answer>" not in (config.system_prompt or ""):
        kinds.append("form_note")
    for name in config.shares:
        with opened(config, name, config.options(name)) as (_, built):
            said = (getattr(built, kind, None) for kind in kinds)
            notes += [f"{name}: {note}" for note in said if note]
    return notes


def _check_warm_start(config: StarPOConfig) -> None:
    """Raise ValueError unless the run of warm_start_from has a warm start that fits this one, or
    the run that goes on has taken it already.
    """
    if config.warm_start.warm_start_from is None:
        return
    source = Path(config.warm_start.warm_start_from)
    needed = [BASE, WARM_START] + [WARM_START_CRITIC] * config.warm_starts_critic

    def absent(run: Path) -> list[str]:
        return [name for name in needed if not (run / name / "model.safetensors").exists()]

    if config.checkpoint.resume and not absent(config.run_directory):
        return
    missing = absent(source)
    if missing or not (source / CONFIG_FILE).exists():
        raise ValueError(
            f"warm_start_from must be the directory of a run without --load; {source} lacks"
            f" {', '.join(missing) or CONFIG_FILE}"
        )
    there = _shape_of_warm_start(with_defaults(read_recorded(source)))
    for name, here in _shape_of_warm_start(config.to_dict()).items():
        if there[name] != here:
            raise ValueError(
                f"warm_start_from {source} was made with {name} {there[name]}, and this run has"
                f" {here}; choose another run, or drop it to make a warm start"
            )


def _shape_of_warm_start(settings: dict[str, Any]) -> dict[str, Any]:
    """Select the settings that must be equal for a warm start to be of use, from settings as
    config.json has them.
    """
    model, world = settings["model"], settings["environment"]
    names = parse_shares(world["environments"])
    options = json.loads(world["environment_options"])
    return {
        **{name: model.get(name) for name in _SIZES},
        **{
            name: world.get(name)
            for name in ("environments", "think", "prompt_style", "system_prompt")
        },
        "environment_options": {name: options.get(name, {}) for name in names},
    }


def _check_sglang(python: str | None) -> None:
    remedy = "; set --sglang-python to the one that tools/setup_sglang_cpu.sh of a clone makes"
    # A folder without code has no origin.
    program = (
        "import importlib.util, sys;"
        "sys.exit(getattr(importlib.util.find_spec('sglang'), 'origin', None) is None)"
    )
    try:
        done = subprocess.run([python or sys.executable, "-c", program], capture_output=True)
    except OSError as error:
        raise ValueError(
            f"sglang_python {python} cannot be run ({error.strerror}){remedy}"
        ) from None
    if done.returncode:
        raise ValueError(
            f"rollout_engine sglang needs SGLang, and {python or sys.executable} has none{remedy}"
        )


def check_flags(flags: Sequence[str], num_ranks: int, ranks_per_node: int) -> str | None:
    """Exit with a one-line error unless a run with these flags can begin. Only rank 0 checks: by
    the time the others did, the run might have begun. Returns the message for a run that has
    finished.
    """
    try:
        forget_foreign_ranks()
        if os.environ.get("RANK", "0") != "0":
            return None
        check(parse(flags, recipe=DEFAULT_RECIPE), num_ranks, ranks_per_node)
    except Finished as done:
        return str(done)
    except OSError as error:
        fail(describe_error(error))
    except ValueError as error:
        fail(str(error))
    return None
