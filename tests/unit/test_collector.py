"""Multi-turn collection with real environments, and the metrics of a rollout."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ragen_mega.config import parse
from ragen_mega.data.types import Completion, SamplingParams, Trajectory, TrajectoryGroup, Turn
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.boards import held_out_seeds
from ragen_mega.environments.episode import Episode, EpisodeConfig, TurnResult
from ragen_mega.environments.registry import make
from ragen_mega.report.console import Console
from ragen_mega.rollout.all_ranks import JointCollection
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.player import PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import summarize
from ragen_mega.rollout.tasks import TRAINING_SEEDS, TaskSampler, tasks_for_group
from ragen_mega.run.sampling import Sampling, origin_of
from ragen_mega.run.selection import choose_groups, shape_on_main
from tests.support.rounding import exact_logprobs
from tests.support.small_policy import lake_tokenizer, tiny_qwen2

BOARD = ("SFFG", "FFFF", "FFFF", "FFFF")
COMPACT = EpisodeConfig(prompt_style="compact", max_response_length=12)


def frozen_lake(rules: EpisodeConfig = COMPACT) -> Callable[[], Episode]:
    return lambda: Episode(make("frozen_lake", success_rate=1.0), rules)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return lake_tokenizer(frozen_lake())


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer, think=True)


class RecordingEngine(RolloutEngine):
    """Passes everything on to another engine and keeps what was asked and answered, per session."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.calls: dict[int, list[tuple[list[int], SamplingParams, Completion]]] = {}
        self.released: list[int] = []
        self.weight_version = engine.weight_version

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        completion = await self.engine.generate(tokens, sampling, session=session)
        self.calls.setdefault(session, []).append((list(tokens), sampling, completion))
        return completion

    def release(self, session: int) -> None:
        self.released.append(session)
        self.engine.release(session)


class ScriptedEngine(RolloutEngine):
    """A policy that says what it is told: `say(session, turn)` -> text; `delay(session)` loop
    iterations later.
    """

    weight_version = 7

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        say: Callable[[int, int], str],
        delay: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.tokenizer, self.say, self.delay = tokenizer, say, delay
        self.log: list[tuple[int, int]] = []
        self.turns: dict[int, int] = {}

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        for _ in range(self.delay(session)):
            await asyncio.sleep(0)
        self.log.append((session, turn))
        sampled = self.tokenizer.encode(
            self.say(session, turn) + "<|im_end|>", add_special_tokens=False
        )
        sampled = sampled[: sampling.max_tokens]
        return Completion(sampled, [-1.0] * len(sampled), "stop")


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return tiny_qwen2(len(tokenizer))


@pytest.fixture
def engine(model: Qwen2ForCausalLM) -> Iterator[RecordingEngine]:
    engine = EmbeddedEngine(model.config, max_context=512, max_sessions=16)
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        yield RecordingEngine(engine)


def lake_tasks(num_groups: int = 2, group_size: int = 4) -> list[Task]:
    return [
        task
        for group_id in range(num_groups)
        for task in tasks_for_group(
            group_id, "frozen_lake", 50 + group_id, frozen_lake(), group_size=group_size
        )
    ]


def test_mask_covers_exactly_what_the_engine_returned(
    engine: RecordingEngine, renderer: ChatRenderer, model: Qwen2ForCausalLM
) -> None:
    groups = collect(engine, renderer, lake_tasks(), PlaySettings(512, 0.8, 3))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [group.group_id for group in groups] == [0, 1] and len(trajectories) == 8
    assert sorted(engine.released) == list(range(8))
    assert (
        len({sampling.seed for calls in engine.calls.values() for _, sampling, _ in calls}) == 8 * 5
    )
    for session, trajectory in enumerate(trajectories):
        calls = engine.calls[session]
        assert len(calls) == len(trajectory.turns) == 5  # garbage is penalised, not fatal
        expected_mask = [False] * len(trajectory)
        for (tokens, _, completion), turn in zip(calls, trajectory.turns, strict=True):
            assert tokens == trajectory.tokens[: turn.start]
            assert completion.tokens == trajectory.tokens[turn.start : turn.end]
            assert completion.logprobs == trajectory.rollout_logprobs[turn.start : turn.end]
            expected_mask[turn.start : turn.end] = [True] * len(completion.tokens)
        assert trajectory.loss_mask == expected_mask
        assert trajectory.loss_mask[-1] and not trajectory.loss_mask[0]
        exact, bound = exact_logprobs(model, trajectory.tokens, 0.8)
        picked = exact[:-1].gather(-1, torch.tensor(trajectory.tokens[1:])[:, None])[:, 0]
        mask = torch.tensor(trajectory.loss_mask[1:])
        recorded = torch.tensor(trajectory.rollout_logprobs[1:], dtype=torch.float64)
        torch.testing.assert_close(recorded[mask], picked[mask], atol=bound, rtol=0)


def test_few_calls_lie_between_a_rollout_and_the_engine(
    renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    """`Rollouts.sample` and `Sampling.sample` come before these, which makes six at most."""
    paths: list[list[str]] = []

    def say(session: int, turn: int) -> str:
        codes = [frame.frame.f_code for frame in inspect.stack(context=0)]
        paths.append([c.co_qualname for c in codes if "ragen_mega/rollout/" in c.co_filename])
        return "?"

    engine = ScriptedEngine(tokenizer, say)
    engine.num_slots = 8
    with JointCollection(engine, renderer, PlaySettings(512, 1.0, 0)) as joint:
        joint.add([lake_tasks(1, 2)])
        joint.play()
    assert len(paths) == 10 and {len(path) for path in paths} == {4}, paths[0]


def test_between_turns_stands_what_the_environment_said(
    engine: RecordingEngine, renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    tasks = lake_tasks(1, 2)
    trajectory = collect(engine, renderer, tasks, PlaySettings(512, 1.0, 0))[0].trajectories[1]
    episode = tasks[1].make_episode()
    episode.start(tasks[1].seed, outcome_seed=tasks[1].outcome_seed)
    for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        result = episode.respond(renderer.decode_action(trajectory.tokens[turn.start : turn.end]))
        assert turn.reward == result.reward == -0.1
        ended = trajectory.tokens[turn.end - 1] == renderer.end_of_turn
        assert (turn.info["finish_reason"] == "stop") == ended
        between = tokenizer.decode(trajectory.tokens[turn.end : following.start])
        opening = "" if ended else "<|im_end|>"
        said = f"\n<|im_start|>user\n{result.messages[0].content}<|im_end|>\n"
        said += "<|im_start|>assistant\n<think>"
        assert between == opening + said
    assert trajectory.truncated and not trajectory.terminated


def test_samples_depend_on_seed_and_task_alone(
    engine: RecordingEngine, renderer: ChatRenderer
) -> None:
    def play(tasks: Sequence[Task], seed: int) -> list[Trajectory]:
        groups = collect(engine, renderer, tasks, PlaySettings(512, 1.0, seed))
        return [trajectory for group in groups for trajectory in group.trajectories]

    tasks = lake_tasks()
    whole = play(tasks, seed=5)
    parts = play(tasks[:3], seed=5) + play(tasks[3:], seed=5)  # cuts through the first group
    assert [t.tokens for t in parts] == [t.tokens for t in whole]
    assert [t.tokens for t in play(tasks, seed=6)] != [t.tokens for t in whole]
    assert len({tuple(t.tokens) for t in whole}) == len(whole)
    twins = [
        replace(task, outcome_seed=1) for task in tasks[:4]
    ]  # same outcomes, still different samples
    assert len({tuple(t.tokens) for t in play(twins, seed=5)}) == 4


def test_solved_episodes_are_terminated_with_their_reward(
    renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    answers = {
        0: " go</think><answer> Right || Right</answer>",
        1: " go</think><answer> Right</answer>",
    }
    engine = ScriptedEngine(tokenizer, lambda session, turn: answers[turn])
    lake = frozen_lake(EpisodeConfig(prompt_style="compact"))
    tasks = tasks_for_group(9, "frozen_lake", 0, lake, group_size=2, board=BOARD)
    seen: list[tuple[int, bool]] = []
    groups = collect(
        engine,
        renderer,
        tasks,
        PlaySettings(512, 1.0, 0),
        advance=lambda num_tokens, is_over: seen.append((num_tokens, is_over)),
    )
    assert [is_over for _, is_over in seen].count(True) == 2 and len(seen) == 4
    sampled = sum(t.num_sampled_tokens for t in groups[0].trajectories)
    assert sum(num_tokens for num_tokens, _ in seen) == sampled
    for trajectory in groups[0].trajectories:
        assert trajectory.success and trajectory.terminated and not trajectory.truncated
        assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
        assert trajectory.turns[0].info["actions"] == ("Right", "Right")
        assert (trajectory.group_id, trajectory.weight_version, trajectory.environment) == (
            9,
            7,
            "frozen_lake",
        )
    metrics = summarize(groups)
    assert (
        metrics["success"]
        == metrics["reward"]
        == metrics["valid_format_rate"]
        == metrics["thought_length"]
        == 1.0
    )
    assert (
        metrics["num_turns"] == 2.0 and metrics["truncated_rate"] == metrics["in_group_std"] == 0.0
    )


def test_no_trajectory_waits_for_another(
    renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = ScriptedEngine(
        tokenizer, lambda session, turn: "?", delay=lambda session: 200 if session == 0 else 1
    )
    collect(engine, renderer, lake_tasks(1, 3), PlaySettings(512, 1.0, 0))
    assert engine.log[:10] == sorted(
        engine.log[:10], key=lambda call: call[1]
    )  # sessions 1 and 2 go on together
    assert {session for session, _ in engine.log[:10]} == {1, 2}
    assert engine.log[10:] == [(0, turn) for turn in range(5)]


def test_a_context_without_room_closes_the_trajectory(
    engine: RecordingEngine, renderer: ChatRenderer
) -> None:
    tasks = lake_tasks(1, 4)
    prompt = len(renderer.start(tasks[0].make_episode().start(tasks[0].seed)))
    max_context = prompt + 70
    for trajectory in collect(engine, renderer, tasks, PlaySettings(max_context, 1.0, 0))[
        0
    ].trajectories:
        assert len(trajectory) <= max_context
        assert trajectory.truncated and not trajectory.terminated
        assert [turn.info.get("truncated_by") for turn in trajectory.turns][-1]
        assert not any("truncated_by" in turn.info for turn in trajectory.turns[:-1])
        assert 1 <= len(trajectory.turns) < 5 and trajectory.loss_mask[-1]
    free = collect(engine, renderer, tasks[:1], PlaySettings(512, 1.0, 0))[0].trajectories[0]
    second = free.turns[1].start
    for max_context, sampled in (
        (second, 0),
        (second + 1, 1),
    ):  # no room at all, room for one token
        cut = collect(engine, renderer, tasks[:1], PlaySettings(max_context, 1.0, 0))[
            0
        ].trajectories[0]
        assert cut.tokens == free.tokens[: second + 1 if sampled else free.turns[0].end]
        assert len(cut.turns) == 1 + sampled and cut.turns[-1].info["truncated_by"] == "context"
    tight = collect(engine, renderer, tasks, PlaySettings(prompt + 3, 1.0, 0))[0].trajectories
    assert all(len(trajectory) <= prompt + 3 for trajectory in tight)
    with pytest.raises(ValueError, match=f"has {prompt} tokens and max_context_length is {prompt}"):
        collect(engine, renderer, tasks, PlaySettings(prompt, 1.0, 0))


class BrokenEpisode(Episode):
    """An environment that fails in its second turn for some seeds."""

    def respond(self, text: str) -> TurnResult:
        if self._num_turns == 1:
            raise KeyError("lost connection")
        return super().respond(text)


def test_an_environment_that_raises_costs_one_trajectory(
    engine: RecordingEngine, renderer: ChatRenderer
) -> None:
    def broken() -> Episode:
        return BrokenEpisode(make("frozen_lake"), COMPACT)

    healthy, other = lake_tasks(1, 2)
    groups = collect(
        engine,
        renderer,
        [healthy, replace(other, make_episode=broken)],
        PlaySettings(512, 1.0, 0),
    )
    fine, failed = groups[0].trajectories
    assert len(fine.turns) == 5 and "error" not in fine.turns[-1].info
    assert (
        len(failed.turns) == 2 and failed.truncated and not failed.terminated and not failed.success
    )
    assert (
        failed.turns[-1].info["error"].startswith("KeyError: 'lost connection' (in respond, ")
        and failed.turns[-1].reward == 0.0
    )
    assert summarize(groups)["environment_errors"] == 1.0


def test_an_episode_that_cannot_start_ends_the_rollout(
    engine: RecordingEngine, renderer: ChatRenderer
) -> None:
    tasks = tasks_for_group(0, "frozen_lake", 0, frozen_lake(), group_size=3, board=("SF", "FX"))
    with pytest.raises(ValueError, match="board"):
        collect(engine, renderer, tasks, PlaySettings(512, 1.0, 0))


def test_tasks_of_a_group_share_all_but_their_outcomes() -> None:
    tasks = tasks_for_group(
        3, "frozen_lake", 11, frozen_lake(), group_size=4, outcome_seed=2, board=list(BOARD)
    )
    assert len({task.outcome_seed for task in tasks}) == 4
    assert {replace(task, outcome_seed=0) for task in tasks} == {replace(tasks[0], outcome_seed=0)}
    again = tasks_for_group(
        3, "frozen_lake", 11, tasks[0].make_episode, group_size=4, outcome_seed=2, board=BOARD
    )
    assert again == tasks
    with pytest.raises(ValueError, match="group_size"):
        tasks_for_group(3, "frozen_lake", 11, frozen_lake(), group_size=0)
    assert collect(ScriptedEngine(None, None), None, [], PlaySettings(2, 1.0, 0)) == []


def test_every_step_and_round_has_tasks_of_its_own() -> None:
    """No group number comes twice, for it seeds what is sampled, and no initial state by design;
    another seed of the run has others, and the same one the same.
    """
    flags = "--environments bandit --num-groups 3 --group-size 2 --max-sampling-rounds 2"
    flags += " --filter-strategy top_k --filter-value 1"

    def drawn(seed: int) -> list[list[tuple[int, int]]]:
        sampler = TaskSampler(parse([*flags.split(), "--seed", str(seed)]))
        rounds = [sampler.sample(step, again) for step in (0, 1, 2) for again in (0, 1)]
        return [[(group[0].group_id, group[0].seed) for group in groups] for groups in rounds]

    ids, seeds = zip(*(task for groups in drawn(0) for task in groups))
    assert ids == tuple(range(18)) and len(set(seeds)) == 18
    assert min(seeds) >= TRAINING_SEEDS[0] > max(held_out_seeds("bandit", make("bandit"), 10_000))
    assert drawn(0) == drawn(0)
    assert not {seed for groups in drawn(1) for _, seed in groups} & set(seeds)


def one_lake_varies(group: TrajectoryGroup) -> list[float]:
    """Returns that differ in every group of the bandit, and of the lake in group 9 alone."""
    varies = group.trajectories[0].environment == "bandit" or group.group_id == 9
    return [float(varies and index == 0) for index in range(len(group.trajectories))]


@pytest.mark.parametrize(("bound", "rounds"), [(2, 2), (5, 3)])
def test_groups_are_sampled_until_enough_of_each_environment_have_spread(
    bound: int, rounds: int, renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Varied groups of one environment do not replace constant groups of another environment."""
    flags = "--environments bandit,frozen_lake --max-turns 1 --num-groups 4 --group-size 2"
    flags += f" --filter-strategy top_fraction --filter-value 0.5 --max-sampling-rounds {bound}"
    config = parse([*flags.split(), "--reward", f"{__name__}:one_lake_varies"])
    engine, tasks = ScriptedEngine(tokenizer, lambda session, turn: "?"), TaskSampler(config)
    engine.num_slots, engine.shard = 8, None
    sampling = Sampling(
        config,
        engine,
        renderer,
        tasks,
        Console(is_writer=False, num_steps=0),
        say=lambda text: None,
        interrupt=lambda: None,
        stop_if_asked=lambda: None,
        send_again=lambda: None,
    )
    groups = sampling.sample(0, tasks.sample(0))
    assert [group.group_id for group in groups] == [*range(4 * rounds)]
    _, samples, _ = shape_on_main(groups, config.advantage.reward_terms)
    kept = choose_groups(samples, config, len(groups), share=1.0)
    assert [group.group_id for group in kept] == [0, 9][: rounds - 1]


@pytest.mark.parametrize(
    "change", ["--filter-value 2", "--filter-strategy top_fraction", "--reward environment+format"]
)
def test_what_decides_the_number_of_rounds_is_an_origin_of_the_rollout(change: str) -> None:
    once = "--environments bandit --filter-strategy top_k --filter-value 1".split()

    def origin(*flags: str) -> dict[str, Any]:
        return origin_of(parse([*once, *flags]), [], "weights", 1)

    rounds = ("--max-sampling-rounds", "3")
    assert origin(*rounds) == origin(*rounds) != origin(*rounds, *change.split())
    assert origin() == origin(*change.split()), "one round is the same under another filter"


def trajectory_of(
    environment: str, rewards: Sequence[float], *, success: bool, truncated: bool
) -> Trajectory:
    trajectory = Trajectory(group_id=0, environment=environment, truncated=truncated)
    for index, reward in enumerate(rewards):
        info = {
            "is_format_valid": index == 0,
            "is_action_valid": False,
            "thought": "two words" if index == 0 else "",
        } | ({"claims": (index, 2)} if environment == "frozen_lake" and index else {})
        trajectory.turns.append(Turn(10 * index, 10 * index + 3 + index, reward, info))
    trajectory.turns[-1].info["success"] = success
    return trajectory


def test_summary_by_hand() -> None:
    lake = TrajectoryGroup(
        0,
        [
            trajectory_of("frozen_lake", [0.0, 1.0], success=True, truncated=False),
            trajectory_of("frozen_lake", [-0.1, -0.1, -0.2], success=False, truncated=True),
        ],
    )
    bandit = TrajectoryGroup(
        1, [trajectory_of("bandit", [0.1], success=False, truncated=False)] * 2
    )
    expected = {
        "success": 0.5,
        "reward": 0.3,
        "in_group_std": 1.4 / 2**0.5,  # of 1 and -0.4, unbiased
        "response_length": (3 + 4 + 3 + 4 + 5) / 5,
        "thought_length": 2 * 2 / 5,
        "true_claims": (1 + 1 + 2) / 6,
        "valid_format_rate": 2 / 5,
        "valid_action_rate": 0.0,
        "num_turns": 2.5,
        "cut_answer_rate": 0.0,
        "truncated_rate": 0.5,
        "truncated_by_budget": 0.5,
        "truncated_by_environment": 0.0,
        "truncated_by_context": 0.0,
        "truncated_by_time": 0.0,
        "truncated_by_error": 0.0,
        "num_trajectories": 2.0,
        "sampled_tokens": 19.0,
        "environment_errors": 0.0,
        "resampled": 0.0,
        "lost_trajectories": 0.0,
        "entropy": 0.0,  # these trajectories have no log-probabilities
        "entropy_variance": 0.0,
    }
    assert summarize([lake]) == pytest.approx(expected)
    both = summarize([lake, bandit])
    assert {key: both[f"{key}/frozen_lake"] for key in expected} == pytest.approx(expected)
    assert both["success"] == 0.25 and both["in_group_std"] == pytest.approx(0.7 / 2**0.5)
    assert both["true_claims"] == pytest.approx(4 / 6) and "true_claims/bandit" not in both
    assert both["reward/bandit"] == pytest.approx(0.1) and both["num_trajectories"] == 4.0
    alone = TrajectoryGroup(2, [trajectory_of("bandit", [0.3], success=True, truncated=False)])
    assert summarize([alone])["in_group_std"] == 0.0
    assert summarize([]) == {}
