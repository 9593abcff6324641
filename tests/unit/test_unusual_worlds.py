"""Worlds that use what few worlds use, in ways that no other test asks for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from ragen_mega.config import parse
from ragen_mega.environments import reference_players
from ragen_mega.environments.boards import Board, accepts, load_boards
from ragen_mega.environments.claims import check_claims
from ragen_mega.environments.episode import Episode, EpisodeConfig, PromptStyle
from ragen_mega.environments.examples import worked_example
from ragen_mega.environments.protocol import Message, References, Solver
from ragen_mega.environments.reference_players import baselines
from ragen_mega.environments.registry import register
from ragen_mega.rollout.tasks import check_first_prompts, episode_maker
from tests.support.door import RENDERER


class Coin:
    """One word that is right."""

    actions: Sequence[str] = ("heads", "tails")
    is_instant = True

    def reset(self, seed: int) -> Any:
        return f"coin {seed}"

    def step(self, action: str) -> Any:
        return "over", float(action == "heads"), True, False, {}


class Boarded(Coin):
    """Starts from one row; a world that is asked for others raises."""

    def reset(self, seed: int, board: Sequence[str] | None = None) -> Any:
        return f"coin {board}"

    def accepts_board(self, rows: Sequence[str]) -> bool:
        if rows == ("malformed",):
            raise ValueError("a row must be a coin")
        if rows == ("broken",):
            raise KeyError("broken")
        return len(rows) == 1


class Speaking(Coin):
    """Writes its prompts itself."""

    def reset(self, seed: int) -> Any:
        return [("user", f"coin {seed}")]


class Unscripted:
    """Takes texts, and says no random answer."""

    def reset(self, seed: int) -> Any:
        return "?"

    def step(self, text: str) -> Any:
        return "over", 1.0, True, False, {}


class Misread(Unscripted):
    """Its own parser refuses what its random answers say."""

    def parse(self, text: str) -> str:
        raise ValueError("no")

    def random_answer(self, draw: Any) -> str:
        return "word"


class Claiming(Coin):
    """Checks thoughts itself."""

    def claims(self, thought: str) -> list[int]:
        return [len(thought) > 3, 0]


class Turning:
    """Speaks a text first, and then messages."""

    def reset(self, seed: int) -> str:
        return "what?"

    def step(self, text: str) -> Any:
        return [Message("user", "a message"), ("tool", "a result")], 0.0, False, False, {}


def test_an_example_needs_a_state_and_an_answer_that_can_be_scripted() -> None:
    def example(world: Any, held_out: frozenset[str] = frozenset()) -> Any:
        return worked_example(Episode(world, EpisodeConfig()), range(2), held_out)

    assert "coin 1" in example(Coin(), frozenset({"coin 0"}))[0].content
    with pytest.raises(ValueError, match="all of its states are evaluated on"):
        example(Coin(), frozenset({"coin 0", "coin 1"}))
    with pytest.raises(ValueError, match="without random_answer"):
        example(Unscripted())
    with pytest.raises(ValueError, match="its answers cannot be scripted$"):
        example(Misread())


def test_a_random_player_is_unknown_where_answers_are_and_where_time_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [(0, None)]
    register("unusual_unscripted", Unscripted)
    assert baselines("unusual_unscripted", prompts, EpisodeConfig()).random is None
    register("unusual_coin", Coin)
    assert baselines("unusual_coin", prompts, EpisodeConfig()).random is not None
    monkeypatch.setattr(reference_players, "MAX_SECONDS", 0.0)
    assert baselines("unusual_coin", prompts, EpisodeConfig()).random is None


def test_a_solver_whose_world_cannot_start_is_one_line() -> None:
    class Closed(Coin):
        solver = Solver(lambda world, budget: References(0.5, 1.0, 1.0), lambda world, left: [])

        def reset(self, seed: int) -> Any:
            raise OSError("closed")

    register("unusual_closed", Closed)
    with pytest.raises(ValueError, match="cannot start from seed 7: OSError: closed"):
        baselines("unusual_closed", [(7, None)], EpisodeConfig())


def test_boards_of_another_kind_are_told_from_boards_that_a_world_chokes_on(tmp_path: Any) -> None:
    register("unusual_boarded", Boarded)
    assert accepts(Boarded(), Board("coins", 1, ("a",)))
    assert not accepts(Boarded(), Board("coins", 1, ("malformed",)))
    assert not accepts(Coin(), Board("coins", 1, ("a",)))
    path = tmp_path / "boards.jsonl"
    for row, said in (("malformed", "line 1: a row must be"), ("broken", "accepts_board failed")):
        path.write_text(f'{{"set": "coins", "seed": 1, "board": ["{row}"]}}\n')
        with pytest.raises(ValueError, match=said):
            load_boards(path, "unusual_boarded")


def test_a_world_checks_claims_itself() -> None:
    assert check_claims(Claiming(), "long") == [True, False]


def test_a_world_that_speaks_a_text_first_and_messages_then_keeps_its_first_prompt() -> None:
    episode = Episode(Turning(), EpisodeConfig())
    first = episode.start(0)
    messages = episode.respond("<think>a</think><answer>b</answer>").messages
    assert [message.role for message in messages] == ["user", "tool"]
    assert episode.beginning(messages) == [*first, *messages]


@pytest.mark.parametrize("style", ["", "full", "system", "brief", "compact"])
@pytest.mark.parametrize("recipe", ["none", "own"])
@pytest.mark.parametrize("kinds", [["Coin"], ["Speaking"], ["Speaking", "Coin"], []])
def test_a_style_is_said_to_change_nothing_where_no_other_style_would(
    kinds: list[str], recipe: str, style: str
) -> None:
    """The truth is what the worlds show under every style. What the recipe sets is not said."""
    names = [f"{__name__}:{kind}" for kind in kinds] or ["agent:my_module:run"]
    flags = ["--recipe", recipe, "--environments", ",".join(names)]
    recorded = parse(flags).environment.prompt_style
    config = parse([*flags, *(["--prompt-style", style] if style else [])])
    prompts = {name: [(7, None)] for name in names}
    said = check_first_prompts(config, prompts, RENDERER)
    styles = [replace(config.environment, prompt_style=each) for each in get_args(PromptStyle)]
    shown = {
        (name, str(episode_maker(world, name)().start(7)))
        for world in styles
        for name in (names if kinds else ())
    }
    is_read, is_asked = len(shown) > len(kinds), style not in ("", recorded)
    assert bool(said) == (is_asked and not is_read)
    assert not said or (f"--prompt-style {style} " in said[0] and names[0] in said[0])
