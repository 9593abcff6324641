"""Scripted play before anything is trained: what its answers need, and whether the world reads
them and the limits hold them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch

from ragen_mega.agents.examples import example_play, example_texts
from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.filters import filter_groups, has_return
from ragen_mega.algorithm.rewards import shape_rewards
from ragen_mega.algorithm.tables import ESTIMATORS, FILTERS
from ragen_mega.config import RolloutConfig, StarPOConfig
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import ERROR, PROBLEM, TRUNCATED_BY
from ragen_mega.environments.pool import describe_failures
from ragen_mega.environments.random_player import is_drawn
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.report.step_metrics import custom_metrics
from ragen_mega.rollout.renderer import ChatRenderer, load_renderer
from ragen_mega.rollout.tasks import SCRIPTED_SEEDS, episode_maker, reference_notes
from ragen_mega.storage.model_sources import local_directory
from ragen_mega.warm_start.clone import (
    ScriptedEpisode,
    as_trajectory,
    said_in,
    scripted_episodes,
)

EPISODES = 32
"""Scripted episodes of each environment."""
MIN_READ = 0.9
"""Share of the scripted answers that an environment must be able to read."""
_LENGTH = 2
"""Length of an answer that a context has room for, over the longest of scripted play."""
_ROUNDED = 64
"""A fitted context is a multiple of so many tokens."""


def fit_context(config: StarPOConfig) -> StarPOConfig:
    """`config` with a `max_context_length` that holds all turns (of a window): their observations
    in scripted play, and answers of twice its length; where a model is loaded, whose answers are
    its own, of `max_response_length`. Never above the given one.
    """
    trained, evaluated = config.environment.shares, config.environment.evaluated
    played = {
        name: [episode for episode in rehearse(config, name) if episode.turns]
        for name in evaluated
        if not is_agent(name)
    }
    if config.model.load is not None:
        directory = str(local_directory(config.model.load))
        renderer = load_renderer(directory, think=config.environment.think)
    else:
        texts = [
            text
            for name in trained
            for text in (example_texts(config, name) if is_agent(name) else _texts(played[name]))
        ]
        renderer = ChatRenderer(train_tokenizer(texts), think=config.environment.think)
    agents = [_needed_by_agent(config, renderer, name) for name in evaluated if is_agent(name)]
    needed = max(*agents, *(_needed(config, renderer, each) for each in played.values()), 0)
    length = min(config.rollout.max_context_length, -(-needed // _ROUNDED) * _ROUNDED)
    return replace(config, rollout=replace(config.rollout, max_context_length=length))


def rehearse(config: StarPOConfig, name: str) -> Iterator[ScriptedEpisode]:
    """Return scripted episodes of an environment, with thoughts in the words that the policy will
    see or imitate.
    """
    return scripted_episodes(
        episode_maker(config.environment, name),
        range(SCRIPTED_SEEDS, SCRIPTED_SEEDS + EPISODES),
        skill=config.warm_start.warm_start_skill,
        name=name,
        timeout=config.environment.environment_timeout,
        in_sentences=config.model.load is not None,
    )


def _texts(played: Sequence[ScriptedEpisode]) -> Iterator[str]:
    yield "system\nuser\nassistant\n"
    for episode in played:
        yield from said_in(episode)


def _needed(config: StarPOConfig, renderer: ChatRenderer, played: Sequence[ScriptedEpisode]) -> int:
    """Return tokens of the longest text that the policy may see."""
    window, needed = config.rollout.context_window, 0
    for episode in played:
        answer = episode.begun.budget.max_response_length
        if config.model.load is None:
            answer = min(answer, _LENGTH * max(_answer_lengths(renderer, episode)))
        messages = [result.messages for _, result in episode.turns if result.messages]
        seen = max((len(renderer.observe(each, True)) for each in messages), default=0)
        turns = episode.begun.budget.max_turns
        turns = min(turns, window or turns)
        first = len(renderer.start(episode.messages, episode.begun.tools))
        needed = max(needed, first + turns * answer + (turns - 1) * seen)
    return needed


def _needed_by_agent(config: StarPOConfig, renderer: ChatRenderer, name: str) -> int:
    """Return tokens of the longest text that an agent shows the policy, if answers are twice as
    long as the answers of its example.
    """
    if config.agent.agent_example is None:
        return config.rollout.max_context_length
    needed = 0
    for trajectory in example_play(config, name, renderer, range(EPISODES)).values():
        for start, end in trajectory.segments:
            needed = max(needed, end - start + (_LENGTH - 1) * sum(trajectory.loss_mask[start:end]))
    return needed


def check_play(config: StarPOConfig, renderer: ChatRenderer) -> list[str]:
    """Return lines about references that score nothing, errors in scripted play, and limits that it
    does not fit into. Raises ValueError if an environment cannot read the answers of scripted play,
    or a reward, estimator, filter or metric of the user's fails on it or answers with something
    else.
    """
    notes = reference_notes(config.environment)
    for name in config.environment.worlds:
        rehearsed = list(rehearse(config, name))
        failures = [(each.seed, each.error) for each in rehearsed if each.error is not None]
        if errors := describe_failures(name, "scripted", len(rehearsed), failures):
            notes.append(errors)
        if played := [episode for episode in rehearsed if episode.turns]:
            unread = _unreadable_note(name, played)
            # Without a warm start nobody imitates scripted play, and it may guess at the form.
            if unread and (config.has_warm_start or is_drawn(played[0].begun)):
                raise ValueError(unread)
            rollout = config.rollout
            room, window = rollout.max_context_length, rollout.context_window
            held = [
                as_trajectory(episode, renderer, name, max_context=room, window=window)
                for episode in played
            ]
            _try_plug_ins(config, _scripted_groups(rollout, held))
            said = (
                _context_note(rollout, held, played),
                _answer_note(renderer, played),
                _budget_note(played),
            )
            notes += ([unread] if unread else []) + [f"{name}: {note}" for note in said if note]
    return notes


def _unreadable_note(name: str, played: Sequence[ScriptedEpisode]) -> str | None:
    """Describe the failure of an environment to read the answers of scripted play."""
    turns = [turn for episode in played for turn in episode.turns if ERROR not in turn[1].info]
    bad = [turn for turn in turns if not turn[1].info["is_format_valid"]]
    if len(bad) <= (1 - MIN_READ) * len(turns):
        return None
    response, result = bad[0]
    answer = response.partition("</think>")[2].strip() or response
    return (
        f"{name} must read {MIN_READ:.0%} of the answers of scripted play, and reads"
        f" {len(turns) - len(bad)} of {len(turns)}: of {answer!r:.200} its parse says"
        f" {result.info.get(PROBLEM) or 'nothing'!r:.200}; mend parse, or let random_answer(draw)"
        " and a solver's optimal_actions return what it reads"
    )


def _scripted_groups(
    rollout: RolloutConfig, trajectories: Sequence[Trajectory]
) -> list[TrajectoryGroup]:
    """Make the groups of a step, all of one size, of the given trajectories, over and over."""
    samples = [each for each in trajectories if each.turns and has_return(each)]
    members, size = cycle(samples), rollout.group_size
    return [
        TrajectoryGroup(
            index, [replace(member, group_id=index) for member in islice(members, size)]
        )
        for index in range(rollout.num_groups if samples else 0)
    ]


def _try_plug_ins(config: StarPOConfig, groups: Sequence[TrajectoryGroup]) -> None:
    """Raise PlugInError, in one line, as a step would, for a function of the user's that fails."""
    if not groups:
        return
    shaped, _ = shape_rewards(groups, config.advantage.reward_terms)
    custom_metrics(groups, config.logging.metric_names)
    strategy = config.filter.filter_strategy
    if not FILTERS.is_packaged(strategy):
        filter_groups(shaped, strategy=strategy, value=config.filter.value, keep_zero=True)
    name = config.advantage.advantage_estimator
    if not ESTIMATORS.is_packaged(name):
        trajectories = [member for group in shaped for member in group.trajectories]
        batch = pack(trajectories)
        zeros = torch.zeros(batch.num_positions)
        batch = batch.with_fields(values=zeros, old_logprobs=zeros, ref_logprobs=zeros)
        estimate_advantages(batch, trajectories, config.advantage)


def _context_note(
    rollout: RolloutConfig, held: Sequence[Trajectory], played: Sequence[ScriptedEpisode]
) -> str | None:
    cut = [
        (len(trajectory.turns), len(episode.turns))
        for trajectory, episode in zip(held, played, strict=True)
        if trajectory.truncated
    ]
    if not cut:
        return None
    held_turns, turns = min(cut)
    return (
        f"context {rollout.max_context_length} holds {held_turns} of {turns} turns of scripted"
        f" play, and cuts {len(cut)} of {len(played)} episodes; raise it by"
        f" {rollout.longer_context}, lower --max-turns or give --context-window"
    )


def _answer_note(renderer: ChatRenderer, played: Sequence[ScriptedEpisode]) -> str | None:
    limit = played[0].begun.budget.max_response_length
    lengths = [length for episode in played for length in _answer_lengths(renderer, episode)]
    num_cut = sum(length > limit for length in lengths)
    if not num_cut:
        return None
    return (
        f"{num_cut} of {len(lengths)} answers of scripted play are longer than"
        f" --max-response-length {limit}, up to {max(lengths)} tokens; raise it"
    )


def _budget_note(played: Sequence[ScriptedEpisode]) -> str | None:
    """Describe an environment in which no scripted episode ends by itself, and for which no solver
    says that better play does.
    """
    first = played[0].begun
    ends = {episode.turns[-1][1].info.get(TRUNCATED_BY) for episode in played}
    if ends != {"budget"} or getattr(first.environment, "solver", None):
        return None
    return (
        f"the budget ({first.budget.max_turns} turns, {first.budget.action_budget} actions) cuts"
        f" all {len(played)} episodes of scripted play; raise --max-turns or --max-actions if the"
        " task needs more"
    )


def _answer_lengths(renderer: ChatRenderer, episode: ScriptedEpisode) -> list[int]:
    """Return tokens of each answer, its end included."""
    encode = renderer.tokenizer.encode
    return [len(encode(said, add_special_tokens=False)) + 1 for said, _ in episode.turns]
