"""Tool calls in the text of an answer, checked against the schemas that the environment gave.

The format is that of Qwen's chat templates (the Hermes format): `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`, once or repeated. The checked keywords of JSON Schema are those
that tools use: type, enum, const, properties, required, additionalProperties, items, minimum,
maximum, anyOf, oneOf and references to $defs.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

OPEN, _CLOSE = "<tool_call>", "</tool_call>"
CALL_FORMAT = f'{OPEN} {{"name": [name], "arguments": [arguments]}} {_CLOSE}'
"""Format of a call, for a prompt."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates take it; what is None is left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": given}


class UnreadableCall(ValueError):
    """A tool call that is no JSON object with a name and arguments."""


class WrongCall(ValueError):
    """A tool call of no tool that there is, or with other arguments than its schema asks for."""


def tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the calls in an answer, as `{"name": ..., "arguments": {...}}`.

    Raises ValueError if there is none, UnreadableCall for one that is no call, and WrongCall for
    one that does not fit `tools`; the text of both tells the policy what to change.
    """
    found = [call for call, _ in _located(text, tools)]
    if not found:
        raise ValueError(f"no {OPEN} ... {_CLOSE}")
    return found


def split_calls(text: str) -> tuple[list[dict[str, Any]], str]:
    """Return the calls in an answer, which may be none, and the text around them. Raises ValueError
    for a malformed call.
    """
    found = list(_located(text, ()))
    bounds = [0, *chain.from_iterable(span for _, span in found), len(text)]
    around = [text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return [call for call, _ in found], "".join(around)


def _located(
    text: str, tools: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """Yield every call with the start and end of its block."""
    at = text.find(OPEN)
    while at >= 0:
        start = at + len(OPEN)
        start += len(text[start:]) - len(text[start:].lstrip())
        try:  # the object itself may hold the tags in a string
            call, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(f"a tool call must be a JSON object ({_brief(error)})") from None
        end += len(text[end:]) - len(text[end:].lstrip())
        if not text.startswith(_CLOSE, end):
            raise UnreadableCall(f"a tool call must end with {_CLOSE}")
        end += len(_CLOSE)
        yield _checked(call, tools), (at, end)
        at = text.find(OPEN, end)


def _checked(call: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise UnreadableCall("a tool call must be an object with name and arguments")
    if others := set(call) - {"name", "arguments"}:
        raise WrongCall(
            f"a tool call has the keys name and arguments, not {', '.join(sorted(others))}"
        )
    arguments = call.get("arguments")
    if isinstance(arguments, str):  # as OpenAI's interface sends them
        try:
            arguments = json.loads(arguments, **_STRICT)
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(f"arguments must be a JSON object ({_brief(error)})") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise UnreadableCall(f"arguments must be a JSON object, not {arguments!r:.60}")
    functions = [tool.get("function", tool) for tool in tools]
    named = {function["name"]: function for function in functions}
    if tools and call["name"] not in named:
        raise WrongCall(f"there is no tool {call['name']!r:.60}, only {', '.join(named)}")
    if tools:
        schema = {"type": "object"} | dict(named[call["name"]].get("parameters") or {})
        if problem := _problem(arguments, schema, schema.get("$defs", {}), "arguments"):
            raise WrongCall(f"tool {call['name']}: {problem}")
    return {"name": call["name"], "arguments": arguments}


def _problem(value: Any, schema: Any, parts: Mapping[str, Any], place: str) -> str | None:
    """Describe the first violation of a schema, which may refer to `parts`, by a value; None
    without one.
    """
    if schema is True or not isinstance(schema, Mapping):
        return None
    if "$ref" in schema:
        schema = parts.get(schema["$ref"].rpartition("/")[2], {})
    for choice in ("anyOf", "oneOf"):
        options = [_problem(value, each, parts, place) for each in schema.get(choice, ())]
        if options and all(options):
            return options[0]
    if "type" in schema and not _has_type(value, schema["type"]):
        return f"{place} must be of type {schema['type']}, not {value!r:.60}"
    if "const" in schema and value != schema["const"]:
        return f"{place} must be {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place} must be one of {schema['enum']}, not {value!r:.60}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
            limits = f"{schema.get('minimum', '-')} to {schema.get('maximum', '-')}"
            return f"{place} must be in {limits}, not {value}"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        inner = [(item, schema.get("items"), f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{place} lacks {', '.join(missing)}"
        unknown = [name for name in value if name not in known]
        if unknown and (others is False or (known and others is True)):
            return f"{place} has no {unknown[0]!r:.60}, only {', '.join(known) or 'nothing'}"
        inner = [(item, known.get(name, others), f"{place}.{name}") for name, item in value.items()]
    problems = (_problem(item, part, parts, where) for item, part, where in inner)
    return next(filter(None, problems), None)


def _has_type(value: Any, kind: str | Sequence[str]) -> bool:
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    return any(isinstance(value, _TYPES.get(each, (object,))) for each in kinds)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return value


_STRICT: dict[str, Any] = {
    "parse_constant": _no_constant,
    "parse_float": _finite,
    "object_pairs_hook": _distinct,
}
_DECODER = json.JSONDecoder(**_STRICT)


def _brief(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
