"""Doors for environments: names, what may be left out, calls that are awaited, and samples that do
not depend on how fast they are answered.
"""

import asyncio
import gc
import hashlib
import json
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from ragen_mega.config import EnvironmentConfig, StarPOConfig
from ragen_mega.config.recorded import read_recorded
from ragen_mega.data.types import Trajectory, TrajectoryGroup, in_groups
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, EpisodeConfig, TurnResult
from ragen_mega.environments.pool import MAX_THREADS, EnvironmentFailed, guarded
from ragen_mega.environments.protocol import Solver, StepResult
from ragen_mega.environments.reference_players import baselines
from ragen_mega.environments.registry import ENVIRONMENTS, held_out_options, make, register
from ragen_mega.environments.worlds.frozen_lake.world import FrozenLake
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.report.traces import pictures
from ragen_mega.report.viewer.data import read_run
from ragen_mega.rollout.collector import Collection, collect
from ragen_mega.rollout.held_out import mean_references, reference_players
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker, evaluation_prompts, tasks_for_group
from ragen_mega.run import evaluation
from ragen_mega.warm_start.clone import scripted_texts
from tests.support.prompts import first_seeds
from tests.support.small_policy import lake_tokenizer, tiny_qwen2

COMPACT = EpisodeConfig(prompt_style="compact", max_response_length=20)


class Bare:
    """Three members and nothing else."""

    actions = ("yes", "no")

    def reset(self, seed):
        return f"Seed {seed}?"

    def step(self, action):
        return "Thanks.", 1.0 if action == "yes" else 0.0, True, False, {}


# Names


def test_a_registered_environment_has_a_name_options_and_a_share() -> None:
    class Sized(Bare):
        size = 3

        def __init__(self, *, word: str = "a"):
            self.said = word * self.size

    register("sized", Sized, word="b")
    register("sized", Sized, word="b")  # once more is no harm
    assert "sized" in ENVIRONMENTS.names()
    assert make("sized", size=2).said == "bb" and make("sized", word="c").said == "ccc"
    config = EnvironmentConfig("sized:4,frozen_lake", environment_options='{"sized": {"size": 5}}')
    assert config.shares == {"sized": 4, "frozen_lake": 1}
    assert episode_maker(config, "sized")().environment.said == "bbbbb"
    for options, message in (
        ({"size": "x"}, "option size of environment sized must be int, not 'x'"),
        ({"seize": 1}, "no option seize; its options are word, size"),
    ):
        with pytest.raises(ValueError, match=message):
            make("sized", **options)
    for name in ("sized", "a:b", "a,b", ""):
        with pytest.raises(ValueError, match="choose another name"):
            register(name, Bare)
    with pytest.raises(ValueError, match=r"'sizes' \(did you mean sized\?\); choose"):
        make("sizes")


def test_a_list_of_json_is_a_tuple_where_the_option_is_one() -> None:
    class Sized(Bare):
        sizes = (1, 2)

        def __init__(self, weights: tuple[float, ...] | None = None, names: list | None = None):
            self.weights, self.names = weights, names

    register("tupled", Sized)
    world = make("tupled", **json.loads('{"sizes": [3], "weights": [0.5, 1], "names": ["a"]}'))
    assert (world.sizes, world.weights, world.names) == ((3,), (0.5, 1), ["a"])
    with pytest.raises(ValueError, match="option sizes .* must be tuple, not 3"):
        make("tupled", sizes=3)


def test_an_installed_package_declares_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_worlds.py").write_text(
        "class Theirs:\n    actions = ['go']\n    def reset(self, seed): return 'now'\n"
        "    def step(self, action): return 'then', 0.0, True, False, {}\n"
    )
    info = tmp_path / "their_worlds-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-worlds\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ragen_mega.environments]\ntheirs = their_worlds:Theirs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs" in ENVIRONMENTS.names() and make("theirs").reset(0) == "now"
    assert EnvironmentConfig("theirs:4").shares == {"theirs": 4}


def test_a_file_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nearby_world.py").write_text(
        "class Near:\n    actions = ['go']\n    def reset(self, seed): return 'now'\n"
        "    def step(self, action): return 'then', 0.0, True, False, {}\n"
    )
    (tmp_path / "broken_world.py").write_text("class Near:\n  actions = [\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert make("nearby_world:Near").reset(1) == "now"
    assert EnvironmentConfig("nearby_world:Near:4,bandit").shares == {
        "nearby_world:Near": 4,
        "bandit": 1,
    }
    with pytest.raises(ValueError, match=r"cannot import broken_world:Near \(SyntaxError"):
        make("broken_world:Near")


class Silent(Bare):
    step = None


class Mute(Bare):
    actions = ()


class Binary(Bare):
    def reset(self, seed):
        return b"Say 3."


class Unordered(Bare):
    actions = {"yes", "no"}


class Parted(Bare):
    actions = ("left||right", "up")


class Tag(Bare):
    actions = ("up", "</answer>")


class Blank(Bare):
    actions = ("up", " ")


class Gymnasiums(Bare):
    def reset(self, *, seed=None, options=None):
        return "Go on.", {}


class Stepless(Bare):
    def step(self):
        return "Thanks.", 1.0, True, False, {}


class Unlicensed(Bare):
    def __init__(self):
        raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Nothing", "cannot import .*Nothing .AttributeError"),
        ("Silent", "Silent has no step; an environment is a class with reset"),
        (
            "Mute",
            "actions of environment .*Mute must be a sequence of names; leave them out",
        ),
        ("Unordered", "actions of environment .*Unordered must be a sequence of names"),
        ("Parted", "action 'left..right' of environment .*Parted cannot be read from an answer"),
        ("Tag", "action '</answer>' of environment .*Tag cannot be read .* no tag such as"),
        ("Blank", "action ' ' of environment .*Blank cannot be read from an answer"),
        (
            "Gymnasiums",
            r"reset of environment .* is called as reset\(seed\), and reset\(\*, seed=None,"
            r" options=None\) does not take that .* name it gymnasium:my_module:MyEnv-v0",
        ),
        ("Stepless", r"called as step\(action\), and step\(\) does not take .* its parameters"),
        ("Unlicensed", "Unlicensed cannot be built: RuntimeError: no licence"),
        ("Binary", "the observation of reset must be text .str. or messages .* not b'Say 3.'"),
        ("Bare:0", "distinct names with positive shares"),
    ],
)
def test_mistakes_are_one_line_at_the_start(kind: str, message: str) -> None:
    name = f"{__name__}:{kind}"
    with pytest.raises(ValueError, match=message) as caught:
        reference_players(EnvironmentConfig(name), name, [(0, None)])
    assert "\n" not in str(caught.value)


# What may be left out


def test_three_members_are_enough() -> None:
    register("bare", Bare)
    episode = Episode(make("bare"), EpisodeConfig(max_turns=1))
    system, first = episode.start(7, outcome_seed=3)
    assert "Seed 7?" in first.content and "Your available actions are:\nyes, no" in first.content
    result = episode.respond("hm</think><answer>Yes</answer>")
    assert result.terminated and result.reward == 1.0 and result.info["success"] is True
    with pytest.raises(ValueError, match="Bare does not start from boards"):
        episode.start(7, board=["##"])
    known = baselines("bare", first_seeds(64), COMPACT)
    assert known.random == pytest.approx(0.5, abs=0.05) and not known.is_exact
    assert known.optimum is None and known.optimum_closed_loop is None
    lake = baselines("frozen_lake", first_seeds(4), COMPACT)
    both = mean_references({"bare": known, "frozen_lake": lake}, {"bare": 1, "frozen_lake": 3})
    assert both == {"random": pytest.approx((known.random + 3 * lake.random) / 4)}


def test_actions_may_come_with_the_first_state() -> None:
    class Late(Bare):
        @property
        def actions(self):
            return self.moves

        def reset(self, seed):
            self.moves = Bare.actions
            return super().reset(seed)

    register("late", Late)
    late, bare = Episode(make("late"), EpisodeConfig()), Episode(Bare(), EpisodeConfig())
    assert late.start(7) == bare.start(7) and late.budget == bare.budget
    register("bare", Bare)
    levels = [baselines(name, first_seeds(8), EpisodeConfig()).random for name in ("late", "bare")]
    assert levels[0] == levels[1] is not None


def test_success_is_what_the_last_step_says_however_the_episode_ends() -> None:
    class Graded(Bare):
        max_turns = 2
        max_actions_per_turn = 1

        def reset(self, seed):
            self.num_steps = 0
            return "Go on."

        def step(self, action):
            self.num_steps += 1
            return "Go on.", 1.0, False, False, {"success": self.num_steps == 2}

    episode = Episode(Graded(), COMPACT)
    episode.start(1)
    first, last = (episode.respond("</think><answer>yes</answer>") for _ in range(2))
    assert not first.info["success"] and last.info["success"] and last.truncated
    longer = Episode(Graded(), EpisodeConfig(max_turns=3))
    longer.start(1)
    turns = [longer.respond(f"</think><answer>{said}</answer>") for said in ("yes", "yes", "?")]
    assert turns[-1].truncated and turns[-1].info["success"], "the last turn has no step"
    longer.start(1)
    assert not longer.respond("?").info["success"]
    register("graded", Graded)
    assert baselines("graded", [(1, None)], COMPACT).random == 1.0
    assert baselines("graded", [(1, None)], EpisodeConfig(max_turns=1)).random == 0.0


@pytest.mark.parametrize(
    ("member", "value", "rule"),
    [
        ("max_turns", "8", "max_turns must be a whole number of at least 1, not '8'; correct"),
        ("format_penalty", "0.1", "format_penalty .* must be finite and <= 0, not '0.1'"),
        ("splits", "train", "must be a sequence of names, not 'train'"),
        ("tools", [{"type": "function"}], "must have a name"),
        ("solver", Solver(lambda world, budget: 1 / 0, None), "the solver .* ZeroDivisionError"),
    ],
)
def test_what_an_environment_declares_wrongly_is_one_line(
    member: str, value: object, rule: str
) -> None:
    class Wrong(Bare):
        pass

    setattr(Wrong, member, value)
    register(name := f"wrong_{member}", Wrong)
    with pytest.raises(ValueError, match=rule):
        baselines(name, [(1, None)], COMPACT, held_out_options(name))


def test_worlds_with_a_reset_of_their_own_are_not_kept() -> None:
    kept = []
    for _ in range(300):
        world = SimpleNamespace(reset=lambda seed: "Go.")
        kept.append(weakref.ref(world.reset))
        calls.reset(world, 0)
    gc.collect()
    assert sum(each() is not None for each in kept) <= 257  # the last one is still in `world`


def test_a_reset_that_fails_now_and_then_does_not_stop_the_solver() -> None:
    class Moody(FrozenLake):
        num_resets = 0

        def reset(self, seed, *, outcome_seed=None, board=None) -> str:
            Moody.num_resets += 1
            if Moody.num_resets % 3 == 0:
                raise OSError("away")
            return super().reset(seed, outcome_seed=outcome_seed, board=board)

    register("moody", Moody)
    assert baselines("moody", first_seeds(4), COMPACT) == replace(
        baselines("frozen_lake", first_seeds(4), COMPACT), environment="moody"
    )


def test_an_object_with_functions_is_an_environment() -> None:
    def build() -> SimpleNamespace:
        return SimpleNamespace(
            reset=lambda seed: "Yes?", step=lambda text: ("", float(text == "yes"), True, False, {})
        )

    register("namespace", build)
    episode = Episode(make("namespace"), COMPACT)
    assert "Yes?" in episode.start(1)[0].content
    assert episode.respond("</think><answer>yes</answer>").info["success"]


@pytest.mark.parametrize("num_tasks", [0, -1, 2.5, "ten"])
def test_a_number_of_tasks_that_is_none_is_one_line(num_tasks: object) -> None:
    class Tasks(Bare):
        pass

    Tasks.num_tasks = num_tasks
    register(f"tasks_{num_tasks}", Tasks)
    with pytest.raises(ValueError, match="num_tasks of environment .* must be a positive integer"):
        evaluation_prompts(EnvironmentConfig(f"tasks_{num_tasks}"), f"tasks_{num_tasks}", 4)


def test_an_optimum_of_zero_is_zero() -> None:
    unsolvable = ("#######", "#PX___#", "#__#__#", "#____O#", "#######")
    known = baselines("sokoban", [(0, unsolvable)], EpisodeConfig(max_actions=1))
    assert mean_references({"sokoban": known}, {"sokoban": 1})["optimum"] == 0.0


def test_a_world_that_is_too_slow_to_measure_has_no_random_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sleepy(Bare):
        def reset(self, seed):
            time.sleep(0.02)
            return super().reset(seed)

    register("sleepy", Sleepy)
    monkeypatch.setattr("ragen_mega.environments.reference_players.MAX_SECONDS", 0.1)
    known = baselines("sleepy", first_seeds(4), COMPACT)
    assert known.random is None and known.random_ci_low is None
    assert mean_references({"sleepy": known}, {"sleepy": 1}) == {}


def test_a_constructor_may_take_longer_than_measuring_the_random_player(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Heavy(Bare):
        def __init__(self):
            time.sleep(1.3)  # the wait for a measurement ends 1 s after its limit

    register("heavy", Heavy)
    monkeypatch.setattr("ragen_mega.environments.reference_players.MAX_SECONDS", 0.1)
    reference_players(EnvironmentConfig("heavy"), "heavy", [(0, None)])
    with pytest.raises(ValueError, match="took longer than 1 s"):
        baselines("heavy", first_seeds(1), COMPACT, timeout=1.0)


def test_without_a_narrator_the_thought_repeats_the_observation() -> None:
    class Tagged(Bare):
        def reset(self, seed):
            return "a </think> b\n" + "long " * 100

    texts = scripted_texts(lambda: Episode(Tagged(), COMPACT), range(20), skill=0.0)
    said = [text for text in texts if "<answer>" in text]
    assert len(said) == 20
    thoughts = {text.partition("</think>")[0] for text in said}
    assert len(thoughts) == 1 and thoughts.pop().startswith(" a (/think) b long long")
    answers = {text.partition("<answer> ")[2].removesuffix("</answer>") for text in said}
    # Ten actions in five turns, which the random player uses as well.
    assert answers == {f"{one} || {two}" for one in ("yes", "no") for two in ("yes", "no")}
    with pytest.raises(ValueError, match="no solver for Tagged"):
        scripted_texts(lambda: Episode(Tagged(), EpisodeConfig()), range(1), skill=0.5)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "TypeError: step must return a StepResult or"),
        ((b"x", 0.0, False, False, {}), "TypeError: the observation of step must be text"),
        (("x", None, False, False, {}), "TypeError: the environment's reward must be a number"),
        (("x", float("nan"), False, False, {}), "FloatingPointError: .* finite number, not nan"),
        (("x", -1e300, True, False, {}), "FloatingPointError: .*, not -1e.300, and at most 1e.30"),
        (("x", 0.0, False, False, None), "TypeError: the info of a step must be a dict"),
        (StepResult("x", 1, True), None),
    ],
)
def test_answers_of_the_wrong_kind(answer: object, error: str | None) -> None:
    class Odd(Bare):
        def step(self, action):
            return answer

    if error is None:
        assert calls.step(Odd(), "yes").reward == 1
        return
    kind, _, message = error.partition(": ")
    with pytest.raises((TypeError, FloatingPointError), match=message) as caught:
        calls.step(Odd(), "yes")
    assert type(caught.value).__name__ == kind
    register(name := f"odd {error}".replace(" ", "_").replace(":", "").replace(",", ""), Odd)
    with pytest.raises(ValueError, match="fails whatever is done"):
        baselines(name, first_seeds(2), COMPACT)


def breaks(answer: str) -> int:
    return int(answer)


def test_an_error_says_in_which_method_and_where() -> None:
    line = breaks.__code__.co_firstlineno + 1
    place = rf"ValueError: invalid literal .*'no' \(in step, {__file__}:{line}\)"
    with pytest.raises(ValueError, match=rf"fails whatever is done, .*{place}"):
        scripted_texts(lambda: Episode(Broken(), COMPACT), range(2), skill=0.0)
    with pytest.raises(EnvironmentFailed, match=r"\(in _later, .*\.py:\d+\)"):
        guarded(lambda: calls.step(Late(), "yes"))


class Broken(Bare):
    actions = ("no",)

    def step(self, action):
        return breaks(action)


class Late(Bare):
    def step(self, action):
        return self._later()

    async def _later(self):
        raise OSError("away")


# Calls that are awaited


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return lake_tokenizer(lambda: Episode(make("frozen_lake"), COMPACT))


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable]:
    model = tiny_qwen2(len(tokenizer))

    def play(
        make_episode: Callable[[], Episode], *, sessions: int = 32, size: int = 8
    ) -> list[TrajectoryGroup]:
        tasks = [
            task
            for group in range(4)
            for task in tasks_for_group(group, "lake", 50 + group, make_episode, group_size=size)
        ]
        engine = EmbeddedEngine(model.config, max_context=512, max_sessions=sessions)
        with engine.awake():
            engine.load_weights(model.state_dict().items())
            renderer = ChatRenderer(tokenizer, think=True)
            return collect(engine, renderer, tasks, PlaySettings(512, 1.0, 3))

    yield play


def digest(groups: list[TrajectoryGroup]) -> str:
    """Of tokens and of the bits of log-probabilities."""
    played = [
        (one.group_id, one.outcome_seed, one.tokens, one.rollout_logprobs, one.total_reward)
        for group in groups
        for one in group.trajectories
    ]
    return hashlib.sha256(repr(played).encode()).hexdigest()


class Crowd(FrozenLake):
    """All that are reset at the same time meet; whoever does not find the others goes on alone."""

    meeting = threading.Barrier(32)
    num_closed = 0
    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_made += 1

    def reset(self, seed, *, outcome_seed=None, board=None) -> str:
        self.meeting.wait(60)
        return super().reset(seed, outcome_seed=outcome_seed)

    def close(self) -> None:
        type(self).num_closed += 1


class AsyncCrowd(FrozenLake):
    """The same as coroutines."""

    num_inside = high_water = num_closed = 0

    async def reset(self, seed, *, outcome_seed=None, board=None) -> str:
        kind = type(self)
        kind.num_inside += 1
        kind.high_water = max(kind.high_water, kind.num_inside)
        while kind.high_water < 32:
            await asyncio.sleep(0.001)
        kind.num_inside -= 1
        return super().reset(seed, outcome_seed=outcome_seed)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:
        type(self).num_closed += 1


def test_32_environments_are_asked_at_the_same_time_and_closed(play: Callable) -> None:
    for kind in (Crowd, AsyncCrowd):
        groups = play(lambda kind=kind: Episode(kind(), COMPACT))
        assert [len(group.trajectories) for group in groups] == [8] * 4
        assert not any("error" in t.turns[-1].info for g in groups for t in g.trajectories)
        assert kind.num_closed == 32
    assert Crowd.num_made == 32


GOLDEN = {
    "bandit": ("8cc6e8f3abaf8c9c", "53343c607184a5b2"),
    "frozen_lake": ("407ee1f45a4db992", "1244b6d2a78521ba"),
    "sokoban": ("352769fc8a00f832", "e565f67518131285"),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_the_games_play_as_they_always_have(name: str) -> None:
    """Texts of the warm start and sampled tokens under tiny random weights, as first recorded;
    FrozenLake's since its thoughts tell of brinks.
    """
    config = EnvironmentConfig(name, prompt_style="compact", max_turns=4, max_response_length=25)
    maker = episode_maker(config, name)
    texts = scripted_texts(maker, range(30), skill=0.3)
    tokenizer = train_tokenizer(texts)
    model = tiny_qwen2(len(tokenizer))
    tasks = [
        task
        for group in range(3)
        for task in tasks_for_group(group, name, 50 + group, maker, group_size=4)
    ]
    engine = EmbeddedEngine(model.config, max_context=1500, max_sessions=9)
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        renderer = ChatRenderer(tokenizer, think=True)
        groups = collect(engine, renderer, tasks, PlaySettings(1500, 0.9, 3))
    tokens = [one.tokens for group in groups for one in group.trajectories]
    hashes = (hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in (texts, tokens))
    assert tuple(hashes) == GOLDEN[name]


class Delayed(FrozenLake):
    """Answers after a random time."""

    clock = random.Random(0)
    longest = 0.0

    def reset(self, seed, *, outcome_seed=None, board=None) -> str:
        time.sleep(self.clock.random() * self.longest)
        return super().reset(seed, outcome_seed=outcome_seed)


class DelayedEpisode(Episode):
    """Also where no action was legal."""

    def respond(self, text: str):
        time.sleep(self.environment.clock.random() * self.environment.longest)
        return super().respond(text)


@pytest.mark.parametrize("sessions", [32, 12])
def test_samples_do_not_depend_on_delays(
    play: Callable, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities are equal to the bit, with a slot for each trajectory and with
    too few.
    """
    digests = []
    for seed, longest in enumerate((0.0, 0.01, 0.05)):
        monkeypatch.setattr(Delayed, "longest", longest)
        monkeypatch.setattr(Delayed, "clock", random.Random(seed))
        digests.append(digest(play(lambda: DelayedEpisode(Delayed(), COMPACT), sessions=sessions)))
    assert len(set(digests)) == 1


@pytest.mark.parametrize("sessions", [32, 12])
def test_a_rollout_in_parts_is_the_same_to_the_bit_whatever_the_delays(
    tokenizer: PreTrainedTokenizerFast, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of three steps of the engine, as between two deals, and tasks that are added between
    them; answers come while the engine pauses, too.
    """
    model = tiny_qwen2(len(tokenizer))

    def maker() -> Episode:
        return DelayedEpisode(Delayed(), COMPACT)

    tasks = [
        task
        for group in range(4)
        for task in tasks_for_group(group, "lake", 50 + group, maker, group_size=8)
    ]
    digests = set()
    for seed, longest in enumerate((0.0, 0.01, 0.05)):
        monkeypatch.setattr(Delayed, "longest", longest)
        monkeypatch.setattr(Delayed, "clock", random.Random(seed))
        engine = EmbeddedEngine(model.config, max_context=512, max_sessions=sessions)
        settings, renderer = PlaySettings(512, 1.0, 3), ChatRenderer(tokenizer, think=True)
        with engine.awake(), Collection(engine, renderer, tasks[:20], settings) as collection:
            engine.load_weights(model.state_dict().items())
            assert collection.play(3) and len(collection.unfinished) == 20
            collection.add(enumerate(tasks[20:], 20))
            num_parts = 1
            while collection.unfinished:
                time.sleep(longest / 5)
                collection.play(3)
                num_parts += 1
            digests.add(digest(in_groups(collection.trajectories())))
        assert num_parts > 20
    assert len(digests) == 1


def test_a_constructor_that_fails_now_and_then_costs_its_trajectory_alone(play: Callable) -> None:
    """Also if it is the first one, from which the kind of the environment is read."""

    class Licensed(FrozenLake):
        num_built = 0

        def __init__(self) -> None:
            Licensed.num_built += 1
            if Licensed.num_built in (1, 5):
                raise OSError("no licence")
            super().__init__()

    groups = play(lambda: Episode(Licensed(), COMPACT))
    errors = [
        one.turns[-1].info["error"]
        for group in groups
        for one in group.trajectories
        if not one.num_sampled_tokens
    ]
    assert len(errors) == 1 and "OSError: no licence" in errors[0]


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_environment_that_ends_its_thread_costs_its_trajectory_alone(
    play: Callable, ending: type[BaseException], is_async: bool
) -> None:
    def answer(world: FrozenLake, action: str) -> StepResult:
        Ending.num_steps += 1
        if Ending.num_steps == 3:
            raise ending("over")
        return FrozenLake.step(world, action)

    async def later(world: FrozenLake, action: str) -> StepResult:
        return answer(world, action)

    class Ending(FrozenLake):
        num_steps = 0
        step = later if is_async else answer

    class Talking(Episode):
        def respond(self, text: str) -> TurnResult:
            return super().respond("</think><answer>Up</answer>")

    groups = play(lambda: Talking(Ending(), COMPACT))
    errors = [one.turns[-1].info.get("error") for group in groups for one in group.trajectories]
    (error,) = filter(None, errors)
    assert f"{ending.__name__}: over" in error


def test_a_picture_does_not_wait_for_a_constructor_that_hangs() -> None:
    class Hanging(FrozenLake):
        is_instant = True

        def __init__(self) -> None:
            threading.Event().wait()

    register("hanging", Hanging)
    said: list[str] = []
    hanging = [Trajectory(0, "hanging", 1, 2)]
    assert pictures(hanging, None, {}, timeout=0.05, say=said.append) is None
    assert said == [
        "environment hanging cannot be built: took longer than 0.05 s; raise --environment-timeout"
    ]


def test_environments_are_reset_and_used_again_beyond_the_bound(
    play: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen_mega.rollout.collector.MAX_THREADS", 5)
    assert MAX_THREADS > 5

    class Counted(FrozenLake):
        num_made = num_closed = num_open = high_water = 0

        def __init__(self) -> None:
            super().__init__()
            Counted.num_made += 1

        def close(self) -> None:
            Counted.num_closed += 1

    groups = play(lambda: Episode(Counted(), COMPACT))
    assert [len(group.trajectories) for group in groups] == [8] * 4
    assert (Counted.num_made, Counted.num_closed) == (5, 5)
    instant = [t for g in play(lambda: Episode(FrozenLake(), COMPACT)) for t in g.trajectories]
    again = [t for g in groups for t in g.trajectories]
    assert [t.tokens for t in again] == [t.tokens for t in instant]


def test_a_collection_that_is_left_early_closes_everything(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    class Kept(FrozenLake):
        num_closed = 0

        def close(self) -> None:
            Kept.num_closed += 1

    def stop(num_tokens: int, is_over: bool) -> None:
        raise KeyboardInterrupt

    model = tiny_qwen2(len(tokenizer))
    engine = EmbeddedEngine(model.config, max_context=512, max_sessions=8)
    tasks = tasks_for_group(0, "lake", 1, lambda: Episode(Kept(), COMPACT), group_size=8)
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        renderer = ChatRenderer(tokenizer, think=True)
        with (
            pytest.raises(KeyboardInterrupt),
            Collection(
                engine, renderer, tasks, PlaySettings(512, 1.0, 0), advance=stop
            ) as collection,
        ):
            collection.play()
        assert Kept.num_closed == 8
        del collection
        gc.collect()
        assert not caplog.records, "nothing is said of an exception that was raised"
        engine.load_weights(model.state_dict().items())  # no session is left


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    (tmp_path / "documented_world.py").write_text(
        page.partition("```python\n# my_world.py\n")[2].partition("```")[0]
    )
    monkeypatch.syspath_prepend(tmp_path)
    episode = Episode(make("documented_world:Digit", largest=0), COMPACT)
    assert "Name a digit." in episode.start(5)[0].content
    assert episode.respond("</think><answer>7</answer>").messages[0].content.startswith("lower")
    result = episode.respond("</think><answer>0</answer>")
    assert result.info["success"] and result.reward == 1.0
    assert 0.5 < baselines("documented_world:Digit", first_seeds(8), EpisodeConfig()).random < 1


def test_a_class_that_is_no_environment_is_never_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run directory, which somebody else may have made, names classes."""
    monkeypatch.chdir(tmp_path)
    source = "class Command:\n    def __init__(self, text=''):\n        open(text, 'w')\n"
    (tmp_path / "no_world.py").write_text(source)
    target = tmp_path / "called"
    with pytest.raises(ValueError, match="has no reset and no step"):
        make("no_world:Command", text=str(target))
    assert not target.exists()


def test_an_evaluation_elsewhere_imports_nothing_that_the_run_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    values = StarPOConfig().to_dict()
    values["environment"] |= {"environments": "forged:World", "max_turns": 3}
    values["advantage"]["reward"] = "forged:reward"
    values["agent"] |= {"agent_example": "forged:example", "agent_reward": "forged:reward"}
    (run / "config.json").write_text(json.dumps(values))
    rules = evaluation._settings(read_recorded(run), "bandit", {}).environment
    assert rules.max_turns == 3 and rules.evaluated == ["bandit"]
    assert read_run(run)["config"]["environment"]["environments"] == "forged:World"  # the viewer's
