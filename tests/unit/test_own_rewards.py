"""Rewards that look at thoughts, repetitions, groups or ask a server, each against its formula."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragen_mega.algorithm.rewards import VERDICTS, shape_rewards, success_ranking
from ragen_mega.algorithm.tables import REWARDS, PlugInError, parse_reward
from ragen_mega.config import RolloutConfig, parse
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments.claims import check_claims, claims_about
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make
from ragen_mega.rollout import verifier
from ragen_mega.rollout.engine import EngineError
from ragen_mega.rollout.verifier import Verifier, Verifiers
from ragen_mega.run.guards import cut_note, inversion_note, nothing_to_learn
from tests.support.web_server import Request, serving


def trajectory(*turns: tuple[list[int], float, dict], group_id: int = 0) -> Trajectory:
    one = Trajectory(group_id=group_id)
    for tokens, reward, info in turns:
        one.append_observation([7, 7, 7])
        turn = one.append_action(Completion(tokens, [-1.0] * len(tokens), "stop"))
        turn.reward, turn.info = reward, info
    return one


def rewards(name: str, *trajectories: Trajectory) -> list[list[float]]:
    shaped, _ = shape_rewards([TrajectoryGroup(0, list(trajectories))], {name: 1.0})
    return [[turn.reward for turn in one.turns] for one in shaped[0].trajectories]


def test_shipped_terms() -> None:
    played = trajectory(
        ([1, 2, 3, 4, 1, 2, 3, 4], 1.0, {"is_action_effective": True, "claims": (1, 4)}),
        ([5, 6], -0.5, {"is_action_effective": False}),
    )
    # Five 4-grams, the last of which is the first again.
    assert rewards("repetition", played) == [pytest.approx([1 / 5 / 2, 0])]
    # DAPO's punishment begins behind 80% of 10 tokens and is whole at 10.
    said = [(1, 10), (8, 10), (9, 10), (10, 10), (3, None)]
    long = trajectory(*(([1] * n, 0.0, {"max_tokens": most} if most else {}) for n, most in said))
    assert rewards("overlong", long) == [pytest.approx([0, 0, -0.5 / 5, -1 / 5, 0])]
    assert rewards("action_effectiveness", played) == [[0.5, 0.0]]
    assert rewards("grounded_thought", played) == [[1 / 4 / 2, 0.0]]
    assert rewards("turn_discounted", played) == [pytest.approx([1.0, 0.95 * -0.5])]
    others = [trajectory(([1], value, {})) for value in (3.0, -1.0)]
    # 0.5, 3 and -1: each less the mean of the other two.
    relative = [[0.0, 0.5 - 1.0], [3.0 + 0.25], [-1.0 - 1.75]]
    assert rewards("group_relative", played, *others) == [pytest.approx(row) for row in relative]
    assert rewards("group_relative", others[0]) == [[0.0]]


def test_a_reward_of_a_group_answers_for_each_member() -> None:
    REWARDS.register("best", lambda group: [max(group.total_rewards)] * len(group.trajectories))
    REWARDS.register("few", lambda group: [1.0])
    two = [trajectory(([1], value, {})) for value in (1.0, 2.0)]
    assert rewards("best", *two) == [[2.0], [2.0]]
    with pytest.raises(PlugInError, match="reward few must return .* 2"):
        rewards("few", *two)


def test_a_term_that_is_gamed_shows() -> None:
    """A policy that talks instead of solving earns more under a price on length."""
    solver = trajectory(([1], 1.0, {"success": True}))
    talker = trajectory(([1] * 50, 0.0, {"success": False}))
    groups = [TrajectoryGroup(0, [solver, talker])]
    shaped, logged = shape_rewards(groups, parse_reward("environment + 0.1*response_length"))
    returns = shaped[0].total_rewards
    assert returns[1] > returns[0], "talking pays"
    assert logged["success_ranking"] == 0.0 and logged["response_length"] == pytest.approx(2.55)
    assert logged["inverted"] == 1.0
    by = {"environment": logged["inverted_by/environment"], "length": 4.9}
    assert by == {
        "environment": -1.0,
        "length": pytest.approx(logged["inverted_by/response_length"]),
    }
    note = inversion_note({f"reward/{name}": value for name, value in logged.items()})
    assert "response_length pays failures 4.9 more" in note and "--reward" in note
    assert [one.success for one in shaped[0].trajectories] == [True, False], "success stays raw"
    _, honest = shape_rewards(groups, parse_reward("environment - 0.001*response_length"))
    assert honest["success_ranking"] == 1.0 and honest["inverted"] == 0.0
    assert inversion_note({f"reward/{name}": value for name, value in honest.items()}) is None
    assert success_ranking([solver, solver]) is None
    rich = [trajectory(([1], 50.0 + 50.0 * good, {"success": good})) for good in (True, False)]
    for one in rich:
        one.environment = "of large rewards"
    assert success_ranking([solver, talker, *rich]) == 1.0
    equal, worse = (trajectory(([1], value, {"success": False})) for value in (1.0, 0.0))
    assert success_ranking([equal, solver]) == 0.5, "a tie tells nothing"
    assert success_ranking([equal, solver, worse]) == 0.75


@pytest.mark.parametrize(
    ("flags", "remedies"),
    [
        ("", {"--warm-start-steps"}),
        ("--load my-model", {"--sft-steps 200", "--prompt-examples 4"}),
        (
            "--load my-model --prompt-examples 4 --sft-steps 300",
            {"--sft-steps 600", "--prompt-examples 8"},
        ),
    ],
)
def test_answers_without_the_form_name_flags_that_teach_it(flags: str, remedies: set[str]) -> None:
    """A loaded model has no warm start to prolong."""
    played = [trajectory(([1], -0.1, {"is_format_valid": False})) for _ in range(2)]
    groups = [TrajectoryGroup(0, played)]
    why = nothing_to_learn(groups, groups, parse(flags.split()))
    assert why.startswith("2 of 2 answers do not have the form")
    assert all(remedy in why for remedy in remedies)
    assert ("--warm-start-steps" in why) == ("--load" not in flags)


@pytest.mark.parametrize(
    ("thought", "claims"),
    [
        ("The player is at (1, 2), the goal (3, 3).", [True, False]),
        (
            "Player: (1, 2). hole (0, 1), holes: (2, 2) and hole at (9, 9)",
            [True, True, True, False],
        ),
        ("size 4, size is 5, width: 2.50", [True, False, True]),
        ("the door is open, the door is closed, door handle", [True, False]),
        ("locked: yes; locked = false", [True, False]),
        ("players (1, 2) or the goal in sight", [True]),
        ("nothing to say", []),
        ("the size of the goal is large", []),
        (f"goal ({'9' * 5000}, 3), size {'9' * 5000}", [False, False]),
    ],
)
def test_claims_about_facts(thought: str, claims: list[bool]) -> None:
    facts = {
        "player": (1, 2),
        "goal": (2, 3),
        "holes": frozenset({(0, 1), (2, 2)}),
        "size": 4,
        "width": 2.5,
        "door": "open",
        "locked": True,
        "rooms": None,
    }
    assert sorted(claims_about(facts, thought)) == sorted(claims)
    numbers = {"size": np.int64(4), "width": np.float32(2.5), "locked": np.bool_(True)}
    facts |= numbers | {"player": (np.int64(1), np.int64(2))}
    assert sorted(claims_about(facts, thought)) == sorted(claims), "as NumPy has them"


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake", "bandit"])
def test_what_a_narrator_says_is_true_and_of_another_state_is_not(name: str) -> None:
    environment, other = make(name), make(name)
    environment.reset(5)
    other.reset(6)
    narrator = environment.narrator
    told = check_claims(environment, narrator.describe(environment, environment.actions[:1]))
    if name == "bandit":
        assert check_claims(environment, "high_arm: Dragon, low arm is Dragon") == [True, False]
        return
    assert len(told) >= 4 and all(told)
    assert not all(check_claims(environment, narrator.describe(other, ())))


def _lies_there(facts: dict[str, Any], action: str) -> str:
    """Return what a move leads to, from facts alone."""
    step = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}[action]
    to, behind = (
        (facts["player"][0] + k * step[0], facts["player"][1] + k * step[1]) for k in (1, 2)
    )
    if "holes" in facts:
        is_inside = all(0 <= position < facts["size"] for position in to)
        kind = "a hole" if to in facts["holes"] else "the goal" if to == facts["goal"] else "ice"
        return kind if is_inside else "the edge"
    if to in facts["boxes"]:
        is_held = behind in facts["walls"] or behind in facts["boxes"]
        return "a box that is stuck" if is_held else "a box"
    return "a wall" if to in facts["walls"] else "free"


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
def test_a_sentence_about_a_move_is_true_where_the_move_leads_there(name: str) -> None:
    environment, met = make(name), set()
    kinds = "free,a wall,a box,a box that is stuck,ice,a hole,the edge,the goal".split(",")
    for seed in range(20):
        environment.reset(seed)
        rng = np.random.default_rng(seed)
        for _ in range(6):
            for action in environment.actions:
                there = _lies_there(environment.facts(), action)
                thought = " ".join(f"{action} is {kind}." for kind in kinds)
                assert check_claims(environment, thought) == [kind == there for kind in kinds]
                met.add(there)
            if environment.step(str(rng.choice(environment.actions))).terminated:
                break
    assert len(met) == 4, "every kind of cell was met"
    assert check_claims(environment, "I like boxes. Up is") == []


def test_claims_are_checked_against_the_state_that_the_policy_saw() -> None:
    class Door:
        actions = ("open",)

        def reset(self, seed):
            self.door = "closed"
            return "A door."

        def step(self, action):
            self.door = "open"
            return "Open.", 0.0, False, False, {}

        def facts(self):
            return {"door": self.door}

    episode = Episode(Door(), EpisodeConfig())
    episode.start(0)
    said = "The door is closed. The door is open.</think><answer>open</answer>"
    assert episode.respond(said).info["claims"] == (1, 2)
    assert episode.respond(said.replace("closed", "open")).info["claims"] == (2, 2)
    assert "claims" not in episode.respond("no thought").info


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server that gives its `verdict` on what it is asked, and fails without one."""
    monkeypatch.setattr(verifier, "_PAUSE", 0.0)
    judge = SimpleNamespace(asked=[])

    class Judge(Request):
        def answer(self) -> None:
            asked = json.loads(self.body)
            judge.asked.append(asked)
            verdict = judge.verdict(asked)
            judge.authorization = self.headers["Authorization"]
            self.reply(verdict, 200 if verdict is not None else 500)

    with serving(Judge) as address:
        judge.url = f"http://{address}/score"
        yield judge


RENDERER = SimpleNamespace(
    tokenizer=SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens))),
    decode_action=lambda tokens: " ".join(map(str, tokens)),
)


def test_a_judge_is_asked_once_and_its_verdict_is_a_term(judge: SimpleNamespace) -> None:
    judge.verdict = lambda asked: {"score": len(asked["responses"])}
    terms = parse_reward(f"environment + 0.5*{judge.url}")
    assert terms == {"environment": 1.0, judge.url: 0.5}
    played = [trajectory(*[([value], 1.0, {})] * value) for value in (1, 2, 2)]
    groups = [TrajectoryGroup(0, played)]
    judges = Verifiers(terms, timeout=5.0)
    for _ in range(2):
        assert judges.judge(groups, RENDERER) == 0
    assert len(judge.asked) == 2, "the same text is judged once"
    assert {"environment", "text", "responses", "return", "success"} == judge.asked[0].keys()
    assert played[2].turns[-1].info[VERDICTS] == {judge.url: 2.0}
    shaped, logged = shape_rewards(groups, terms)
    assert shaped[0].total_rewards == [1.5, 3.0, 3.0]
    assert logged[judge.url] == pytest.approx(0.5 * 5 / 3)


def test_a_missing_verdict_is_counted_and_neutral(judge: SimpleNamespace) -> None:
    judge.verdict = lambda asked: (
        None if len(asked["responses"]) == 3 else {"score": len(asked["responses"])}
    )
    played = [trajectory(*[([value], 0.0, {})] * value) for value in (1, 2, 3)]
    groups = [TrajectoryGroup(0, played)]
    judges = Verifiers([judge.url, "environment"], timeout=5.0)
    assert judges.judge(groups, RENDERER) == 1
    assert len(judge.asked) == 2 + 3, "three attempts"
    assert rewards(judge.url, *played) == [[1.0], [0.0, 2.0], [0.0, 0.0, 1.5]]


@pytest.mark.parametrize("verdict", [None, {}, {"score": "x"}, {"score": float("nan")}, 3])
def test_a_judge_that_never_answers_ends_the_run(judge: SimpleNamespace, verdict) -> None:
    judge.verdict = lambda asked: verdict
    groups = [TrajectoryGroup(0, [trajectory(([1], 0.0, {}))])]
    with pytest.raises(EngineError, match=f"{judge.url} gave no verdict on 1 ") as caught:
        Verifiers([judge.url], timeout=5.0).judge(groups, RENDERER)
    assert "\n" not in str(caught.value)


def test_a_judge_whose_name_no_host_can_have_ends_the_run_in_one_line() -> None:
    groups = [TrajectoryGroup(0, [trajectory(([1], 0.0, {}))])]
    with pytest.raises(EngineError, match="verdict on 1 .*InvalidURL") as caught:
        Verifiers(["http://\u00e4..b/score"], timeout=5.0).judge(groups, RENDERER)
    assert "\n" not in str(caught.value)


def slowly(file, answer: bytes) -> None:
    """Write a byte now and then: silence never lasts."""
    for byte in answer:
        file.write(bytes([byte]))
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("write", "timeout", "reason"),
    [
        (lambda file: slowly(file, b"HTTP/1.0 200 OK\r\nX-Slow: " + b"x" * 200), 0.5, "within 0.5"),
        (lambda file: slowly(file, b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 200), 0.5, "within 0.5"),
        (lambda file: file.write(b" " * (2 << 20)), 60.0, "larger than"),
    ],
    ids=["a slow head", "a slow body", "two megabytes"],
)
def test_the_time_and_the_size_of_a_verdict_are_bounded(write, timeout: float, reason: str) -> None:
    class Talker(Request):
        def answer(self) -> None:
            if reason.startswith("larger"):
                self.send_response(200)
                self.end_headers()
            write(self.wfile)

    with serving(Talker) as address:
        scores, why = Verifier(f"http://{address}/", timeout=timeout).scores([{"text": "x"}])
    assert scores == [None] and reason in why


def test_a_judge_of_this_machine_is_asked_without_a_proxy_and_with_credentials(
    judge: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("RAGEN_JUDGE_AUTHORIZATION", "Bearer of-mine")
    judge.verdict = lambda asked: {"score": 1}
    assert Verifier(judge.url, timeout=5.0).scores([{"text": "x"}]) == ([1.0], "")
    assert judge.authorization == "Bearer of-mine"


@pytest.mark.parametrize(
    ("reward", "inverted"), [("environment + 0.5*constant", 0.0), ("-1*environment", 1.0)]
)
def test_only_what_the_world_itself_does_not_pay_is_inverted(reward: str, inverted: float) -> None:
    """The better arm of a bandit pays nothing most of the time, but more in the mean."""
    if "constant" not in REWARDS.names():
        REWARDS.register("constant", lambda trajectory: 1.0)
    arms = [(1.0, True), (0.0, True), (0.0, True), (0.0, True), (0.1, False), (0.1, False)]
    played = [trajectory(([1], value, {"success": good})) for value, good in arms]
    _, logged = shape_rewards([TrajectoryGroup(0, played)], parse_reward(reward))
    assert logged["inverted"] == inverted


def test_a_step_whose_trajectories_the_context_cut_says_so() -> None:
    for fitted, remedy in ((False, "by --max"), (True, "by --no-fit-context --max")):
        rollout = RolloutConfig(max_context_length=512, fit_context=fitted)
        said = cut_note({"rollout/truncated_by_context": 1.0}, rollout)
        assert "--max-context-length 512, " in said and f"{remedy}-context-length 1024" in said
        for metrics in ({"rollout/truncated_by_context": 0.99}, {}):
            assert cut_note(metrics, rollout) is None
