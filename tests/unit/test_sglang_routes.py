"""The experts in answers of SGLang: read as SGLang's own function reads them, and refused in one
line where they cannot belong to a mixture.
"""

import ast
import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragen_mega.data.fields import ROUTES, TOKEN_FIELDS, add_routes
from ragen_mega.data.types import Completion, SamplingParams, Trajectory
from ragen_mega.engines.sglang.requests import request_body
from ragen_mega.engines.sglang.routes import with_routes
from tests.support.sglang_server import PYTHON, needs_sglang

LAYERS, CHOSEN, EXPERTS = 2, 3, 128
SHAPE: Any = SimpleNamespace(num_layers=LAYERS, experts_per_token=CHOSEN, num_experts=EXPERTS)


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, ROUTES, None)  # there is none afterwards
    add_routes(LAYERS, CHOSEN, EXPERTS)


def random_routes(num_tokens: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    scores = generator.random((num_tokens, LAYERS, EXPERTS))
    return scores.argsort(-1)[..., :CHOSEN].astype(np.int32)


def answered(routes: np.ndarray) -> dict[str, Any]:
    return {"routed_experts": base64.b64encode(routes.tobytes()).decode()}


def test_a_trajectory_of_three_turns_has_the_routes_of_all_tokens() -> None:
    """Every answer begins with the last token of the one before it."""
    everything = random_routes(20)
    trajectory = Trajectory(0)
    num_recorded = 0
    for end_of_prompt, end in ((5, 9), (12, 13), (17, 20)):
        trajectory.append_observation([7] * (end_of_prompt - len(trajectory)))
        sampling = SamplingParams(9, num_recorded=num_recorded)
        body = request_body(list(trajectory.tokens), sampling, max_tokens=9, asks_routes=True)
        assert body["return_routed_experts"]
        start = body["routed_experts_start_len"]
        sampled = [8] * (end - end_of_prompt)
        completion = Completion(sampled, [-1.0] * len(sampled), "stop")
        about = answered(everything[start : end - 1])
        num_unknown = end_of_prompt - num_recorded
        trajectory.append_action(with_routes(completion, about, SHAPE, num_unknown=num_unknown))
        num_recorded = end - 1
    found = np.asarray(trajectory.further_fields[ROUTES])
    assert np.array_equal(found[:-1], everything[:-1])
    assert np.array_equal(found[-1:], TOKEN_FIELDS[ROUTES].defaults(1))
    assert "return_routed_experts" not in request_body([1], sampling, max_tokens=1)


def spoiled(token: int, layer: int, experts: list[int]) -> np.ndarray:
    routes = random_routes(6)
    routes[token, layer] = experts
    return routes


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({}, "0 experts for 6 tokens of 2 layers with 3"),
        ({"routed_experts": None}, "0 experts for 6 tokens"),
        (answered(random_routes(5)), "30 experts for 6 tokens"),
        (answered(random_routes(6)[..., :2]), "24 experts for 6 tokens"),
        (answered(spoiled(4, 1, [5, 128, 6])), r"\[5, 128, 6\] .* layer 1"),
        (answered(spoiled(5, 0, [5, -1, 6])), r"\[5, -1, 6\] .* layer 0"),
        (answered(spoiled(0, 1, [5, 6, 5])), r"\[5, 6, 5\] .* distinct"),
        (answered(np.zeros((6, LAYERS, CHOSEN), np.int32)), r"\[0, 0, 0\] .* distinct"),
    ],
)
def test_routes_that_cannot_be(about: dict[str, Any], said: str) -> None:
    completion = Completion([1, 2, 3], [-1.0] * 3, "stop")
    with pytest.raises(RuntimeError, match=said) as caught:
        with_routes(completion, about, SHAPE, num_unknown=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("_", [pytest.param(None, marks=needs_sglang)])
def test_their_own_function_reads_the_same(_: None) -> None:
    """The real function, without its module, which takes half a minute to import."""
    (module,) = (
        Path(PYTHON)
        .parents[1]
        .glob("lib/python3*/site-packages/sglang/srt/state_capturer/routed_experts.py")
    )
    name = "extract_routed_experts_from_meta_info"
    (function,) = (
        node
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    known: dict[str, Any] = {"np": np, "pybase64": base64}
    exec(compile(ast.Module([function], []), str(module), "exec"), known)
    about = answered(random_routes(6))
    theirs = known[name]({"meta_info": about}).reshape(-1, LAYERS, CHOSEN)
    completion = with_routes(Completion([1, 2, 3], [-1.0] * 3, "stop"), about, SHAPE, num_unknown=4)
    assert np.array_equal(completion.prompt_fields[ROUTES], theirs[:4])
    assert np.array_equal(completion.further_fields[ROUTES][:2], theirs[4:])
