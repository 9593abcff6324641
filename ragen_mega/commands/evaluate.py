"""Evaluate a run or a model on held-out initial states, beside the random and the optimal player.

    ragen-mega evaluate --recipe smollm2_lookup                            # before training it
    ragen-mega evaluate --load my-model --tasks my_data.jsonl --score my_module:score
    ragen-mega evaluate --load runs/NAME --environment sokoban,sokoban_large --json out.json
    torchrun --nproc-per-node 2 --no-python ragen-mega evaluate --load Qwen/Qwen2.5-0.5B-Instruct \\
        --environment sokoban

All other flags are flags of training (ragen-mega train --help): the policy plays as training would
evaluate it under them, so a command that trains evaluates what it would begin with. Flags that say
how to learn change nothing here, and flags of a run's directory and logs are refused. A run is
evaluated under its own settings, and flags replace them. With --samples-per-prompt above 1 it also
reports pass@k. The embedded engine plays. As in training --boards is for trained environments only:
--environments, or the first one of --environment.
"""

import argparse
from dataclasses import fields
from pathlib import Path

from ragen_mega.commands.command_line import JSON, command, flag, name_or_path
from ragen_mega.config import EnvironmentConfig, EvaluationConfig, LoggingConfig, StarPOConfig
from ragen_mega.config.cli import read_words
from ragen_mega.config.flags import in_one_form
from ragen_mega.config.recorded import is_run, read_recorded, runnable, under_recorded
from ragen_mega.config.sections.environment import parse_shares
from ragen_mega.config.sections.section import flag_of
from ragen_mega.environments.registry import ENVIRONMENTS
from ragen_mega.models.directory import check_model_directory
from ragen_mega.report.console import Console, set_titles
from ragen_mega.system.imports import importing
from ragen_mega.system.outputs import waiting

FLAGS = (
    flag(
        "--load",
        "a run, a Hugging Face or megatron-format directory, a .gguf file, or a hub name (default:"
        " that of --recipe)",
        type=name_or_path,
    ),
    flag("--environment", "one, or several: sokoban,frozen_lake; default: those of the run"),
    flag("--num-prompts", "boards or seeds to start from (default: --eval-prompts)", type=int),
    flag("--samples-per-prompt", "episodes from each (default: --eval-samples)", type=int),
    flag("--temperature", "of sampling (default: --eval-temperature)", type=float),
    flag("--seed", "of sampling", 0),
    JSON,
)
SHORT = {
    "num_prompts": "--eval-prompts",
    "samples_per_prompt": "--eval-samples",
    "temperature": "--eval-temperature",
}
"""Flag of this command -> the flag of training that it stands for."""
STANDS_FOR = {name: (setting,) for name, setting in SHORT.items()} | {
    "environment": ("--environments", "--eval-environments")
}
LOGS = {flag_of(item.name) for item in fields(LoggingConfig)} - {"--recipe"}
"""Flags of training about the files of a run."""


def written_out(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of training that SHORT ones stand for. Raises ValueError, by the name of the
    short one, for a value that its flag does not take.
    """
    words = []
    for name, setting in SHORT.items():
        if (value := getattr(arguments, name)) is not None:
            words += [setting, str(value)]
            field = setting.removeprefix("--").replace("-", "_")
            try:
                EvaluationConfig(**{field: value})
            except ValueError as error:
                said = str(error).replace(field, name).replace(setting, flag_of(name))
                raise ValueError(said) from None
    return words


@command(__doc__, *FLAGS, takes_others=True)
def main(arguments: argparse.Namespace) -> None:
    words = in_one_form(arguments.others)
    given = {word.partition("=")[0] for word in words}
    for name, flags in STANDS_FOR.items():
        if getattr(arguments, name) is not None and (doubled := given.intersection(flags)):
            raise ValueError(
                f"{flag_of(name)} stands for {' and '.join(flags)}, and {doubled.pop()} is given"
                " too; drop one of them"
            )
    if idle := given.intersection(LOGS):
        raise ValueError(
            f"{', '.join(sorted(idle))} does nothing: an evaluation leaves no run; drop it, and"
            " write the result by --json OUT"
        )
    if arguments.environment:
        first, *others = [name.strip() for name in arguments.environment.split(",")]
        for name in (*parse_shares(first), *filter(None, others)):
            ENVIRONMENTS.get(name, "--environment")
        words += ["--environments", first, "--eval-environments", ",".join(others)]
    settings = read_words(words + written_out(arguments))
    load = arguments.load or settings.get("model", {}).get("load")
    if load is None:
        raise ValueError("--load is needed: the model or run to evaluate; see --help")
    if adapter := settings.get("lora", {}).get("lora_load"):
        raise ValueError(
            f"lora_load {adapter} is evaluated as part of its model; merge them by ragen-mega"
            f" convert --from {adapter} --base {load} --to merged --format huggingface, then"
            " --load merged"
        )
    recorded = read_recorded(Path(load)) if is_run(Path(load)) else {}
    asked, own = settings.get("environment", {}), recorded.get("environment", {})
    if not (asked.get("environments") or own):
        check_model_directory("--load", load, needs_tokenizer=True)  # perhaps there is nothing
        raise ValueError(
            f"--environment is needed where --load is no run, as {load}; write e.g. --environment"
            " sokoban, or --tasks, --agent or --recipe as in training"
        )
    if recorded:
        asked_plan = {"boards": None} | settings.get("evaluation", {})
        with under_recorded(load):
            plan = EvaluationConfig(**runnable(recorded, asked_plan)["evaluation"] | asked_plan)
    else:  # under the rules of training
        model = settings.get("model", {}) | {"load": load}
        plan = StarPOConfig.from_dict(settings | {"model": model}).evaluation
    if "environments" not in asked:
        asked["environments"] = own["environments"]
    environment = EnvironmentConfig(**asked)
    names, trained = environment.evaluated, [*environment.shares]
    for name in names:
        ENVIRONMENTS.get(name)
    if not recorded:
        check_model_directory("--load", load, needs_tokenizer=True)
    # only here: flags are checked before
    with waiting("importing torch and the engine"), importing():
        from ragen_mega.ranks import collectives
        from ragen_mega.report.metrics import write_json
        from ragen_mega.run.evaluation import PLAYED, evaluate_sets
    results = evaluate_sets(
        load,
        names,
        boards=dict.fromkeys(trained, plan.boards),
        num_prompts=plan.eval_prompts,
        samples_per_prompt=plan.eval_samples,
        temperature=plan.eval_temperature,
        seed=arguments.seed,
        rules={key: value for name in PLAYED for key, value in settings.get(name, {}).items()},
    )
    console = Console(is_writer=collectives.is_main(), num_steps=0)
    sets = {name: result.to_dict() for name, result in results.items()}
    console.evaluations(f"{load}, temperature {plan.eval_temperature}", sets)
    for name, title in set_titles(sets).items():
        result, title = results[name], "" if len(sets) == 1 else f"{title} "
        console.say(f"{title}{result.quality}")
        for key, value in result.pass_at_k.items():
            console.say(f"{title}{key}: {value:.1%}")
    if arguments.json and collectives.is_main():
        write_json(arguments.json, sets[names[0]] if len(sets) == 1 else {"sets": sets})
    collectives.stop()
