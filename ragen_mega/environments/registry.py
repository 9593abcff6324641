"""Environments by name: names of the package, import paths, entry points, and what `register` adds.

`my_module:MyEnvironment` names a class in a module of the working directory or on the path,
`gymnasium:Taxi-v3` an environment of another library; an installed package declares its own in the
entry point group `ragen_mega.environments`.
"""

import inspect
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ragen_mega.environments.actions import ACTION_SEPARATOR, parse_response
from ragen_mega.environments.pool import EnvironmentFailed, guarded, is_refusal
from ragen_mega.environments.protocol import Environment
from ragen_mega.environments.tool_calls import check_tools
from ragen_mega.extensions.registry import Registry

_WORLDS = "ragen_mega.environments.worlds"
_ADAPTERS = "ragen_mega.environments.adapters"
_BANDIT = f"{_WORLDS}.bandit.world:Bandit"
_SOKOBAN = f"{_WORLDS}.sokoban.world:Sokoban"

ENVIRONMENTS = Registry(
    "environment",
    "--environments",
    {
        "bandit": _BANDIT,
        "bandit_test": _BANDIT,
        "bandit_reversed": _BANDIT,
        "sokoban": _SOKOBAN,
        "sokoban_large": _SOKOBAN,
        "sokoban_new_vocabulary": _SOKOBAN,
        "frozen_lake": f"{_WORLDS}.frozen_lake.world:FrozenLake",
        "lookup": f"{_WORLDS}.lookup.world:Lookup",
        "reverse": f"{_WORLDS}.reverse.world:Reverse",
        "webshop": f"{_WORLDS}.webshop.world:WebShop",
    },
    families={
        "gymnasium": f"{_ADAPTERS}.gymnasium:GymnasiumWorld",
        "textarena": f"{_ADAPTERS}.textarena:TextArenaGame",
        "reasoning_gym": f"{_ADAPTERS}.reasoning_gym:ReasoningTask",
        "gem": f"{_ADAPTERS}.gem:GemEnvironment",
        "openenv": f"{_ADAPTERS}.openenv:OpenEnvWorld",
        "verifiers": f"{_ADAPTERS}.verifiers:VerifiersEnvironment",
        "tasks": f"{_ADAPTERS}.tasks:FileTasks",
        "agent": "ragen_mega.agents.runner:AgentProgram",
    },
    forms={"gymnasium": (re.compile(r"[\w/]+-v\d+"), ("gym", "Gymnasium"))},
)
# RAGEN's scripts and paper swap the names of the two transfer bandits; these are the scripts'.
_IMPLIED: dict[str, dict[str, Any]] = {
    "bandit_test": {"low_arm": "Trader", "high_arm": "Librarian"},
    "bandit_reversed": {"low_arm": "Librarian", "high_arm": "Trader"},
    # 8 backward moves of our breadth-first search give the same difficulty as depth 10 of the
    # original depth-first search.
    "sokoban_large": {"dim": 8, "num_boxes": 2, "search_depth": 8},
    "sokoban_new_vocabulary": {"vocabulary": "new", "search_depth": 30},
}
"""Options that a name stands for."""

_RESERVED = (
    "actions",
    "instruction",
    "board_set",
    "solver",
    "narrator",
    "example_options",
    "tools",
    "splits",
)
"""Class attributes that belong to the protocol and are not options."""


def register(name: str, environment: Any, **options: Any) -> None:
    """Give an environment class, or a function that builds one, a name; `options` are what the name
    implies. Raises ValueError for a name that is taken.
    """
    ENVIRONMENTS.register(name, environment)
    _IMPLIED[name] = options


def held_out_options(name: str) -> dict[str, Any]:
    """Return the options under which environment `name` is evaluated: `split`, set to the second
    name in its class attribute `splits` (the first is trained on); none if it has no splits. Raises
    ValueError for splits that are no sequence.
    """
    splits = getattr(ENVIRONMENTS.get(name), "splits", ())
    if not isinstance(splits, (tuple, list)):
        raise ValueError(
            f"splits of environment {name} must be a sequence of names, not {splits!r:.60}"
        )
    return {"split": splits[1]} if len(splits) > 1 else {}


def declares(name: str, attribute: str) -> bool:
    """Return whether the class of environment `name` has this attribute, or an annotation which
    says that its instances do. Nothing is built. Raises ValueError for an unknown name.
    """
    found = ENVIRONMENTS.get(name)
    kinds = inspect.getmro(found) if isinstance(found, type) else ()
    return any(attribute in (vars(kind) | inspect.get_annotations(kind)) for kind in kinds)


def make(name: str, **options: Any) -> Environment:
    """Build the environment `name`; `options` override what the name implies. An option is a
    keyword of the constructor, or a class attribute.

    Raises ValueError, in one line, for an unknown name or option, an option value that the
    environment rejects, and an object that is not an environment.
    """
    constructor = ENVIRONMENTS.get(name)
    if not callable(constructor):
        raise ValueError(f"{name} must name a class or a function, not {constructor!r:.60}")
    if isinstance(constructor, type):
        _check_methods(name, constructor)  # before it is called: it may be anything
    options = _copied(_IMPLIED.get(name, {}) | options)
    attributes = _check_options(name, constructor, options)
    member = ENVIRONMENTS.member(name)
    members = () if member is None else (member,)
    given = {option: value for option, value in options.items() if option not in attributes}
    try:
        inspect.signature(constructor).bind(*members, **given)
    except TypeError as error:
        raise ValueError(
            f"environment {name} cannot be built: {error}; give it by --environment-options, as"
            f" '{{\"{name}\": {{...}}}}', or let the constructor have a default"
        ) from None

    def build() -> Environment:
        if not attributes:
            return constructor(*members, **options)
        environment = constructor.__new__(constructor)
        for option in attributes:
            setattr(environment, option, options.pop(option))
        environment.__init__(*members, **options)  # type: ignore[misc]
        return environment

    try:
        environment = guarded(build)
    except EnvironmentFailed as error:
        if is_refusal(error.__cause__):
            raise error.__cause__ from None
        raise ValueError(f"environment {name} cannot be built: {error}") from error
    _check_members(name, environment)
    return environment


def _copied(value: Any) -> Any:
    """Return a value in new containers, so that no two environments share one."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def _check_methods(name: str, environment: Any) -> None:
    """Raise ValueError unless an environment, or its class, has the methods of the protocol."""
    missing = [
        method for method in ("reset", "step") if not callable(getattr(environment, method, None))
    ]
    if missing:
        raise ValueError(
            f"environment {name} has no {' and no '.join(missing)}; an environment is a class with"
            " reset(seed) and step(action) (docs/environments.md)"
        )


def _check_members(name: str, environment: Any) -> None:
    """Raise ValueError unless it has the required members, and these are valid."""
    _check_methods(name, environment)
    for method, taken in (("reset", "seed"), ("step", "action")):
        _check_signature(name, method, taken, getattr(environment, method))
    for member, kind, rule in (
        ("actions", str, "names; leave them out for free text"),
        (
            "tools",
            dict,
            'JSON schemas, e.g. {"name": ..., "parameters": ...}; leave them out if there are none',
        ),
    ):
        if not hasattr(environment, member):
            continue
        values = getattr(environment, member)
        is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
        if not (
            is_sequence and values and all(isinstance(value, kind) and value for value in values)
        ):
            raise ValueError(
                f"{member} of environment {name} must be a sequence of {rule}, not {values!r:.60}"
            )
    if unread := [word for word in getattr(environment, "actions", ()) if not _can_be_read(word)]:
        raise ValueError(
            f"action {unread[0]!r} of environment {name} cannot be read from an answer: a name must"
            f" hold no {ACTION_SEPARATOR}, which stands between actions, no tag such as </answer>,"
            " and not only space; rename it"
        )
    actions = getattr(environment, "actions", ())
    spelled = Counter(unicodedata.normalize("NFC", word) for word in actions)
    if twice := [word for word, count in spelled.items() if count > 1]:
        raise ValueError(
            f"actions of environment {name} must differ in more than their encoding, and"
            f" {twice[0]!r} stands twice; rename one"
        )
    tools = getattr(environment, "tools", ())
    for tool in tools:
        function = tool.get("function", tool)
        if not (isinstance(function, dict) and function.get("name")):
            raise ValueError(
                f"every schema in tools of environment {name} must have a name, itself or under"
                f" function; {tool!r:.60} has none"
            )
    called = [str(tool.get("function", tool)["name"]) for tool in tools]
    if len({*called}) < len(called):
        raise ValueError(
            f"tools of environment {name} must have distinct names, not {', '.join(called)}; rename"
            " one"
        )
    check_tools(tools)


def _check_signature(name: str, method: str, taken: str, function: Any) -> None:
    """Raise ValueError if `function(taken)` is no call that it could answer."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # compiled, and it does not say
        return
    try:
        signature.bind(taken)
    except TypeError as error:
        remedy = "change its parameters"
        if "options" in signature.parameters:
            remedy = (
                "that is Gymnasium's: register it there and name it gymnasium:my_module:MyEnv-v0"
                " (docs/adapters.md)"
            )
        raise ValueError(
            f"{method} of environment {name} is called as {method}({taken}), and"
            f" {method}{signature} does not take that ({error}); {remedy}"
        ) from None


@lru_cache(maxsize=4096)  # names may come with every state
def _can_be_read(action: str) -> bool:
    """Return whether an answer that names this action is read as it."""
    answer = f"<answer> {action} </answer>"
    parsed = parse_response(answer, legal_actions=[action], think=False, max_actions=2)
    return parsed.actions == (action,) and not parsed.has_invalid_action


def _check_options(name: str, constructor: Any, options: dict[str, Any]) -> list[str]:
    """Raise ValueError for an unknown option or a value of the wrong type; return the options that
    are class attributes. A list becomes a tuple where the option must be one.
    """
    attributes, valid, takes_all, hints = _takes(constructor)
    unknown = sorted(set(options) - set(valid))
    if unknown and not takes_all:
        raise ValueError(
            f"environment {name} has no option {', '.join(unknown)}; its options are"
            f" {', '.join(valid) or 'none'}"
        )
    for option, value in options.items():
        hint = hints.get(option, Any)
        if isinstance(value, list) and not _has_type(value, hint) and _has_type((), hint):
            options[option] = tuple(value)  # JSON has no other sequence
        elif not _has_type(value, hint):
            kind = inspect.formatannotation(hint)
            raise ValueError(f"option {option} of environment {name} must be {kind}, not {value!r}")
    return [option for option in options if option in attributes]


@lru_cache(maxsize=256)  # every trajectory of a rollout builds an environment
def _takes(constructor: Any) -> tuple[dict[str, type], list[str], bool, dict[str, Any]]:
    """Return the options of a constructor: class attributes with their types, the names of all,
    whether it takes any other, and the types of those that declare one.
    """
    parameters = inspect.signature(constructor).parameters
    attributes = {
        attribute: type(value)
        for kind in reversed(inspect.getmro(constructor) if isinstance(constructor, type) else ())
        for attribute, value in vars(kind).items()
        if isinstance(value, (bool, int, float, str, tuple, list, dict))
        and not attribute.startswith(("_", "is_"))
        and attribute not in (*_RESERVED, *parameters)
    }
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unnamed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    valid = [p.name for p in parameters.values() if p.kind not in unnamed] + list(attributes)
    return attributes, valid, takes_all, attributes | _hints(constructor)


def _hints(constructor: Any) -> dict[str, Any]:
    """Return the annotations of the constructor; empty if they name something not imported at
    runtime.
    """
    try:
        return get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    except (NameError, TypeError):
        return {}


def _has_type(value: Any, hint: Any) -> bool:
    """Check that a value has its annotated type; an int passes as a float, a bool as neither."""
    if get_origin(hint) in (Union, UnionType):
        return any(_has_type(value, member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint in (int, float) and isinstance(value, bool):
        return False
    kind = (int, float) if hint is float else get_origin(hint) or hint
    return hint is Any or not isinstance(kind, (type, tuple)) or isinstance(value, kind)
