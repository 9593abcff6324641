"""The text protocol: prompts, budgets, penalties and endings, against a second bookkeeping."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_mega.config import parse
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import Budget
from ragen_mega.environments.registry import make
from ragen_mega.rollout.tasks import episode_config

ROOM = ["######", "#____#", "#_PXO#", "#____#", "#____#", "######"]


def answer(*actions):
    return f"thought</think><answer>{' || '.join(actions)}</answer>"


def start(board=ROOM, name="sokoban", **config):
    episode = Episode(make(name), EpisodeConfig(**config))
    return episode, episode.start(0, board=board)


def test_full_prompt():
    episode, (system, user) = start()
    assert system.role == "system" and user.role == "user"
    assert user.content.startswith(episode.environment.instruction)
    assert "up to 5 actions in one turn and 10 actions in total" in user.content
    assert "Turn 1:\nState:\n" + "\n".join(ROOM) in user.content
    assert "You have 10 actions left and may use at most 5 in this turn." in user.content
    assert "<think> [Your thoughts] </think> <answer>" in user.content
    result = episode.respond(answer("Up", "Down"))
    assert result.messages[0].content.startswith("Reward:\n-0.2\nTurn 2:\nState:\n")
    assert "You have 8 actions left" in result.messages[0].content


def test_system_and_compact_prompts():
    episode, (system, user) = start(prompt_style="system", think=False)
    assert system.content.startswith(episode.environment.instruction) and user.content.startswith(
        "Turn 1:"
    )
    assert "<think>" not in user.content
    episode, messages = start(prompt_style="compact")
    assert [message.content for message in messages] == ["\n".join(ROOM) + "\n10 left"]
    assert (
        episode.respond(answer("Up")).messages[0].content
        == episode.environment.step("Up").observation + "\n9 left"
    )


def test_a_system_prompt_comes_first_in_every_style():
    told = "Answer as a pirate."
    first, (_, task) = start()[1][0].content, start(prompt_style="system")[1]
    assert first == "You're a helpful assistant."
    for style, system in (
        ("full", told),
        ("system", f"{told}\n{start(prompt_style='system')[1][0].content}"),
        ("compact", told),
    ):
        episode, messages = start(prompt_style=style, system_prompt=told)
        assert [message.role for message in messages] == ["system", "user"]
        assert messages[0].content == system
        assert messages[1] == start(prompt_style=style)[1][-1]
        later = episode.respond(answer("Up")).messages
        assert [message.role for message in later] == ["user"], "it is said once"
        assert episode.beginning(later)[0] == messages[0], "also where a window begins"
    assert [one.role for one in start(system_prompt="")[1]] == ["user"]
    assert "Turn 1" in task.content


def test_the_flag_reaches_every_episode():
    given = (([], None), (["--system-prompt", "Hi"], "Hi"), (["--system-prompt="], ""))
    for words, prompt in given:
        assert episode_config(parse(words).environment).system_prompt == prompt


@pytest.mark.parametrize("opening", [["system", "user"], ["user"]])
def test_a_system_prompt_comes_before_the_messages_of_an_environment(opening):
    class Speaker:
        def reset(self, seed):
            return [(role, f"the {role} says") for role in opening]

        def step(self, text):
            return [("user", "more")], 0.0, False, False, {}

    episode = Episode(Speaker(), EpisodeConfig(system_prompt="Be brief.", think=False))
    messages = episode.start(0)
    own = "\nthe system says" if len(opening) == 2 else ""
    assert [(one.role, one.content) for one in messages] == [
        ("system", f"Be brief.{own}"),
        ("user", "the user says"),
    ]
    later = episode.respond("<answer>1</answer>").messages
    assert episode.beginning(later) == [*messages, *later]


def test_success_ends_the_episode_and_drops_the_rest_of_the_answer():
    episode, _ = start()
    result = episode.respond(answer("Right", "Left", "Left"))
    assert result.reward == pytest.approx(10.9)
    assert result.terminated and not result.truncated and result.messages == () and episode.done
    assert result.info == {
        "claims": (0, 0),
        "success": True,
        "is_format_valid": True,
        "is_action_valid": True,
        "is_action_effective": True,
        "num_actions": 1,
        "actions": ("Right",),
        "thought": "thought",
    }
    with pytest.raises(RuntimeError, match="call start"):
        episode.respond("")
    assert episode.start(0, board=ROOM) and not episode.done


def test_format_penalty_every_turn_until_the_turns_run_out():
    episode, _ = start()
    results = [
        episode.respond(text)
        for text in ("", "!!!!!!", answer("jump"), "<answer>Up</answer>", answer())
    ]
    assert [result.reward for result in results] == [-0.1] * 5
    assert [result.truncated for result in results] == [False] * 4 + [True]
    assert not results[-1].info["success"] and results[-1].messages == ()


def test_unknown_action_costs_the_penalty_and_the_rest_runs():
    episode, _ = start()
    result = episode.respond(answer("Up", "jump"))
    assert result.reward == pytest.approx(-0.2) and result.info["num_actions"] == 1
    assert not result.info["is_action_valid"] and result.info["is_format_valid"]
    assert "Reward:\n-0.1\n" in result.messages[0].content, (
        "the penalty is no part of the environment's reward"
    )


def test_action_budget_truncates_inside_a_turn():
    episode, _ = start(max_actions=7)
    assert (
        "may use at most 2 in this turn" in episode.respond(answer(*["Up"] * 5)).messages[0].content
    )
    result = episode.respond(answer("Up", "Up", "Down", "Right"))
    assert result.info["num_actions"] == 2 and result.truncated and not result.terminated


def test_announced_budget_is_what_the_turns_can_hold():
    _, messages = start(max_turns=5, max_actions_per_turn=1, max_actions=10)
    assert "5 actions in total" in messages[1].content
    assert "1 action in one turn" in messages[1].content
    assert "You have 5 actions left and may use at most 1 in this turn." in messages[1].content


def test_losing_terminates_without_success():
    episode, _ = start(["SH", "FG"], name="frozen_lake", max_turns=50)
    while not episode.done:
        result = episode.respond(answer("Right"))
    assert result.terminated or result.truncated
    outcomes = set()
    for outcome_seed in range(60):
        episode.start(0, outcome_seed=outcome_seed, board=["SH", "FG"])
        result = episode.respond(answer(*["Right"] * 5))
        outcomes.add((result.terminated, result.info["success"], result.reward))
    assert (True, False, 0.0) in outcomes and (True, True, 1.0) in outcomes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": 0}, "max_turns .* 1, not 0"),
        ({"max_actions": -1}, "max_actions"),
        ({"format_penalty": 0.1}, "write -0.1"),
        ({"format_penalty": float("nan")}, "finite"),
        ({"prompt_style": "short"}, "prompt_style .*compact"),
    ],
)
def test_bad_configuration_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EpisodeConfig(**changes)


PIECES = st.sampled_from(["Up", "down", "Left", "RIGHT", "jump", "", "</answer>"])
RESPONSES = st.one_of(
    st.text(max_size=30), st.lists(PIECES, max_size=8).map(lambda pieces: answer(*pieces))
)


@settings(max_examples=100)
@given(
    responses=st.lists(RESPONSES, min_size=6, max_size=6),
    max_turns=st.integers(1, 5),
    per_turn=st.integers(1, 5),
    max_actions=st.integers(1, 10),
    seed=st.integers(0, 20),
)
def test_budgets_hold_whatever_the_model_says(responses, max_turns, per_turn, max_actions, seed):
    config = EpisodeConfig(
        max_turns=max_turns, max_actions_per_turn=per_turn, max_actions=max_actions
    )
    episode = Episode(make("sokoban"), config)
    announced = episode.start(seed)[-1].content
    executed = 0
    for turn in range(1, max_turns + 1):
        left, now = map(
            int,
            re.search(
                r"You have (\d+) actions? left and may use at most (\d+)", announced
            ).groups(),
        )
        assert left == min(
            max_actions - executed, (max_turns - turn + 1) * per_turn
        ) and now == min(left, per_turn)
        result = episode.respond(responses[turn - 1])
        executed += result.info["num_actions"]
        assert result.info["num_actions"] <= now
        assert episode.done == (not result.messages) == (result.terminated or result.truncated)
        if result.messages == ():
            break
        announced = result.messages[0].content
    assert episode.done and executed <= max_actions


def test_limits_from_numpy_are_written_like_others() -> None:
    budget = Budget(max_response_length=np.int64(200))
    assert json.dumps(budget.max_response_length) == "200"
