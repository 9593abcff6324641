"""The settings of a run as flags: the values that each flag takes, their parser, and their help."""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from ragen_mega.config.rules import section_types
from ragen_mega.config.sections.section import flag_of
from ragen_mega.config.starpo import StarPOConfig
from ragen_mega.extensions.registry import did_you_mean

Settings = Mapping[str, Mapping[str, Any]]
"""Section -> name -> value, as `StarPOConfig.to_dict` gives them."""
_WORDS = {int: ("INT", "a whole number"), float: ("NUMBER", "a number"), str: ("TEXT", "a text")}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One setting on the command line."""

    section: str
    name: str
    kinds: tuple[Any, ...]
    """Types that it takes, and the values of a Literal."""
    default: Any
    about: str

    @property
    def is_switch(self) -> bool:
        """Return whether the flag is given as --x or --no-x, without a value."""
        return self.kinds == (bool,)

    @property
    def choices(self) -> dict[str, Any]:
        """Map every text that the flag accepts to its value, where these can be listed."""
        named = {bool: (True, False)} | dict.fromkeys(_WORDS, ())
        values = [value for kind in self.kinds for value in named.get(kind, (kind,))]
        return {str(value): value for value in values}

    @property
    def metavar(self) -> str:
        """Name the placeholder for the flag's value in the help."""
        return "|".join([_WORDS[kind][0] for kind in self.kinds if kind in _WORDS] or self.choices)

    def read(self, text: str) -> Any:
        """Read the value that `text` stands for. Raises ArgumentTypeError in plain words."""
        if text in self.choices:
            return self.choices[text]
        free = [kind for kind in self.kinds if kind in _WORDS]
        for kind in free:
            with contextlib.suppress(ValueError):
                return kind(text)
        *first, last = [*(_WORDS[kind][1] for kind in free), *self.choices]
        rule = f"{', '.join(first)} or {last}" if first else last
        about = f" ({self.about.rstrip('.')})" if self.about else ""
        close = did_you_mean(text, self.choices)
        raise argparse.ArgumentTypeError(f"must be {rule}, not {text!r}{close}{about}")


@cache
def all_flags() -> tuple[Flag, ...]:
    """List the flag of every setting, in order."""
    return tuple(
        Flag(name, item.name, _kinds(hints[item.name]), item.default, abouts[item.name])
        for name, section in section_types().items()
        for hints in [get_type_hints(section)]
        for abouts in [_abouts(section)]
        for item in dataclasses.fields(section)
    )


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """List the alternatives for a value: members of a union, values of a Literal, None for its
    type.
    """
    if annotation is NoneType:
        return (None,)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = get_args(annotation)
    return tuple(kind for member in members for kind in _kinds(member)) or (annotation,)


def _abouts(section: type) -> dict[str, str]:
    """Return field -> the docstring below the field, on one line."""
    [found] = ast.parse(inspect.getsource(section)).body
    assert isinstance(found, ast.ClassDef)  # for `section` is a class
    return {
        item.target.id: " ".join(ast.literal_eval(below.value).split())
        for item, below in itertools.pairwise(found.body)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(below, ast.Expr)
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+)[^:]*:", r"\1", message)
        message = message.replace("expected one argument", "needs a value; see --help")
        raise ValueError(message.replace("ignored explicit argument", "takes no value, not"))


ELSEWHERE = {
    "learning_rate": "--lr",
    "actor_lr": "--lr",
    "algo": "--advantage-estimator",
    "algorithm": "--advantage-estimator",
    "beta": "--kl-coef",
    "kl_beta": "--kl-coef",
    "epsilon": "--clip-ratio-low",
    "epsilon_high": "--clip-ratio-high",
    "num_generations": "--group-size",
    "n_samples_per_prompt": "--group-size",
    "rollout_n": "--group-size",
    "batch_size": "--num-groups",
    "train_batch_size": "--num-groups",
    "per_device_train_batch_size": "--minibatch-size",
    "ppo_mini_batch_size": "--minibatch-size",
    "gradient_accumulation_steps": "--minibatch-size",
    "clip_ratio": "--clip-ratio-low and --clip-ratio-high",
    "data_parallel_size": "all ranks that the other sizes leave",
    "dataset": "--tasks",
    "device": "CUDA_VISIBLE_DEVICES before the command, empty for a CPU",
    "gpus": "NPROC_PER_NODE=N before the command",
    "num_gpus": "NPROC_PER_NODE=N before the command",
    "num_processes": "NPROC_PER_NODE=N before the command",
    "reward_funcs": "--score or --reward",
    "reward_weights": "--reward, whose terms have weights",
    "peft_config": "--lora-rank",
    "report_to": "--wandb-project",
    "log_completions": "--trace-groups, and ragen-mega view",
    "eval_strategy": "--eval-interval",
    "train_files": "--tasks",
    "kl_loss_coef": "--kl-coef",
    "epochs": "--num-steps",
    "num_train_epochs": "--num-steps",
    "loss_type": "--policy-loss or --loss-aggregation",
    "use_vllm": "--rollout-engine",
    "total_epochs": "--num-steps",
    "max_steps": "--num-steps",
    "num_iterations": "--updates-per-rollout",
    "ppo_epochs": "--updates-per-rollout",
    "max_completion_length": "--max-response-length",
    "max_new_tokens": "--max-response-length",
    "max_tokens": "--max-response-length",
    "max_prompt_length": "--max-context-length",
    "max_grad_norm": "--clip-grad",
    "model": "--load",
    "model_name_or_path": "--load",
    "model_path": "--load",
    "output_dir": "--output",
    "run_name": "--name",
    "save_steps": "--save-interval",
    "eval_steps": "--eval-interval",
    "resume_from_checkpoint": "--resume",
}
"""Name of a setting in other trainers -> the flag that comes nearest."""
STANDING_FOR_ENVIRONMENTS = ("--agent", "--tasks", "--score", "--mcp")
"""Flags that name no setting: an environment stands for them."""


def read_settings(argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the settings that flags give; the last one wins. Raises ValueError, in one line, for an
    unknown flag or a value that its flag does not take.
    """
    given, others = _parser().parse_known_args(in_one_form(argv))
    for word in others:
        name = word.split("=", 1)[0]
        if not name.startswith("--"):
            pairs = itertools.pairwise(argv)
            before = next((flag for flag, value in pairs if value == word), "")
            if before.removeprefix("--").replace("-", "_") in {
                setting.name for setting in all_flags() if setting.is_switch
            }:
                raise ValueError(
                    f"{before} is a switch and takes no value, not {word!r}; write {before}, or"
                    f" --no-{before.removeprefix('--')} to turn it off"
                )
            raise ValueError(
                f"unexpected {word!r}: flags begin with --; --help lists all, docs/coming_from.md"
                " those that stand for settings of other trainers"
            )
        meant = ELSEWHERE.get(name.removeprefix("--").replace("-", "_"))
        known = [flag_of(setting.name) for setting in all_flags()]
        close = did_you_mean(name, [*known, *STANDING_FOR_ENVIRONMENTS])
        if meant is not None:
            close = f" (here it is {meant})"
        raise ValueError(f"unknown flag {name}{close}; --help lists all")
    settings: dict[str, dict[str, Any]] = {}
    for setting in all_flags():
        if setting.name in given:
            settings.setdefault(setting.section, {})[setting.name] = getattr(given, setting.name)
    return settings


@cache
def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for setting in all_flags():
        if setting.is_switch:
            parser.add_argument(flag_of(setting.name), action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag_of(setting.name), type=setting.read)
    return parser


def in_one_form(argv: Sequence[str]) -> list[str]:
    """Turn `--flag value` into `--flag=value`, since a value may begin with a dash, and underscores
    in names into dashes.
    """
    valued = {flag_of(setting.name) for setting in all_flags() if not setting.is_switch}
    valued |= {*STANDING_FOR_ENVIRONMENTS, "--resume"}  # the switch, which may name a run
    words, joined = list(argv), []
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in valued and not equals and words and not words[0].startswith("--"):
            equals, value = "=", words.pop(0)
        joined.append(name + equals + value)
    return joined


def help_text(recipe: str, chosen: Settings, recipes: Sequence[str]) -> str:
    """Write every flag by section: its values, its effect, its default, and the value that the
    recipe in effect sets instead.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [
        "usage: ragen-mega train [--recipe NAME] [flags]",
        "   or: bash examples/pretrain_starpo.sh [--recipe NAME] [flags]    (in a clone)",
        "",
        *textwrap.wrap(
            f"{StarPOConfig.__doc__} A later flag wins, and any flag over the recipe's.", width
        ),
        "",
        "  --recipe NAME",
        *_indented(
            f"flags to begin with: {', '.join(recipes)}, or the path of a file of flags such as"
            f" my.flags; here: {recipe}",
            width,
        ),
        "  --tasks FILE [--score my_module:score] [--mcp 'COMMAND' or URL]",
        *_indented(
            "prompts and reference answers, JSON lines or parquet: environment tasks:FILE; with the"
            " tools of an MCP server, such as 'python my_server.py' or http://127.0.0.1:8000/mcp",
            width,
        ),
        "  --agent my_module:run [--tasks FILE]",
        *_indented(
            "a program that asks for completions as it asks OpenAI: a function (task, client) or"
            " (task, base_url, api_key), or a URL (docs/agents.md), with the rows of FILE or seeds"
            " alone as tasks: environment agent:my_module:run",
            width,
        ),
    ]
    titles = {name: section.__doc__ or "" for name, section in section_types().items()}
    for section, title in titles.items():
        lines += [
            "",
            *textwrap.wrap(f"{section.replace('_', ' ')}: {' '.join(title.split())}", width),
        ]
        for setting in all_flags():
            if setting.section == section and setting.name != "recipe":
                flag = flag_of(setting.name)
                value = f", --no-{flag[2:]}" if setting.is_switch else f" {setting.metavar}"
                changed = chosen.get(section, {}).get(setting.name, setting.default)
                other = f"; {recipe}: {_shown(changed)}" if changed != setting.default else ""
                is_said = setting.default is None and "default" in setting.about
                default = "as said" if is_said else _shown(setting.default)
                about = f"{setting.about} [default {default}{other}]"
                lines += [f"  {flag}{value}", *_indented(about, width)]
    return "\n".join(lines) + "\n"


def _indented(text: str, width: int) -> list[str]:
    indent = 8 * " "
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
