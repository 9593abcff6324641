"""A policy that sees a window of its turns: what it saw is what is stored, trained on, credited."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.filters import filter_groups
from ragen_mega.config import AdvantageConfig, parse
from ragen_mega.data.packing import microbatches, minibatch_ids, pack
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import Message
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.planning.time import Play
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import tasks_for_group
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.rounding import exact_logprobs
from tests.support.small_policy import tiny_qwen2

WINDOW, TURNS = 3, 7


class Clock:
    """Says how late it is, whatever is said to it."""

    is_instant = True
    instruction = "Tell the time."
    max_turns = TURNS

    def reset(self, seed):
        self.now = 0
        self.luck = random.Random(seed)
        return "time 0"

    def step(self, text):
        self.now += 1
        return f"time {self.now}", 1.0, self.now >= TURNS, False, {}

    def parse(self, text):
        return text


def episode(style: str = "system") -> Episode:
    return Episode(Clock(), EpisodeConfig(prompt_style=style, think=False, max_response_length=6))


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    words = "system user assistant Tell the time You have turns left Reward State Turn 0 1 2 3 4 5"
    return ChatRenderer(train_tokenizer([words] * 9), think=False)


@pytest.fixture(scope="module")
def model(renderer: ChatRenderer) -> Qwen2ForCausalLM:
    return tiny_qwen2(len(renderer.tokenizer))


class Listener(EmbeddedEngine):
    """Keeps every prompt that it was asked to go on from."""

    asked: list[tuple[int, list[int]]]

    async def generate(self, tokens, sampling, *, session):
        self.asked.append((session, list(tokens)))
        return await super().generate(tokens, sampling, session=session)


@pytest.fixture(scope="module")
def played(
    renderer: ChatRenderer, model: Qwen2ForCausalLM
) -> Iterator[tuple[list[TrajectoryGroup], list[tuple[int, list[int]]]]]:
    engine = Listener(model.config, max_context=1024, max_sessions=16)
    engine.asked = []
    tasks = [
        task
        for group in range(3)
        for task in tasks_for_group(group, "clock", group, episode, group_size=4)
    ]
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        settings = PlaySettings(1024, 1.0, 0, context_window=WINDOW)
        yield collect(engine, renderer, tasks, settings), engine.asked


def test_a_prompt_is_the_task_and_the_turns_of_the_window(renderer: ChatRenderer, played) -> None:
    groups, asked = played
    trajectories = [one for group in groups for one in group.trajectories]
    for session, trajectory in enumerate(trajectories):
        prompts = [tokens for owner, tokens in asked if owner == session]
        again = episode()
        (system, first), answers = again.start(trajectory.seed), []
        turns = [[first]]
        for index, (turn, prompt) in enumerate(zip(trajectory.turns, prompts, strict=True)):
            # What a chat of the visible turns reads like, rendered as one text.
            oldest = max(0, index + 1 - WINDOW)
            visible = [system]
            for number in range(oldest, index + 1):
                visible += turns[number]
                if number < index:
                    visible.append(Message("assistant", answers[number]))
            text = renderer.tokenizer.apply_chat_template(
                [{"role": one.role, "content": one.content} for one in visible],
                tokenize=False,
                add_generation_prompt=True,
            )
            raw = renderer.tokenizer.decode(prompt)
            assert raw == text
            sampled = trajectory.tokens[turn.start : turn.end]
            answers.append(renderer.tokenizer.decode(sampled).removesuffix("<|im_end|>"))
            turns.append(list(again.respond(renderer.decode_action(sampled)).messages))
        assert len(trajectory.turns) == TURNS
        assert len(trajectory.breaks) == TURNS - WINDOW, "earlier turns go on from one another"


def test_the_predictor_counts_the_tokens_of_real_episodes(played) -> None:
    """What the engine was asked for and had to read, and what is trained on, counted token by token
    and as the predictor has it for turns of this length.
    """
    groups, asked = played
    trajectories = [one for group in groups for one in group.trajectories]
    first, grown, read, sampled = 0, 0, 0, 0
    for session, trajectory in enumerate(trajectories):
        prompts = [tokens for owner, tokens in asked if owner == session]
        held: list[int] = []  # what the engine has computed of this trajectory
        for number, (turn, prompt) in enumerate(zip(trajectory.turns, prompts, strict=True)):
            goes_on = prompt[: len(held)] == held
            assert goes_on == (number < WINDOW)
            read += len(prompt) - len(held) * goes_on
            first += len(prompt) * (number == 0)
            grown += (len(prompt) - len(held)) * (0 < number < WINDOW)
            held = prompt + trajectory.tokens[turn.start : turn.end]
            sampled += turn.end - turn.start
    count = len(trajectories)
    task_and_turns = (first + grown) / count  # of the environment, in the first window
    play = Play(TURNS, task_and_turns / WINDOW, sampled / count / TURNS, window=WINDOW)
    trained = sum(len(one) for one in trajectories) / count
    texts = sum(len(one.segments) for one in trajectories) / count
    longest = max(end - start for one in trajectories for start, end in one.segments)
    assert play.texts == texts and play.sampled == pytest.approx(sampled / count)
    assert play.length == pytest.approx(trained, rel=0.01)
    assert play.read == pytest.approx(read / count, rel=0.01)
    assert play.text_length == pytest.approx(longest, rel=0.05)
    whole = replace(play, window=0)
    assert play.read > 1.5 * whole.read and play.length > 1.5 * whole.length


def test_every_logprob_is_that_of_the_token_under_what_the_policy_saw(
    renderer: ChatRenderer, model: Qwen2ForCausalLM, played
) -> None:
    played_groups, asked = played
    trajectories = [one for group in played_groups for one in group.trajectories]
    batch = pack(trajectories)
    config = parse(["--environments", "bandit", "--max-tokens-per-microbatch", "200"])
    groups = initialize(config.parallel, 0)
    policy = MegatronPolicy(
        model.config, groups, config.parallel, config.train, config.loss, temperature=1.0
    )
    policy.load_weights(lambda name: model.state_dict().get(name))
    ours = policy.logprobs(batch)
    expected, recorded, bounds = [], [], []
    for session, trajectory in enumerate(trajectories):
        prompts = [tokens for owner, tokens in asked if owner == session]
        for turn, prompt in zip(trajectory.turns, prompts, strict=True):
            answer = trajectory.tokens[turn.start : turn.end]
            exact, bound = exact_logprobs(model, prompt + answer, 1.0)
            rows = exact[len(prompt) - 1 : -1]
            expected.append(rows.gather(-1, torch.tensor(answer)[:, None])[:, 0])
            recorded += trajectory.rollout_logprobs[turn.start : turn.end]
            bounds.append(bound)
    expected, bound = torch.cat(expected), max(bounds)
    # Sampled positions come in the order of the turns.
    for theirs in (ours[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask]):
        torch.testing.assert_close(theirs.double(), expected, atol=bound, rtol=0)
    assert batch.rollout_logprobs[batch.loss_mask].tolist() == pytest.approx(recorded, abs=1e-6)


def whole(trajectory: Trajectory) -> Trajectory:
    """The same answers as if they had been one text."""
    return replace(trajectory, breaks=[])


@pytest.mark.parametrize("name", ["gae", "bilevel_gae", "grpo", "rloo", "reinforce_plus_plus"])
def test_advantages_and_filter_know_nothing_of_segments(name: str, played) -> None:
    generator = torch.Generator().manual_seed(1)
    groups = [
        replace(
            group,
            trajectories=[
                replace(
                    one,
                    turns=[
                        replace(turn, reward=float(torch.randn((), generator=generator)))
                        for turn in one.turns
                    ],
                )
                for one in group.trajectories
            ],
        )
        for group in played[0]
    ]
    trajectories = [one for group in groups for one in group.trajectories]
    settings = AdvantageConfig(
        advantage_estimator=name,
        reward_placement="turn" if name == "bilevel_gae" else "trajectory",
        whiten_advantages=None if name == "reinforce_plus_plus" else False,  # it whitens itself
        gamma=0.99 if name in ("gae", "bilevel_gae") else 1.0,
    )
    results = []
    values = torch.randn(sum(len(one) for one in trajectories), generator=generator)
    for version in (trajectories, [whole(one) for one in trajectories]):
        batch = pack(version)
        assert batch.num_trajectories == len(trajectories)
        spread = torch.zeros(batch.num_positions)
        spread[batch.loss_mask] = values[: int(batch.loss_mask.sum())]
        credited = estimate_advantages(batch.with_fields(values=spread), version, settings)
        results.append(credited.advantages[credited.loss_mask])
    assert torch.equal(*results)
    by_hand = float64_advantages(name, trajectories, values, settings)
    torch.testing.assert_close(results[0].double(), by_hand, atol=1e-5, rtol=1e-5)
    kept = [
        [
            group.group_id
            for group in filter_groups(version, strategy="top_k", value=2, keep_zero=False)
        ]
        for version in (
            groups,
            [replace(g, trajectories=[whole(one) for one in g.trajectories]) for g in groups],
        )
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 2


def float64_advantages(name, trajectories, values, settings) -> torch.Tensor:
    """The formulas over lists of sampled tokens, one trajectory after the other."""
    gamma, lam, result, at = settings.gamma, settings.lam, [], 0
    returns = {id(one): sum(turn.reward for turn in one.turns) for one in trajectories}
    for one in trajectories:
        counts = [turn.end - turn.start for turn in one.turns]
        total = sum(counts)
        own = values[at : at + total].double().tolist()
        at += total
        members = [returns[id(other)] for other in trajectories if other.group_id == one.group_id]
        mean = sum(members) / len(members)
        if name == "grpo":
            deviation = torch.tensor(members, dtype=torch.float64).std()
            result += [float((returns[id(one)] - mean) / deviation)] * total
        elif name == "rloo":
            others = (sum(members) - returns[id(one)]) / (len(members) - 1)
            result += [returns[id(one)] - others] * total
        elif name == "gae":
            carried, after, row = 0.0, 0.0, []
            for index in reversed(range(total)):
                reward = returns[id(one)] if index == total - 1 else 0.0
                carried = reward + gamma * after - own[index] + gamma * lam * carried
                after = own[index]
                row.append(carried)
            result += row[::-1]
        elif name == "bilevel_gae":
            ends = [sum(counts[: k + 1]) - 1 for k in range(len(counts))]
            rows, carried, after = [], 0.0, 0.0
            for k in reversed(range(len(counts))):
                here = own[ends[k]]
                carried = one.turns[k].reward + 0.95 * after - here + 0.95 * carried
                after, inside, row = here, carried, [carried]
                for index in reversed(range(ends[k] - counts[k] + 1, ends[k])):
                    inside = gamma * own[index + 1] - own[index] + gamma * lam * inside
                    row.append(inside)
                rows = row[::-1] + rows
            result += rows
        else:
            result += [returns[id(one)]] * total
    exact = torch.tensor(result, dtype=torch.float64)
    if name == "reinforce_plus_plus":
        exact = (exact - exact.mean()) / exact.std()
    return exact


def test_parts_of_a_batch_keep_their_segments(played) -> None:
    trajectories = [one for group in played[0] for one in group.trajectories]
    batch = pack(trajectories)
    spans = [one.tokens[start : end - 1] for one in trajectories for start, end in one.segments]
    assert texts(batch.by_segment()) == spans
    assert len(batch.by_segment().group_ids) == len(spans)
    for ids in ([5], [7, 0, 3], list(range(12))):
        chosen = batch.select(ids)
        assert (
            chosen.cu_seqlens.tolist() == pack([trajectories[i] for i in ids]).cu_seqlens.tolist()
        )
        assert texts(chosen.by_segment()) == [
            trajectories[i].tokens[start : end - 1]
            for i in ids
            for start, end in trajectories[i].segments
        ]
    generator = torch.Generator().manual_seed(0)
    seen = [
        text
        for ids in minibatch_ids(batch.num_trajectories, 4, 1, generator)
        for text in texts(batch.select(ids).by_segment())
    ]
    assert sorted(seen) == sorted(spans)
    segments = batch.by_segment()
    parts = microbatches(segments, 200, range(segments.num_trajectories))
    assert all(int(segments.lengths[part].sum()) <= 200 or len(part) == 1 for part in parts)


def texts(batch) -> list[list[int]]:
    offsets = batch.cu_seqlens.tolist()
    assert all(
        batch.position_ids[start:end].tolist() == list(range(end - start))
        for start, end in zip(offsets, offsets[1:])
        if bool(batch.position_ids[start:end].any())
    )
    return [batch.tokens[start:end].tolist() for start, end in zip(offsets, offsets[1:])]


def test_a_rollout_on_the_disk_keeps_its_segments(played, tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(3, played[0], {"seed": 1})
    assert store.read(3).groups == played[0]


def test_windows_of_other_prompts(renderer: ChatRenderer) -> None:
    full = episode("full")
    _, user = full.start(0)
    message = full.respond("hi").messages[0]
    system, shown = full.beginning([message])
    assert shown.content == user.content.partition("Turn 1:")[0] + message.content
    assert [one.role for one in full.beginning([Message("tool", "x")])] == [
        "system",
        "user",
        "tool",
    ]
    compact = episode("compact")
    compact.start(0)
    assert compact.beginning([message]) == [message]
