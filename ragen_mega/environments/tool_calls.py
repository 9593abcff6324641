"""Tool calls in the text of an answer, checked against the schemas that the environment gave.

Environments read the form of Qwen's chat templates (the Hermes format): `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`, once or repeated. A chat template may write calls as JSON objects
with other keys or other text around them; a renderer translates between the two forms.
"""

import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, islice
from typing import Any

import attrs
import regex
from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from ragen_mega.system.json_lines import distinct

OPEN, _CLOSE = "<tool_call>", "</tool_call>"
DEEPEST = 64
"""Most objects and lists within one another, in schemas of tools and in calls."""
_SECONDS_TO_MATCH = 0.2
"""Time of one regular expression of a schema: some take years for a text of forty characters."""
_MOST_PARTS = 50_000
"""Parts of a schema in one check, half a second: alternatives that refer to themselves double the
work with each level of a call. A count, since the same call is right or wrong on every machine.
"""
_LONGEST_PROBLEM = 200  # characters
_HALF = re.compile("[\ud800-\udfff]")


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates take it; what is None is left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": given}


class UnreadableCall(ValueError):
    """A tool call that is no JSON object with a name and arguments."""


class WrongCall(ValueError):
    """A tool call of no tool that there is, or with other arguments than its schema asks for."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls as a chat template writes them: JSON objects with a name and arguments."""

    open: str
    """Text before the first call; empty if a call is a whole answer."""
    close: str
    """Text behind the last call."""
    between: str | None
    """Text between two calls; None if a message has one call at most."""
    pieces: tuple[str, str, str]
    """Text of an object before the name, between name and arguments, and behind them."""
    name_key: str = "name"
    arguments_key: str = "arguments"

    @property
    def described(self) -> str:
        """Format of a call, for a prompt."""
        before, middle, behind = self.pieces
        call = f"{before[:-1]}[name]{middle[1:]}[arguments]{behind}"
        return f"{self.open.strip()} {call} {self.close.strip()}".strip()

    def write(self, *calls: str) -> str:
        """Return the text of calls, given as name, arguments, name, arguments and so on, the
        arguments as JSON text. Raises ValueError for more calls than a message may have.
        """
        objects = []
        for name, arguments in zip(calls[::2], calls[1::2], strict=True):
            before, middle, behind = self.pieces
            objects.append(f"{before}{_letters(name)[1:-1]}{middle}{arguments}{behind}")
        if self.between is None and len(objects) > 1:
            raise ValueError(
                f"the chat template writes one call of a tool in a message, and not {len(objects)};"
                " call one tool at a time"
            )
        return f"{self.open}{(self.between or '').join(objects)}{self.close}"

    @property
    def _separator(self) -> str:
        """Text between the calls of a block; empty if each call has its own block."""
        separator, closing = (self.between or "").strip(), self.close.strip()
        return "" if closing and separator.startswith(closing) else separator

    def is_begun(self, text: str) -> bool:
        """Return whether a call begins in a text, however it goes on."""
        opening = self.open.strip()
        if opening:
            return opening in text
        return text.lstrip().startswith("{") and f'"{self.name_key}"' in text

    def split(self, text: str) -> tuple[list[dict[str, Any]], str]:
        """Return the calls in an answer, which may be none, and the text around them. Raises
        UnreadableCall for one that is no call.
        """
        blocks = list(self._blocks(text))
        bounds = [0, *chain.from_iterable(span for _, span in blocks), len(text)]
        around = [text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
        return [call for calls, _ in blocks for call in calls], "".join(around)

    def _blocks(self, text: str) -> Iterator[tuple[list[dict[str, Any]], tuple[int, int]]]:
        """Yield the calls of every block, with its start and end."""
        opening, closing = self.open.strip(), self.close.strip()
        at = text.find(opening) if opening else _skipped(text, 0)
        if not self.is_begun(text):
            return
        while at >= 0:
            calls, end = [], at + len(opening)
            while True:
                call, end = _object(text, _skipped(text, end))
                calls.append(self._read(call))
                end = _skipped(text, end)
                if not self._separator or not text.startswith(self._separator, end):
                    break
                end += len(self._separator)
            if not text.startswith(closing, end) or (not opening and end < len(text)):
                end_of_it = closing or "the answer"
                raise UnreadableCall(f"right after its JSON a tool call must end with {end_of_it}")
            end += len(closing)
            yield calls, (at, end)
            at = text.find(opening, end) if opening else -1

    def _read(self, call: Any) -> dict[str, Any]:
        for own, key in ((self.name_key, "name"), (self.arguments_key, "arguments")):
            if isinstance(call, dict) and own in call and key not in call:
                call[key] = call.pop(own)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise UnreadableCall("a tool call must be an object with name and arguments")
        if others := call.keys() - {"name", "arguments"}:
            raise WrongCall(
                "a tool call has the keys name and arguments, not"
                f" {', '.join(sorted(others)):.{_LONGEST_PROBLEM}}"
            )
        arguments = call.get("arguments")
        if isinstance(arguments, str):  # as OpenAI's interface sends them
            arguments, end = _object(arguments, _skipped(arguments, 0), what="arguments")
            if end < len(call["arguments"].rstrip()):
                raise UnreadableCall("arguments must be a JSON object and nothing else")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise UnreadableCall(f"arguments must be a JSON object, not {arguments!r:.60}")
        return {"name": call["name"], "arguments": arguments}

    def from_hermes(self, text: str) -> str:
        """Return an answer with its calls in this form. Raises ValueError as `write` does."""
        if self == HERMES or OPEN not in text:
            return text
        try:
            calls, around = HERMES.split(text)
        except ValueError:  # a malformed call is text
            return text
        texts = [each for call in calls for each in (call["name"], _letters(call["arguments"]))]
        return "\n".join([*filter(None, [around.strip()]), self.write(*texts)])

    def to_hermes(self, text: str) -> str:
        """Return an answer with its calls as environments read them; a malformed one stays so."""
        head, end, said = text.partition("</think>") if "</think>" in text else ("", "", text)
        if self == HERMES or not self.is_begun(said):
            return text
        try:
            calls, around = self.split(said)
        except ValueError:
            at = said.find(self.open.strip())
            said = f"{said[:at]}{OPEN}{said[at + len(self.open.strip()) :]}"
        else:
            written = [HERMES.write(c["name"], _letters(c["arguments"])) for c in calls]
            said = "\n".join([*filter(None, [around.strip()]), *written])
        return f"{head}{end}{said}"


HERMES = CallForm(
    open=f"{OPEN}\n",
    close=f"\n{_CLOSE}",
    between=f"\n{_CLOSE}\n{OPEN}\n",
    pieces=('{"name": "', '", "arguments": ', "}"),
)
"""Calls as environments read them, and as Qwen's chat templates write them."""
CALL_FORMAT = HERMES.described
"""Format of a call, for a prompt; a renderer puts the format of its chat template there."""


def first_calls(text: str, count: int) -> str:
    """Return an answer up to the end of its `count`-th call; whole where there are not so many that
    can be read.
    """
    with suppress(ValueError):
        for _, (_, end) in islice(HERMES._blocks(text), count - 1, count):
            return text[:end]
    return text


def tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the calls in an answer, as `{"name": ..., "arguments": {...}}`.

    Raises ValueError if there is none, UnreadableCall for one that is no call, and WrongCall for
    one that does not fit `tools`; the text of both tells the policy what to change. Raises
    RuntimeError for a schema against which nothing can be checked.
    """
    found, _ = HERMES.split(text)
    if not found:
        raise ValueError("the answer calls no tool, and it must")
    functions = [tool.get("function", tool) for tool in tools]
    named = {function["name"]: function.get("parameters") for function in functions}
    for call in found if tools else ():
        if call["name"] not in named:
            known = ", ".join(named)
            raise WrongCall(
                f"there is no tool {call['name']!r:.60}, only {known:.{_LONGEST_PROBLEM}}"
            )
        if problem := _problem(call["arguments"], named[call["name"]]):
            raise WrongCall(f"tool {call['name']}: {problem}")
    return found


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError, in one line, for a tool whose parameters are no JSON schema, or one that
    refers to itself without end or to what it does not hold: nothing is fetched.
    """
    for tool in tools:
        function = tool.get("function", tool)
        if problem := _schema_problem(function.get("parameters")):
            raise ValueError(
                f"parameters of tool {function['name']!s:.60} must be a JSON schema against which"
                f" arguments can be checked, and {problem}; mend the schema"
            )


def is_deep(value: Any) -> bool:
    """Return whether objects and lists are more than `DEEPEST` within one another."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (Mapping, list, tuple))
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
    return bool(level)


def _schema_problem(schema: Any) -> str | None:
    """Describe why a schema cannot be used; None if it can."""
    if is_deep(schema):
        return f"it is nested more than {DEEPEST} deep"
    try:
        return _problem_of_text(_letters({} if schema is None else schema))
    except (TypeError, ValueError) as error:
        return f"it is no JSON ({error!s:.{_LONGEST_PROBLEM}})"


@lru_cache(maxsize=1024)
def _problem_of_text(text: str) -> str | None:
    try:
        schema = json.loads(text, parse_constant=no_constant)
        validators.validator_for(schema, Draft202012Validator).check_schema(schema)
        validator = _validator(text)
        _LEFT.parts = _MOST_PARTS
        for part in _parts(schema):
            with suppress(ValidationError):
                for pattern in (part.get("pattern", ""), *part.get("patternProperties", ())):
                    regex.compile(pattern)
            if "$ref" in part or "$dynamicRef" in part:
                [*validator.evolve(schema=part).iter_errors(None)]
    except SchemaError as error:
        return f"{error.json_path:.60} of it is none ({error.message:.{_LONGEST_PROBLEM}})"
    except regex.error as error:
        return f"a pattern is no regular expression ({error})"
    except RecursionError:
        return "it refers to itself without end"
    except TimeoutError:
        return f"its references lead to more than {_MOST_PARTS:,} parts of it"
    except Unresolvable as error:
        return f"it does not hold {error.ref!r:.60}, to which it refers"
    return None


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a schema besides values that it lists."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref", ""), str):
            yield schema
        listed = ("const", "enum", "default", "examples")
        schema = [value for key, value in schema.items() if key not in listed]
    for part in schema if isinstance(schema, list) else ():
        yield from _parts(part)


def _problem(arguments: dict[str, Any], schema: Any) -> str | None:
    """Describe how arguments violate a schema; None if they do not. Raises RuntimeError for a
    schema against which they cannot be checked.
    """
    if problem := _schema_problem(schema):
        raise RuntimeError(f"arguments of a tool cannot be checked: {problem} (its schema)")
    _LEFT.parts = _MOST_PARTS
    try:
        error = best_match(_validator(_letters(schema or {})).iter_errors(arguments))
    except TimeoutError:
        return "it takes too long to check the arguments; write others, shorter or less nested"
    except OverflowError:
        return "a number in the arguments is too large"
    except RecursionError as error:
        raise RuntimeError("the schema of a tool refers to itself without end") from error
    if error is None:
        return None
    place = "arguments" + error.json_path.removeprefix("$")
    message = error.message
    if len(message) > _LONGEST_PROBLEM:
        message = f"{message[: _LONGEST_PROBLEM // 2]} ... {message[-_LONGEST_PROBLEM // 2 :]}"
    return f"{place:.{_LONGEST_PROBLEM}}: {message}"


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    """Return the validator of a function's arguments, whose schema is given as JSON text."""
    schema = json.loads(text)
    if isinstance(schema, dict):
        schema = {"type": "object", **schema}
        # A function has the parameters that it names, unless the schema says otherwise.
        if schema.get("properties") and not schema.keys() & _OPENING:
            schema["additionalProperties"] = False
    kind = validators.validator_for(schema, Draft202012Validator)
    return _bounded(kind)(schema, registry=Registry())


_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf"}
_OPENING |= {"anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef"}


@cache
def _bounded(kind: Any) -> Any:
    """Return a class of validators whose regular expressions have a limit of time, and whose checks
    have a limit of parts. Both raise TimeoutError.
    """

    def evolve(validator: Any, **changes: Any) -> Any:
        """Return the validator of a part; the library's own is of another class at a `$schema`."""
        _LEFT.parts -= 1
        if _LEFT.parts < 0:
            raise TimeoutError
        return attrs.evolve(validator, **changes)

    def pattern(validator: Any, expression: str, value: Any, schema: Any) -> Iterator[Any]:
        if isinstance(value, str) and not _matches(expression, value):
            yield ValidationError(f"{value!r} does not match {expression!r}")

    def patterns(validator: Any, parts: Any, value: Any, schema: Any) -> Iterator[Any]:
        for expression, part in parts.items():
            for name in value if isinstance(value, dict) else ():
                if _matches(expression, name):
                    yield from validator.descend(
                        value[name], part, path=name, schema_path=expression
                    )

    def additional(validator: Any, part: Any, value: Any, schema: Any) -> Iterator[Any]:
        known = schema.get("patternProperties", ())
        if isinstance(value, dict):  # the library's own, of what no pattern takes
            rest = {n: v for n, v in value.items() if not any(_matches(e, n) for e in known)}
            without = {key: own for key, own in schema.items() if key != "patternProperties"}
            yield from kind.VALIDATORS["additionalProperties"](validator, part, rest, without)

    keywords = {"pattern": pattern, "patternProperties": patterns}
    bounded = validators.extend(kind, keywords | {"additionalProperties": additional})
    bounded.evolve = evolve
    return bounded


_LEFT = threading.local()
"""Parts of a schema that the check of this thread may still enter."""


def _matches(expression: str, text: str) -> bool:
    return regex.search(expression, text, timeout=_SECONDS_TO_MATCH) is not None


def _object(text: str, start: int, what: str = "a tool call") -> tuple[Any, int]:
    """Return the JSON value at a place of a text, and its end. Raises UnreadableCall."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if is_deep(value):
            raise RecursionError
    except RecursionError:
        raise UnreadableCall(f"{what} must be a JSON object (nested too deeply)") from None
    except ValueError as error:
        raise UnreadableCall(f"{what} must be a JSON object ({error!s:.80})") from None
    if _HALF.search(_letters(value)):
        raise UnreadableCall(f"{what} must be valid Unicode, and holds half a character")
    return value, end


def _skipped(text: str, start: int) -> int:
    """Return the place behind white space."""
    found = _SPACE.match(text, start)
    assert found is not None  # no space is a match too
    return found.end()


_SPACE = re.compile(r"\s*")


def _letters(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def no_constant(name: str) -> Any:
    """Refuse a number that JSON does not have, such as NaN."""
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return value


_DECODER = json.JSONDecoder(
    parse_constant=no_constant, parse_float=_finite, object_pairs_hook=distinct
)
