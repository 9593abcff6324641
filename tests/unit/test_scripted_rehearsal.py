"""What scripted play says before a run: which recipe and which context a world needs, and whether
it reads the answers.
"""

import sys
import textwrap
import time
from pathlib import Path

import pytest

from ragen_mega.algorithm.tables import ESTIMATORS, FILTERS, PlugInError
from ragen_mega.config import parse
from ragen_mega.config.cli import DEFAULT_RECIPE
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.extensions.registry import Registry
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker
from ragen_mega.warm_start.clone import FLAT_WINDOW, as_trajectory, is_flat, scripted_episodes
from ragen_mega.warm_start.rehearsal import EPISODES, check_play, fit_context

WORLDS = '''
import json


class Steps:
    """Each observation is ten words, and nothing ends before the budget does."""

    actions = ("left", "right")
    instruction = "Walk to the well."
    max_turns = 8
    max_actions_per_turn = 1
    is_instant = True

    def reset(self, seed):
        self.count = 0
        return "You stand at a crossing of two long and dusty roads."

    def step(self, action):
        self.count += 1
        return f"You went {action}, and the roads are as long as before.", 0.0, False, False, {}


class Mute(Steps):
    answer_format = '{"go": [left or right]}'

    def parse(self, text):
        value = json.loads(text)
        if "go" not in value:
            raise ValueError("there is no go in it")
        return value

    def step(self, action):
        return super().step(action["go"])


class Json(Mute):
    def random_answer(self, draw):
        return json.dumps({"go": draw.choice(("left", "right"))})


class Deaf(Mute):
    def random_answer(self, draw):
        return json.dumps({"move": "left"})


class Blind(Json):
    def reset(self, seed):
        if seed % 4 == 0:
            raise OSError("no light")
        return super().reset(seed)


class Endless(Json):
    def step(self, action):
        return "", float("nan"), True, False, {}


class Picky(Json):
    def parse(self, text):
        return super().parse(text)["move"]
'''


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rehearsed.py").write_text(WORLDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("rehearsed", None)


def renderer_of(config) -> ChatRenderer:
    (name,) = config.environment.shares
    texts = [WORLDS, textwrap.dedent(WORLDS)]
    for played in scripted_episodes(episode_maker(config.environment, name), range(20), skill=0.0):
        texts += [message.content for message in played.messages]
        texts += [said for said, _ in played.turns]
    return ChatRenderer(train_tokenizer(texts), think=True)


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("", "frozen_lake"),
        ("--environments frozen_lake:2", "frozen_lake"),
        ("--environments sokoban", "sokoban"),
        ("--load somewhere", "none"),
        ("--load somewhere --environments frozen_lake", "none"),
        ("--load somewhere --recipe frozen_lake", "frozen_lake"),
        ("--environments rehearsed:Steps", "own"),
        ("--environments frozen_lake,rehearsed:Steps", "own"),
        ("--environments rehearsed:Steps --load somewhere", "none"),
        ("--environments rehearsed:Steps --recipe bandit", "bandit"),
        ("--environments rehearsed:Steps --recipe none", "none"),
    ],
)
def test_a_recipe_is_chosen_for_the_worlds_that_are_played(
    flags: str, recipe: str, worlds: None
) -> None:
    config = parse(flags.split(), recipe=DEFAULT_RECIPE)
    assert config.logging.recipe == recipe
    assert config.rollout.fit_context == (recipe == "own")
    plain = parse(flags.split())  # of a program without a default recipe
    assert plain.logging.recipe == (recipe if "--recipe" in flags else "none")


@pytest.mark.parametrize("name", ["Steps", "Json"])
def test_brief_prompts_tell_the_task_and_the_format_once(name: str, worlds: None) -> None:
    config = parse(["--environments", f"rehearsed:{name}"], recipe=DEFAULT_RECIPE)
    episode = episode_maker(config.environment, f"rehearsed:{name}")()
    system, first = episode.start(0)
    assert system.role == "system" and "Walk to the well." in system.content
    assert "<think>" in system.content and "8 turns" in system.content
    assert ('{"go": [left or right]}' if name == "Json" else "<answer>") in system.content
    assert first.content.startswith("You stand") and "output" not in first.content
    again = episode.beginning([first])  # of a later window
    assert again == [system, first]
    assert isinstance(episode, Episode) and episode.config == EpisodeConfig(prompt_style="brief")


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", ["rehearsed:Steps", "rehearsed:Json"])
def test_a_fitted_context_holds_answers_twice_as_long(name: str, window: int, worlds: None) -> None:
    flags = ["--environments", name, "--context-window", str(window)]
    config = fit_context(parse(flags, recipe=DEFAULT_RECIPE))
    length = config.rollout.max_context_length
    assert length % 64 == 0 and length < 4096
    renderer = renderer_of(config)
    longest = 0
    for played in scripted_episodes(episode_maker(config.environment, name), range(50), skill=0.0):
        doubled = [
            (f"{said.partition('</think>')[0]} {said}", result) for said, result in played.turns
        ]
        played.turns[:] = doubled
        held = as_trajectory(played, renderer, name, max_context=length, window=window)
        assert not held.truncated and len(held.turns) == 8
        longest = max(longest, len(held.tokens))
    if not window:
        assert longest > length / 3  # not by being far too long
        short = parse([*flags, "--max-context-length", "200"], recipe=DEFAULT_RECIPE)
        assert fit_context(short).rollout.max_context_length == 200


def test_limits_that_scripted_play_does_not_fit_into_are_said(worlds: None) -> None:
    flags = ["--environments", "rehearsed:Steps", "--no-fit-context", "--max-context-length", "200"]
    config = parse([*flags, "--max-response-length", "9"], recipe=DEFAULT_RECIPE)
    context, answers, budget = check_play(config, renderer_of(config))
    assert f"of 8 turns of scripted play, and cuts {EPISODES} of {EPISODES} episodes" in context
    assert "--max-response-length 9" in answers and "--max-turns" in budget


def test_limits_of_a_loaded_model_are_those_of_thoughts_in_sentences(worlds: None) -> None:
    """A small model describes every neighbour of its cell; the examples of a loaded one do not."""
    flags = "--environments frozen_lake --prompt-style compact --max-response-length 20".split()
    config = parse(flags)
    renderer = renderer_of(config)
    assert any("--max-response-length 20" in note for note in check_play(config, renderer))
    assert not check_play(parse([*flags, "--load", "my-model"]), renderer)


def test_a_parse_that_reads_nothing_is_refused_with_what_it_says(worlds: None) -> None:
    good = parse(["--environments", "rehearsed:Json"], recipe=DEFAULT_RECIPE)
    assert len(check_play(good, renderer_of(good))) == 1  # the budget
    bad = parse(["--environments", "rehearsed:Deaf"], recipe=DEFAULT_RECIPE)
    with pytest.raises(ValueError, match="no go in it") as error:
        check_play(bad, renderer_of(good))
    assert '{"move": "left"}' in str(error.value) and "0 of" in str(error.value)
    # A model that is loaded need not guess at the form as scripted play does.
    flags = ["--environments", "rehearsed:Mute", "--load", "none"]
    notes = check_play(parse(flags, recipe=DEFAULT_RECIPE), renderer_of(good))
    assert any("rehearsed:Mute must read" in note for note in notes)
    with pytest.raises(ValueError, match="rehearsed:Mute must read"):
        check_play(parse(flags[:2], recipe=DEFAULT_RECIPE), renderer_of(good))


@pytest.mark.parametrize(
    ("table", "flag"), [(FILTERS, "--filter-strategy"), (ESTIMATORS, "--advantage-estimator")]
)
def test_a_registered_function_of_the_users_is_tried_too(
    table: Registry, flag: str, worlds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given, **options):
        raise KeyError("of mine")

    monkeypatch.setitem(table._known, "of_a_user", fails)
    config = parse(["--environments", "rehearsed:Steps", flag, "of_a_user"], recipe=DEFAULT_RECIPE)
    with pytest.raises(PlugInError, match="of_a_user failed: KeyError: 'of mine'"):
        check_play(config, renderer_of(config))


def test_errors_of_scripted_play_are_said(worlds: None) -> None:
    config = parse(["--environments", "rehearsed:Blind"], recipe=DEFAULT_RECIPE)
    error, budget = check_play(config, renderer_of(config))
    assert f"rehearsed:Blind: {EPISODES // 4} of {EPISODES} scripted episodes ended by" in error
    assert "seed 100000: OSError: no light (in reset, " in error and "budget" in budget


@pytest.mark.parametrize(
    ("name", "error", "has_remedy"),
    [("Endless", "not nan", False), ("Picky", "KeyError: 'move' (in parse, ", True)],
)
def test_a_world_that_always_fails_is_named_and_blames_answers_where_they_may_be_wrong(
    name: str, error: str, has_remedy: bool, worlds: None
) -> None:
    config = parse(["--environments", f"rehearsed:{name}"], recipe=DEFAULT_RECIPE)
    with pytest.raises(ValueError, match=f"rehearsed:{name} fails whatever is done") as caught:
        fit_context(config)
    assert error in str(caught.value)
    assert ("random_answer" in str(caught.value)) == has_remedy


def test_a_loss_is_flat_once_it_no_longer_falls() -> None:
    falling = [0.99**step for step in range(4 * FLAT_WINDOW)]
    assert not is_flat(falling[:FLAT_WINDOW]) and not is_flat(falling)
    assert is_flat([*falling, *[falling[-1]] * 2 * FLAT_WINDOW])


@pytest.mark.parametrize("name", ["my_text:Guess", "my_json:Move", "my_tools:Lookup"])
def test_worlds_of_the_documentation_can_be_played(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = name.partition(":")[0]
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    source = page.partition(f"```python\n# {module}.py\n")[2].partition("```")[0]
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(module, None)
    config = fit_context(parse(["--environments", name], recipe=DEFAULT_RECIPE))
    assert not [note for note in check_play(config, renderer_of(config)) if "budget" not in note]
    played = list(scripted_episodes(episode_maker(config.environment, name), range(99), skill=0.0))
    results = [result for episode in played for _, result in episode.turns]
    assert all("error" not in result.info for result in results)
    assert any(result.info["success"] for result in results)


def test_episodes_that_nobody_takes_are_not_played() -> None:
    begun = list[int]()

    class Slow:
        actions = ("left", "right")
        instruction = "Walk to the well."
        max_turns = max_actions_per_turn = 1

        def reset(self, seed: int) -> str:
            begun.append(seed)
            time.sleep(0.05)
            return "a crossing"

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return "a well", 0.0, True, False, {}

    seeds = range(10_000)
    episodes = scripted_episodes(lambda: Episode(Slow(), EpisodeConfig()), seeds, skill=0.0)
    assert next(episodes).seed == 0
    episodes.close()  # as where its consumer fails
    assert len(begun) < len(seeds)
