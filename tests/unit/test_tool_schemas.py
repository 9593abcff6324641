"""Schemas of tools, and the calls that they allow."""

import json
import random
import socket
import time
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from ragen_mega.environments.actions import read_response
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.pool import EnvironmentFailed, guarded
from ragen_mega.environments.random_player import random_call
from ragen_mega.environments.registry import make, register
from ragen_mega.environments.tool_calls import (
    UnreadableCall,
    WrongCall,
    check_tools,
    is_deep,
    tool_calls,
)
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.player import PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer
from tests.support.door import TalkingEngine, play


def tools_of(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def called(arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


A = {"a": {"type": "integer"}}
LIST = {
    "properties": {"first": {"$ref": "#/$defs/node"}},
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "rest": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "more": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
        }
    },
}


@pytest.mark.parametrize(
    ("parameters", "legal", "illegal"),
    [
        ({"properties": A, "additionalProperties": True}, {"b": [1]}, {"a": "x"}),
        ({"properties": A, "additionalProperties": {"type": "string"}}, {"b": "x"}, {"b": 1}),
        ({"properties": A, "patternProperties": {"^x-": A["a"]}}, {"x-b": 1, "c": 2}, {"x-b": "s"}),
        (
            {"patternProperties": {"^x-": {}}, "additionalProperties": False},
            {"x-b": "s"},
            {"y": 1},
        ),
        (
            {"patternProperties": {"^x-": {}}, "additionalProperties": A["a"]},
            {"x-b": "s", "y": 1},
            {"y": "s"},
        ),
        ({"properties": A}, {"a": 1.0}, {"b": 1}),
        ({"properties": A}, {"a": 10**30}, {"a": True}),
        ({"properties": {}}, {"b": 1}, None),
        ({"allOf": [{"properties": A}, {"properties": {"b": {}}}]}, {"b": 1}, {"a": "x"}),
        ({"properties": {"a": {"properties": A}}}, {"a": {"c": 1}}, {"a": {"a": "x"}}),
        ({"properties": {"a": {"minItems": 2, "uniqueItems": True}}}, {"a": [1, 2]}, {"a": [1, 1]}),
        ({"properties": {"a": {"multipleOf": 0.5}}}, {"a": 1.5}, {"a": 0.3}),
        ({"properties": {"a": {"multipleOf": 0.5}}}, {"a": 1.5}, {"a": 10**400}),
        ({"properties": {"a": {"exclusiveMaximum": 3}}}, {"a": 2}, {"a": 3}),
        ({"properties": {"a": {"not": {"const": 1}}}}, {"a": 2}, {"a": 1}),
        ({"properties": {"a": {"pattern": "^b+$"}}}, {"a": "bb"}, {"a": "c"}),
        ({"properties": {"$ref": {"type": "string"}}}, {"$ref": "x"}, {"$ref": 1}),
        ({"properties": {"a": {"const": {"$ref": "no"}}}}, {"a": {"$ref": "no"}}, {"a": 1}),
        (LIST, {"first": {"value": 1, "rest": {"value": 2, "rest": None}}}, {"first": {"rest": 1}}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": A}
            | {"properties": {"b": {"$ref": "#/definitions/a"}}},
            {"b": 1},
            {"b": "x"},
        ),
        (nested(31), {"a": {"a": {}}}, {"a": {"a": 3}}),
        (True, {"b": 1}, None),
        (None, {"b": 1}, None),
        ({"type": "object", "properties": {"a": {"enum": [*"ab"]}}}, {"a": "b"}, {"a": "c" * 9999}),
    ],
)
def test_a_call_is_legal_as_json_schema_says(parameters, legal, illegal):
    """Except that a function has the parameters alone that it names."""
    tools = tools_of(parameters)
    check_tools(tools)
    assert tool_calls(called(legal), tools) == [{"name": "f", "arguments": legal}]
    if illegal is not None:
        with pytest.raises(WrongCall, match="^tool f: ") as caught:
            tool_calls(called(illegal), tools)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "wrong",
    [called({"a": "x"}), '<tool_call>\n{"name": "f", "arg', '<tool_call>{"name": "f", "id": 1}'],
)
@pytest.mark.parametrize("has_parser", [False, True])
def test_calls_behind_the_most_that_a_turn_may_have_are_not_read(wrong, has_parser):
    """However the rest goes on: it may be cut off, and a parser of the world's own may read it."""
    tools = tools_of({"properties": A})
    world = SimpleNamespace(tools=tools)
    if has_parser:
        world.parse = lambda text: tool_calls(text, tools)
    right = called({"a": 1})
    read = read_response(world, f"{right * 5} {wrong}", think=False, max_actions=5)
    assert len(read.actions) == 5 and read.is_format_valid and not read.has_invalid_action
    read = read_response(world, f"{right * 4} {wrong}", think=False, max_actions=5)
    assert not read.actions and (read.has_invalid_action or not read.is_format_valid)


LOOPS = [
    {"$ref": "#"},
    {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
    {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"allOf": [{"$ref": "#/$defs/x"}]}}}
    | {"properties": {"a": {"$ref": "#/$defs/x"}}},
]
REFUSED = [
    (nested(33), "nested more than 64 deep"),
    (nested(500), "nested more than 64 deep"),
    *((loop, "refers to itself without end") for loop in LOOPS),
    ({"properties": {"a": {"$ref": "#/no"}}}, "does not hold '/no'"),
    ({"type": "whole"}, r"\$\.type of it is none"),
    ({"properties": {"a": {"pattern": "("}}}, "is not a 'regex'"),
    ({"patternProperties": {"(": {}}}, "is not a 'regex'"),
    ({"default": float("nan")}, "NaN is no JSON"),
    ({"default": object()}, "it is no JSON"),
    ([1], "of it is none"),
]


NUMBERS = count()


@pytest.mark.parametrize(("parameters", "said"), REFUSED, ids=range(len(REFUSED)))
def test_a_schema_that_cannot_be_used_is_one_line(parameters, said):
    """At the start of a run, and in a request of an agent; in an episode it costs this one."""
    with pytest.raises(ValueError, match=f"^parameters of tool f must .*{said}") as caught:
        check_tools(tools_of(parameters))
    assert "\n" not in str(caught.value)

    class World:
        tools = tools_of({})

        def reset(self, seed):
            self.tools = self.tools if seed < 0 else tools_of(parameters)
            return "go"

        def step(self, call):
            return "done", 0.0, False, False, {}

    with pytest.raises(EnvironmentFailed, match=f"RuntimeError: arguments .*{said}"):
        world = World()
        episode = Episode(world, EpisodeConfig(think=False))
        episode.start(0)
        guarded(lambda: episode.respond(called({"a": 1})))
    name = f"refused{next(NUMBERS)}"
    register(name, type("Early", (World,), {"tools": tools_of(parameters)}))
    with pytest.raises(ValueError, match=said):
        make(name)


def test_a_remote_reference_is_never_fetched():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        parameters = {"properties": {"a": {"$ref": url}}}
        with pytest.raises(ValueError, match="does not hold 'http://127"):
            check_tools(tools_of(parameters))
        with pytest.raises(RuntimeError, match="does not hold"):
            tool_calls(called({"a": 1}), tools_of(parameters))
        with pytest.raises(TimeoutError):
            listener.accept()


def chained(length: int) -> dict[str, Any]:
    """Definitions that each refer twice to the next: 2 ** length paths lead to the last."""
    chain: dict[str, Any] = {"0": True}
    for step in range(length):
        chain[str(step + 1)] = {"allOf": [{"$ref": f"#/$defs/{step}"}] * 2}
    return {"$defs": chain, "properties": {"a": {"$ref": f"#/$defs/{length}"}}}


def alternatives(levels: int) -> dict[str, Any]:
    """Levels without a reference, each of which asks the next again what it has evaluated."""
    schema: dict[str, Any] = {"properties": A}
    for _ in range(levels):
        schema = {"anyOf": [schema], "unevaluatedProperties": False}
    return schema


REF = {"$ref": "#/$defs/expression"}
GROUP = {"properties": {"items": {"type": "array", "items": REF}}, "required": ["op", "items"]}
FILTER = {
    "properties": {"filter": REF},
    "$defs": {
        "expression": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("and", "or", "leaf")]},
        "and": GROUP | {"properties": {"op": {"const": "and"}} | GROUP["properties"]},
        "or": GROUP | {"properties": {"op": {"const": "or"}} | GROUP["properties"]},
        "leaf": {"properties": {"field": {"type": "string"}}, "required": ["field"]},
    },
}
"""A union of types that contain it, as pydantic writes it."""


def filtered(depth: int, field: Any = "x") -> dict[str, Any]:
    expression = {"field": field}
    for _ in range(depth):
        expression = {"op": "or", "items": [expression]}
    return {"filter": expression}


@pytest.mark.parametrize(
    ("parameters", "arguments"), [(FILTER, filtered(30)), (alternatives(30), {"a": 1})]
)
def test_a_call_whose_check_would_take_years_is_wrong(parameters, arguments):
    """2 ** 30 parts of the schema or more, of which each takes microseconds."""
    with pytest.raises(WrongCall, match="takes too long to check the arguments"):
        tool_calls(called(arguments), tools_of(parameters))


def test_a_schema_whose_references_would_take_years_is_refused():
    with pytest.raises(ValueError, match=r"lead to more than 50,000 parts of it; mend the schema"):
        check_tools(tools_of(chained(30)))
    check_tools(tools_of(chained(3)))


def test_large_schemas_and_calls_with_many_references_are_checked_to_their_end():
    for depth in (0, 3, 7):
        assert tool_calls(called(filtered(depth)), tools_of(FILTER))
        with pytest.raises(WrongCall, match="^tool f: arguments.filter"):
            tool_calls(called(filtered(depth, 3)), tools_of(FILTER))
    names = [f"p{number}" for number in range(300)]
    row = {"type": "object", "properties": {"a": {"$ref": "#/$defs/whole"}}}
    parameters = {
        "properties": {name: {"type": "array", "items": {"$ref": "#/$defs/row"}} for name in names},
        "$defs": {"row": row, "whole": {"type": "integer"}},
    }
    tools, rows = tools_of(parameters), {name: [{"a": 1}, {"a": 2}] for name in names}
    check_tools(tools)
    assert tool_calls(called(rows), tools)
    rows["p299"][1]["a"] = "x"
    with pytest.raises(WrongCall, match=r"arguments.p299\[1\].a: 'x' is not of type 'integer'"):
        tool_calls(called(rows), tools)


@pytest.mark.parametrize("place", ["pattern", "patternProperties", "$schema"])
def test_a_pattern_that_would_take_years_costs_the_policy_its_call(place):
    """`regex` finds one of them at once, and `re` none: both answers are a wrong call."""
    for expression, text in product(["^(a|a)*$", "^(a+)+$", r"^((\w+)\s?)+$"], ["a" * 60 + "!"]):
        parameters: dict[str, Any] = {"properties": {"a": {"pattern": expression}}}
        arguments: dict[str, Any] = {"a": text}
        if place == "patternProperties":
            parameters = {"patternProperties": {expression: {}}, "additionalProperties": False}
            arguments = {text: 1}
        if place == "$schema":
            parameters["properties"]["a"][place] = "http://json-schema.org/draft-07/schema#"
        tools = tools_of(parameters)
        check_tools(tools)
        began = time.thread_time()
        with pytest.raises(WrongCall, match="takes too long|does not match|was unexpected"):
            tool_calls(called(arguments), tools)
        assert time.thread_time() - began < 60, "years"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (r'{"name": "f", "arguments": {"a": "\ud83d"}}', "half a character"),
        (r'{"name": "f", "arguments": {"\udc00": 1}}', "half a character"),
        (r'{"name": "f\ud83d"}', "half a character"),
        (r'{"name": "f", "arguments": "{\"a\": \"\\ud83d\"}"}', "half a character"),
        (f'{{"name": "f", "arguments": {{"a": {"1" * 5000}}}}}', "Exceeds the limit"),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 70 + "]" * 70}}}}}', "nested too deeply"),
        ('{"name": "f", "arguments": {"a":' * 9000, "nested too deeply|Expecting"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity is no JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "no finite number"),
        ('{"name": "f", "name": "f"}', "twice"),
        (r'{"name": "f", "arguments": "\"{}\""}', "must be a JSON object, not '{}'"),
        (r'{"name": "f", "arguments": "{} {}"}', "nothing else"),
        ("", "must be a JSON object"),
        ("<tool_call>" * 50_000, "must be a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "f"} and', "must end with </tool_call>"),
        ('{"name": "f", "arguments": 3}', "must be a JSON object, not 3"),
        ("{}", "name and arguments"),
        ('{"name": ["f"]}', "name and arguments"),
        ('"f"', "name and arguments"),
        ('[{"name": "f"}]', "name and arguments"),
    ],
)
def test_a_call_that_cannot_be_read_costs_the_policy(call, said):
    with pytest.raises(UnreadableCall, match=said) as caught:
        tool_calls(f"<tool_call>{call}</tool_call>", tools_of(True))
    assert len(str(caught.value)) < 200 and str(caught.value).isascii()

    class World:
        tools = tools_of({})

        def reset(self, seed):
            return [("user", "go")]

        def step(self, call):
            raise AssertionError("nothing is executed")

    episode = Episode(World(), EpisodeConfig(think=False))
    episode.start(0)
    result = episode.respond(f"<tool_call>{call}</tool_call>")
    assert result.reward < 0 and not result.info["is_format_valid"] and result.messages


def test_odd_values_that_json_has_are_legal():
    values = ["\0", "\U0001f600", 1e-320, -0.0, 10**300, "\ufeff", "\u2028", [[[]]]]
    text = json.dumps({"name": "f", "arguments": {"a": values}})
    assert tool_calls(f"<tool_call>{text}</tool_call>", tools_of({}))[0]["arguments"]["a"] == values


def test_a_random_player_ends_in_recursive_schemas():
    tools = tools_of(LIST | {"required": ["first"], "type": "object"})
    for seed in range(50):
        call = random_call(tools, ["word"], random.Random(seed))
        assert not is_deep(call["arguments"])
        assert tool_calls(f"<tool_call>{json.dumps(call)}</tool_call>", tools) == [call]


@pytest.mark.parametrize(
    "wanted",
    [
        {"$ref": "#/definitions/a"},
        {"$ref": "#/properties/given"},
        {"$ref": "#/definitions/a~1b"},
        {"$ref": "#/definitions/a", "exclusiveMaximum": 90},
        {"allOf": [{"type": "integer", "minimum": 70}, {"maximum": 80, "minimum": 60}]},
        {"allOf": [{"$ref": "#/definitions/a"}, {"not": {"const": 0}}]},
        {"type": "object", "properties": {"x": {}}, "anyOf": [{"required": ["x"]}, True]},
        {
            "type": "object",
            "required": ["x"],
            "allOf": [{"properties": {"x": {}}}, {"required": []}],
        },
        {"type": "number", "exclusiveMinimum": 100},
        {"type": "integer", "exclusiveMinimum": 100},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "exclusiveMaximum": 0},
        {"type": "number", "exclusiveMaximum": 0, "maximum": 5},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    ],
)
def test_the_calls_of_a_random_player_are_legal(wanted):
    definitions = {"a": {"type": "integer", "minimum": 50}, "a/b": {"type": "boolean"}}
    given = {"type": "array", "items": {"type": "null"}, "minItems": 3}
    tools = tools_of({"definitions": definitions, "properties": {"given": given, "wanted": wanted}})
    check_tools(tools)
    for seed in range(20):
        call = random_call(tools, ["word"], random.Random(seed))
        assert tool_calls(f"<tool_call>{json.dumps(call)}</tool_call>", tools) == [call]


def test_a_random_player_takes_schemas_that_say_yes_or_no():
    odd = {"properties": {"a": True, "b": {"type": "array", "items": False}}}
    assert random_call(tools_of(odd), ["word"], random.Random(0))["arguments"]["a"] == "word"
    assert random_call(tools_of(None), ["word"], random.Random(0))["arguments"] == {}


class Growing:
    """Whose tools are too deep for a template in every other episode."""

    def __init__(self, number):
        self.tools = tools_of(nested(500) if number % 2 else {"type": "object"})

    def reset(self, seed):
        return [("user", "go")]

    def step(self, call):
        return [("tool", "done")], 1.0, True, False, {}


def test_schemas_too_deep_for_a_template_cost_one_episode():
    renderer = ChatRenderer(train_tokenizer([]), think=False)
    engine = TalkingEngine(lambda text: '<tool_call>{"name": "f", "arguments": {}}</tool_call>')

    def episode(number: int) -> Episode:
        return Episode(Growing(number), EpisodeConfig(think=False))

    tasks = [
        Task(number, "growing", number, 0, None, partial(episode, number)) for number in range(4)
    ]
    played = collect(
        engine, renderer, tasks, PlaySettings(max_context_length=4000, temperature=1.0, seed=0)
    )
    by_seed = {t.seed: t for group in played for t in group.trajectories}
    for seed, trajectory in by_seed.items():
        info = trajectory.turns[-1].info
        assert ("nested too deeply" in info.get("error", "")) == bool(seed % 2), info
        assert trajectory.success == (seed % 2 == 0)


def test_an_agents_deep_schema_is_a_refused_request():
    errors = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        for parameters in (nested(33), nested(400), {"$ref": "#"}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "go"}],
                    tools=tools_of(parameters),
                )
            errors.append(caught.value)
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "go"}], tools=tools_of(nested(20))
        )
        return 1.0

    (trajectory,) = play(run)
    assert "error" not in trajectory.turns[-1].info and len(errors) == 3
    for error in errors:
        assert "\n" not in error.body["message"] and len(error.body["message"]) < 250
