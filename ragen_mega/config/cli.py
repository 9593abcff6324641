"""Flags and recipes -> configuration. A recipe is a file of flags; the command line comes after it
and wins.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from ragen_mega.config.flags import (
    STANDING_FOR_ENVIRONMENTS,
    all_flags,
    help_text,
    in_one_form,
    read_settings,
)
from ragen_mega.config.recorded import read_recorded, runnable, under_recorded
from ragen_mega.config.sections.environment import parse_shares
from ragen_mega.config.sections.section import flag_of
from ragen_mega.config.starpo import StarPOConfig
from ragen_mega.environments.registry import declares
from ragen_mega.extensions.registry import did_you_mean
from ragen_mega.system.paths import expanded

RECIPES = Path(__file__).parent / "recipes"
"""Files of flags, one or more per line; `#` starts a comment."""
DEFAULT_RECIPE = "frozen_lake"
"""Recipe of the launch script; the program itself uses no recipe unless one is named."""
OWN_RECIPE = "own"
"""Recipe where nobody names one and the default recipe is about other environments."""
_BELONGS_TO = {
    "--advantage-estimator": (
        *("--gamma", "--lam", "--turn-gamma", "--turn-lam"),
        "--reward-placement",
    ),
    "--filter-strategy": (
        "--filter-value",
        "--filter-start",
        "--filter-keep-zero",
        "--no-filter-keep-zero",
    ),
}
"""Flags that mean nothing, or something else, under another choice."""
_LIMITS = (
    ("max_turns", "max_actions_per_turn", "max_actions"),
    ("format_penalty",),
    ("max_response_length",),
)
"""Limits of an episode, in groups whose members bound each other; an environment may declare its
own.
"""
_OF_A_START = ("recipe", "name", "output", "resume", "overwrite")
"""Settings that say how a run was begun, and nothing of what goes on."""


def _as_environment(argv: Sequence[str]) -> list[str]:
    """Replace `--tasks FILE [--score my_module:score] [--mcp SERVER]`, or `--agent my_module:run
    [--tasks FILE]`, in `argv` by the environment that it stands for. The words come out in the one
    form that the functions below read. Raises ValueError for another environment beside it, and for
    a flag that would do nothing.
    """
    options, rest = _take(in_one_form(argv), *STANDING_FOR_ENVIRONMENTS)
    kind, what = ("agent", "my_module:run") if "agent" in options else ("tasks", "FILE")
    if kind not in options:
        for name in options:
            raise ValueError(
                f"--{name} does nothing without --tasks FILE; add it, or drop --{name}"
            )
        return rest
    text = options.pop(kind)
    others = _take(rest, "--environments", "--environment-options")[0]
    if others or "" in (text, options.get("tasks")):
        raise ValueError(
            f"--{kind} takes a name and stands for --environments {kind}:{text or what}, not"
            f" {text!r}{''.join(f' beside --{other}' for other in others)}; drop one of them"
        )
    for name, own in (("score", "returns its reward"), ("mcp", "brings its tools")):
        if kind == "agent" and name in options:
            raise ValueError(
                f"--{name} is for answers to --tasks, and an agent {own}; drop --{name}"
                f"{', or give --agent-reward' if name == 'score' else ''}"
            )
    words = [*rest, f"--environments={kind}:{text}"]
    if not options:
        return words
    return [*words, f"--environment-options={json.dumps({f'{kind}:{text}': options})}"]


def with_recipe(
    argv: Sequence[str], *, default: str = "none", directory: Path = RECIPES
) -> list[str]:
    """Put the flags of the recipe that `--recipe NAME` names (else of `default`) before the other
    words of `argv`.

    NAME is a file `NAME.flags` of `directory`, `none`, or the path of another file. Raises
    ValueError if there is no such recipe.
    """
    name, rest = choose_recipe(_as_environment(argv), default)
    if "/" in name or name.endswith(".flags"):
        return _under(_own_recipe(name, directory), rest)
    known = recipe_names(directory)
    if name not in known:
        file = f" (your file is ./{name})" if Path(name).is_file() else did_you_mean(name, known)
        raise ValueError(
            f"--recipe must name one of {', '.join(known)}, or a file that ends in .flags or has a"
            f" slash, not {name!r}{file}; files are in {directory}"
        )
    flags = [] if name == "none" else read_flags(directory / f"{name}.flags")
    defaults = {flag_of(setting.name): setting.default for setting in all_flags()}
    # A packaged recipe that says how a default works has chosen it.
    choices = _BELONGS_TO.items()
    chosen = [f"{flag}={defaults[flag]}" for flag, own in choices if _take(flags, *own)[0]]
    return _under([*chosen, *flags], rest)


def _own_recipe(path: str, directory: Path) -> list[str]:
    """Read the flags of a recipe that the user wrote. It stands alone, unless its own `--recipe
    NAME` names one of `directory` that it changes, or its environments get OWN_RECIPE. Raises
    ValueError if it names another file, which could name this one, or cannot be read.
    """
    try:
        flags = _as_environment(read_flags(Path(path)))
        read_settings(flags)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except OSError as error:
        raise ValueError(
            f"--recipe {path} must be a file of flags that can be read ({error.strerror}); mend the"
            f" path, or name one of {', '.join(recipe_names(directory))}"
        ) from None
    base, _ = choose_recipe(flags, DEFAULT_RECIPE)
    if base != OWN_RECIPE:
        base = _take(flags, "--recipe")[0].get("recipe", "none")
    if base not in recipe_names(directory):
        raise ValueError(
            f"--recipe {base!r} in {path} must name one of {', '.join(recipe_names(directory))};"
            " put the flags of both files into one"
        )
    return with_recipe(flags, default=base, directory=directory)


def with_recorded(run: Path, argv: Sequence[str]) -> list[str]:
    """Put the flags that a run has recorded before `argv`, which go on with it. Raises ValueError
    if there is no run, or if `argv` says where another one is or asks for a context that the fitted
    one of the run would replace.
    """
    given = {name: value for part in read_settings(argv).values() for name, value in part.items()}
    if taken := sorted(given.keys() & {"recipe", "name", "output"}):
        raise ValueError(
            f"--resume {run} says which run goes on, under the flags that it has recorded; drop"
            f" {', '.join(map(flag_of, taken))}, or give --resume without a directory"
        )
    recorded, flags = runnable(read_recorded(run), given), []
    kept = recorded["rollout"]
    length, asked = kept["max_context_length"], given.get("max_context_length")
    if asked not in (None, length) and given.get("fit_context", kept["fit_context"]):
        raise ValueError(
            f"max_context_length {asked} does nothing: fit_context keeps the {length} of {run}; add"
            " --no-fit-context, or drop --max-context-length"
        )
    for setting in all_flags():
        value, flag = recorded[setting.section][setting.name], flag_of(setting.name)
        is_needed = value != setting.default and setting.name not in given
        is_chosen = flag in (*_BELONGS_TO, "--environments")
        if not (is_needed or is_chosen) or setting.name in _OF_A_START:
            continue
        if setting.is_switch:
            flags.append(flag if value else f"--no-{flag[2:]}")
        else:
            flags.append(f"{flag}={value}")
    run = run if run.name else run.resolve()
    return [*_under(flags, argv), "--resume", "--output", str(run.parent), "--name", run.name]


def _under(flags: list[str], rest: Sequence[str]) -> list[str]:
    """Put flags of a recipe or a run before `rest`, less those that mean nothing beside it."""
    flags, played = _of_choices(flags, rest), _value("--environments", rest)
    if played is not None:
        evaluated = _value("--eval-environments", [*flags, *rest])
        flags = _of_played(_less_declared(flags, played), played, evaluated or "")
    return [*flags, *rest]


def _take(words: Sequence[str], *flags: str) -> tuple[dict[str, str], list[str]]:
    """Take flags out of `words`. Returns a map, name -> last value of each flag that was there (the
    empty text if it had none), and the other words.
    """
    found, rest = dict[str, str](), []
    for word in words:
        flag, _, value = word.partition("=")
        if flag in flags:
            found[flag.removeprefix("--")] = value
        else:
            rest.append(word)
    return found, rest


def _value(flag: str, words: Sequence[str]) -> str | None:
    """Return the last value that a flag has among `words`; None if the flag is not there."""
    return _take(words, flag)[0].get(flag.removeprefix("--"))


def choose_recipe(argv: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the recipe that `--recipe NAME` names and the other words. Without it the recipe is
    `default`. DEFAULT_RECIPE gives way to none where `argv` loads a model, which the learning rates
    of small models do not fit, and where `argv` names environments that it is not about: to the
    recipe of the environment's own name, else to OWN_RECIPE, whose limits follow from scripted
    play.
    """
    found, rest = _take(argv, "--recipe")
    name = found.get("recipe")
    if name is not None or default != DEFAULT_RECIPE:
        return default if name is None else expanded(name), rest
    if _value("--load", rest):
        return "none", rest
    about = _value("--environments", read_flags(RECIPES / f"{default}.flags"))
    assert about is not None  # the default recipe names its environments
    played = parse_shares(_value("--environments", rest) or about).keys()
    if played <= parse_shares(about).keys():
        return default, rest
    (first, *others) = played
    return first if not others and first in recipe_names() else OWN_RECIPE, rest


def split_resumed(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the directory of the run that `--resume RUN_DIR` names and the other words; None and
    all words without a directory.
    """
    found, rest = _take(argv, "--resume")
    run = found.get("resume")
    return (Path(expanded(run)), rest) if run else (None, [*argv])


def recipe_names(directory: Path = RECIPES) -> list[str]:
    """List the names that --recipe takes."""
    return [*sorted(path.stem for path in directory.glob("*.flags")), "none"]


def _of_played(flags: list[str], environments: str, evaluated: str) -> list[str]:
    """Drop the options of environments that are not played from the flags of a recipe; the
    curriculum is for trained ones.
    """
    trained = parse_shares(environments).keys()
    names = trained | {name.strip() for name in evaluated.split(",")}

    def keep(options: dict[str, object], names: Set[str]) -> dict[str, object]:
        return {name: value for name, value in options.items() if name in names}

    kept = []
    for word in flags:
        flag, _, value = word.partition("=")
        with contextlib.suppress(ValueError, AttributeError):  # EnvironmentConfig refuses others
            if flag == "--environment-options":
                word = f"{flag}={json.dumps(keep(json.loads(value), names))}"
            elif flag == "--curriculum":
                stages = json.loads(value).items()
                steps = {step: keep(options, trained) for step, options in stages}
                word = f"{flag}={json.dumps(steps)}"
        kept.append(word)
    return kept


def _less_declared(flags: list[str], played: str) -> list[str]:
    """Drop the limits of an episode that a played environment declares from the flags of a recipe
    that is about another environment: they were chosen for that one.
    """
    if not (about := _value("--environments", flags)):
        return flags
    others = parse_shares(played).keys() - parse_shares(about).keys()
    dropped: list[str] = []
    with contextlib.suppress(ValueError):  # an unknown name is refused where environments are built
        for group in _LIMITS:
            given = list(map(flag_of, group))
            is_given = _take(flags, *given)[0]
            if is_given and any(declares(name, limit) for name in others for limit in group):
                dropped += given
    return _take(flags, *dropped)[1]


def _of_choices(flags: list[str], others: Sequence[str]) -> list[str]:
    """Drop the flags of a recipe that say how its estimator or its filter works where `others` name
    another estimator or filter than the recipe.
    """
    for choice, belonging in _BELONGS_TO.items():
        of_recipe, other = _value(choice, flags), _value(choice, others)
        if of_recipe and other and other != of_recipe:
            _, flags = _take(flags, choice, *belonging)
    return flags


def read_words(argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the settings that flags and their recipe give, section -> name -> value. Raises
    ValueError as `read_settings` and `with_recipe` do.
    """
    return read_settings(with_recipe(argv))


def read_flags(path: Path) -> list[str]:
    """Read the flags in a recipe, in order and in one form, quotes as in a shell. Raises
    ValueError, in one line, for a file that is no text or has a quote that does not end.
    """
    try:
        return in_one_form(shlex.split(path.read_text(encoding="utf-8"), comments=True))
    except ValueError as error:
        raise ValueError(f"{path} must hold flags as UTF-8 text ({error}); mend the file") from None


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Keep the working directory, which a user's module may change while it is imported."""
    with contextlib.chdir("."):
        yield


@staying()
def parse(argv: Sequence[str], *, recipe: str = "none") -> StarPOConfig:
    """Parse flat flags; a later flag wins. `recipe` is the default that --recipe replaces.

        >>> config = parse(["--recipe", "bandit", "--num-steps", "2"])
        >>> config.train.num_steps, config.environment.environments
        (2, 'bandit')

    Raises ValueError on an unknown flag or a combination that cannot work.
    """
    if isinstance(argv, str):
        raise ValueError(f"parse takes a list of words, not {argv!r:.60}; write it with .split()")
    if others := [word for word in argv if not isinstance(word, str)]:
        raise ValueError(
            f"parse takes words of text, as a command line has them, not {others[0]!r:.60}; write"
            f' "{others[0]}"'
        )
    resumed, argv = split_resumed(_as_environment(argv))
    name, rest = choose_recipe(argv, recipe)
    if {"-h", "--help"} & set(rest):
        if os.environ.get("RANK", "0") == "0":  # which every rank was asked for
            chosen = read_settings(with_recipe([], default=name))
            print(help_text(name, chosen, recipe_names()), end="")
        raise SystemExit(0)
    if resumed is None:
        return _configured(with_recipe([f"--recipe={name}", *rest]), name)
    words = with_recorded(resumed, argv)
    name = read_recorded(resumed).get("logging", {}).get("recipe", "none")
    with under_recorded(resumed):
        return _configured(words, name)


def _configured(words: Sequence[str], recipe: str) -> StarPOConfig:
    settings = read_settings(words)
    settings.setdefault("logging", {})["recipe"] = recipe
    return StarPOConfig.from_dict(settings)
