"""The answers of a random player, in every form that an environment may ask for."""

import json
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from ragen_mega.environments.actions import ACTION_SEPARATOR
from ragen_mega.environments.episode import Episode
from ragen_mega.environments.protocol import Action, Observation, actions_of, text_of
from ragen_mega.environments.tool_calls import DEEPEST

_LookUp = Callable[[str], Any]
_WORD = re.compile(r"\w+")
_RANGE = (0, 9)  # bounds of a number whose schema has none
_DEEP = 12
"""Schemas around one that is left out where this is allowed."""
_BOTH: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), min),
    **{"properties": operator.or_, "required": operator.add},
}
"""Keyword of a schema -> what two of its values demand together."""


def is_drawn(episode: Episode) -> bool:
    """Return whether the possible answers are known, so that a uniform draw is meaningful."""
    return episode.takes_names or bool(
        episode.tools or hasattr(episode.environment, "random_answer")
    )


def random_steps(episode: Episode, generator: np.random.Generator) -> list[Action]:
    """Return the step for `write_answer`: the name of an action, of which a state may have none;
    else what the environment's `random_answer` draws, else a tool call with arguments drawn from
    its schema, else a word of the observation.
    """
    environment = episode.environment
    if episode.takes_names:  # without actions a turn passes
        names = actions_of(environment)
        return [str(generator.choice(names))] if len(names) else []
    draw = random.Random(int(generator.integers(2**62)))
    if hasattr(environment, "random_answer"):
        return [environment.random_answer(draw)]
    words = words_of(episode.observation)
    return [random_call(episode.tools, words, draw) if episode.tools else draw.choice(words)]


def write_answer(episode: Episode, steps: Sequence[Action]) -> str:
    """Return the answer that the environment reads as these steps; free text is a single step."""
    if episode.takes_names:
        return f"<answer> {f' {ACTION_SEPARATOR} '.join(map(str, steps))}</answer>"
    if any(isinstance(step, Mapping) for step in steps):
        return "\n".join(f"<tool_call>\n{json.dumps(step)}\n</tool_call>" for step in steps)
    is_bare = episode.tools or hasattr(episode.environment, "parse")
    return str(steps[0]) if is_bare else f"<answer> {steps[0]}</answer>"


def words_of(observation: Observation) -> list[str]:
    """Return the words of an observation, at least an empty one."""
    return _WORD.findall(text_of(observation)) or [""]


def random_call(
    tools: Sequence[Mapping[str, Any]], words: Sequence[str], draw: random.Random
) -> dict[str, Any]:
    """Return a call of any of the tools, with arguments drawn from its schema or the words."""
    tool = draw.choice(list(tools))
    function = tool.get("function", tool)  # the schema itself, or as OpenAI wraps it
    parameters = (function.get("parameters") or {}) | {"type": "object"}
    root = DRAFT202012.detect(parameters).create_resource(parameters)
    look_up = Registry().resolver_with_root(root).lookup
    return {
        "name": function["name"],
        "arguments": _random_value(parameters, look_up, words, draw, 0),
    }


def _merged(schema: Mapping[str, Any], look_up: _LookUp, draw: random.Random) -> dict[str, Any]:
    """Return one schema of all that this one asks for at once, with a choice made where it leaves
    one.
    """
    parts = [look_up(schema["$ref"]).contents] if "$ref" in schema else []
    parts += schema.get("allOf", [])
    parts += [draw.choice(schema[each]) for each in ("anyOf", "oneOf") if each in schema]
    merged = {key: schema[key] for key in schema if key not in ("$ref", "allOf", "anyOf", "oneOf")}
    for part in parts:
        for key, value in _merged(part, look_up, draw).items() if isinstance(part, Mapping) else ():
            both = _BOTH.get(key, lambda _, last: last)
            merged[key] = both(merged[key], value) if key in merged else value
    return merged


def _random_value(
    schema: Any, look_up: _LookUp, words: Sequence[str], draw: random.Random, depth: int
) -> Any:
    """Return a value that fits a JSON schema; where the schema leaves it open, a word. `look_up`:
    finds what it refers to. `depth`: number of schemas around it, which bounds recursive ones.
    """
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return draw.choice(list(words))
    depth += 1
    schema = _merged(schema, look_up, draw)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = draw.choice(kind)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if kind == "null":
        return None
    if kind == "boolean":
        return draw.random() < 0.5
    if kind in ("integer", "number"):
        for bound, beyond in (("minimum", math.inf), ("maximum", -math.inf)):
            if (limit := schema.get(f"exclusive{bound.title()}")) is not None:
                inside = math.nextafter(limit, beyond)
                schema[bound] = _BOTH[bound](inside, schema.get(bound, inside))
        low = schema.get("minimum", min(_RANGE[0], math.floor(schema.get("maximum", _RANGE[0]))))
        high = schema.get("maximum", max(_RANGE[1], math.ceil(low)))
        if kind == "number":
            return draw.uniform(low, high)
        return draw.randint(math.ceil(low), math.floor(high))
    if kind == "array":
        items, least = schema.get("items", {}), schema.get("minItems", 0)
        num_items = max(least, 1) if depth < _DEEP else least
        return [_random_value(items, look_up, words, draw, depth) for _ in range(num_items)]
    if kind == "object":
        needed = schema.get("required", ())
        return {
            name: _random_value(part, look_up, words, draw, depth)
            for name, part in schema.get("properties", {}).items()
            if depth < _DEEP or name in needed
        }
    return draw.choice(list(words))
