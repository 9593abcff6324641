"""Behaviour cloning of a scripted player, so that reinforcement learning starts from the right
format and true thoughts.

The scripted player acts at random (or as well as `skill` says): what is cloned is how to answer and
how to describe the state, not how to play.
"""

import copy
import json
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean

import numpy as np
import torch

from ragen_mega.config import EnvironmentConfig
from ragen_mega.data.packing import count_minibatches, minibatch_ids
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.environments.episode import Episode, TurnResult, failed_turn
from ragen_mega.environments.pool import (
    EnvironmentFailed,
    Worker,
    guarded,
    is_instant,
    late_advice,
    where,
)
from ragen_mega.environments.protocol import Message, Observation
from ragen_mega.environments.reference_players import find_solver
from ragen_mega.environments.scripted import scripted_response
from ragen_mega.ranks.collectives import on_main
from ragen_mega.rollout.context import Context
from ragen_mega.rollout.renderer import ChatRenderer

FitStep = Callable[[TokenBatch], dict[str, float]]
"""One optimizer step on a minibatch, cloning or value regression -> its metrics."""
FLAT_WINDOW = 40
"""Steps whose mean loss is compared with the mean loss of as many steps before."""
MIN_FALL = 0.02
"""Share by which it falls in a window while there is still something to learn."""
NUM_PLAYERS = 64
"""Episodes played at a time in environments that are not instant."""


@dataclass(slots=True)
class ScriptedEpisode:
    """Record of an episode, up to the failure of its environment, if it failed."""

    seed: int
    messages: list[Message] = field(default_factory=list)
    """The first messages; none if the environment could not begin."""
    initial_state: Observation = ""
    """First observation of the environment, which distinguishes boards."""
    begun: Episode = field(init=False, repr=False)
    """The episode as it began, of which its prompts are made; unset if it could not begin."""
    turns: list[tuple[str, TurnResult]] = field(default_factory=list)
    """Responses of the player, each with its result."""
    error: str | None = None
    is_of_answer: bool = False
    """Whether the error was raised in a method of the environment that an answer was given to."""

    @property
    def is_answered(self) -> bool:
        """Whether the environment has taken a turn."""
        return len(self.turns) > (self.error is not None)


def always_fails(name: str, played: ScriptedEpisode) -> str:
    """Say that no episode of environment `name` has a turn, of which `played` is one."""
    error = played.error or ""
    can_draw = played.is_of_answer and hasattr(played.begun.environment, "parse")
    return (
        f"environment {name} fails whatever is done, e.g. from seed {played.seed}: {error}"
        + (late_advice(name, error) or "; mend it")
        + ", or let random_answer(draw) return what its parse reads" * can_draw
    )


class _Player:
    """Plays one episode after the other with one environment, in a thread and within time limits
    unless it is instant.
    """

    def __init__(self, make_episode: Callable[[], Episode], timeout: float) -> None:
        self._worker = Worker(timeout)
        self.episode = self._worker.build("of the warm start", make_episode)
        self.is_instant = is_instant(self.episode.environment)
        self._ask = guarded if self.is_instant else self._worker.wait

    def play(
        self, played: ScriptedEpisode, skill: float, max_turns: int | None, in_sentences: bool
    ) -> None:
        """Write an episode into `played`. Raises EnvironmentFailed where the environment does."""
        episode, seed = self.episode, played.seed
        start = partial(episode.start, seed, outcome_seed=seed)
        played.messages = self._ask(start)
        played.initial_state = episode.observation
        played.begun = copy.copy(episode)  # the next seed begins another one in it
        generator = np.random.default_rng([seed, 1])
        say = partial(scripted_response, episode, generator, skill=skill, in_sentences=in_sentences)
        while not episode.done and len(played.turns) != max_turns:
            response = self._ask(say)
            try:
                result = self._ask(partial(episode.respond, response))
            except EnvironmentFailed as error:
                played.turns.append((response, failed_turn(error)))
                cause = error.__cause__  # none where a time limit was exceeded
                played.is_of_answer = cause is not None and bool(where(cause))
                raise
            played.turns.append((response, result))

    def close(self) -> None:
        self._worker.end(self.episode.close)


def scripted_episodes(
    make_episode: Callable[[], Episode],
    seeds: Sequence[int],
    *,
    skill: float,
    name: str | None = None,
    timeout: float = EnvironmentConfig.environment_timeout,
    max_turns: int | None = None,
    in_sentences: bool = False,
    is_part: bool = False,
) -> Iterator[ScriptedEpisode]:
    """Yield the first `max_turns` turns (None: all) of scripted episodes, in order of their seeds;
    `in_sentences` is as in `scripted_response`. `name`: the environment's in messages (default: the
    name of its class).

    Environments that are not instant play many episodes at a time, with `timeout` seconds per call,
    and are reused. Raises ValueError if the environment cannot be built or none of the first
    episodes has a turn; not the latter if they are only a part (`is_part`) of what ranks play.
    """
    first = _Player(make_episode, timeout)
    name = name or type(first.episode.environment).__name__
    if skill > 0:
        find_solver(first.episode.environment)  # raises where there is none
    free: queue.SimpleQueue[_Player] = queue.SimpleQueue()
    free.put(first)

    def play(seed: int) -> ScriptedEpisode:
        played, player = ScriptedEpisode(seed), None
        try:
            try:
                player = free.get_nowait()
            except queue.Empty:
                player = _Player(make_episode, timeout)
            player.play(played, skill, max_turns, in_sentences)
            free.put(player)
        except (EnvironmentFailed, ValueError) as error:
            played.error = str(error)
            if player is not None:
                player.close()
        return played

    threads = None if first.is_instant else ThreadPoolExecutor(NUM_PLAYERS)
    try:
        answered = 0
        episodes = threads.map(play, seeds) if threads else map(play, seeds)
        for index, played in enumerate(episodes, start=1):
            answered += played.is_answered
            if not (answered or is_part) and index in (NUM_PLAYERS, len(seeds)):
                raise ValueError(always_fails(name, played))
            yield played
    finally:
        if threads:  # episodes that nobody will take are not begun
            threads.shutdown(cancel_futures=True)
        while not free.empty():
            free.get().close()


def scripted_texts(
    make_episode: Callable[[], Episode],
    seeds: Sequence[int],
    *,
    skill: float,
    name: str | None = None,
    timeout: float = EnvironmentConfig.environment_timeout,
) -> list[str]:
    """Return everything that is said in scripted episodes, one string per message: the corpus of
    the tokenizer.
    """
    # The chat template's words, as often as they will occur.
    texts = ["system\nuser\nassistant\n"] * len(seeds)
    for played in scripted_episodes(make_episode, seeds, skill=skill, name=name, timeout=timeout):
        texts.extend(said_in(played))
    return texts


def said_in(played: ScriptedEpisode) -> Iterator[str]:
    """Yield the tools and messages of an episode, each as the text that the policy sees."""
    tools = played.messages and played.begun.tools or ()
    yield from (json.dumps(tool, ensure_ascii=False) for tool in tools)
    yield from (message.text for message in played.messages)
    for response, result in played.turns:
        yield response
        yield from (message.text for message in result.messages)


def as_trajectory(
    played: ScriptedEpisode, renderer: ChatRenderer, name: str, *, max_context: int, window: int
) -> Trajectory:
    """Return the episode in tokens; the loss mask covers what the player says. As in a rollout the
    policy sees a `window` of turns (0: all), and the trajectory ends before an answer that would
    not fit into `max_context` tokens.
    """
    seed = played.seed
    trajectory = Trajectory(group_id=seed, environment=name, seed=seed, outcome_seed=seed)
    context = Context(renderer, played.begun, window)
    observation, afresh = context.begin(played.messages), False
    for response, result in played.turns:
        tokens = renderer.encode_answer(response)
        if len(context.tokens) + len(tokens) > max_context:
            trajectory.truncated = True
            break
        trajectory.append_observation(observation, afresh=afresh)
        context.answer(tokens)
        turn = trajectory.append_action(Completion(tokens, [0.0] * len(tokens), "stop"))
        turn.reward, turn.info = result.reward, result.info
        if result.messages:
            observation, afresh = context.go_on(result.messages)
    return trajectory


def recorded_trajectory(
    conversation: Sequence[Message], renderer: ChatRenderer, name: str, *, max_context: int
) -> Trajectory:
    """Return a conversation in tokens; the loss mask covers what the assistant says. It ends before
    an answer that would not fit into `max_context` tokens.
    """
    trajectory = Trajectory(group_id=0, environment=name, seed=0, outcome_seed=0)
    before: list[Message] = []
    for message in conversation:
        if message.role != "assistant":
            before.append(message)
            continue
        if trajectory.turns:
            observation = renderer.observe(before, True)
        else:
            observation = renderer.start(before)
        tokens = renderer.encode_answer(message.text)
        if len(trajectory) + len(observation) + len(tokens) > max_context:
            trajectory.truncated = True
            break
        trajectory.append_observation(observation)
        trajectory.append_action(Completion(tokens, [0.0] * len(tokens), "stop"))
        before = []
    return trajectory


def fit(
    step: FitStep,
    batch: TokenBatch,
    *,
    batch_size: int,
    num_steps: int,
    seed: int,
    report: Callable[[dict[str, float]], None],
    until_flat: bool = False,
) -> int:
    """Take `num_steps` optimizer steps over the trajectories of `batch`, in as many passes as that
    takes; or fewer, until their loss is flat. Returns how many. Collective.
    """
    generator = torch.Generator().manual_seed(seed)
    passes = -(-num_steps // count_minibatches(batch.num_trajectories, batch_size))
    drawn = minibatch_ids(batch.num_trajectories, batch_size, passes, generator)
    losses: list[float] = []
    for ids in islice(drawn, num_steps):
        result = step(batch.select(ids))
        report(result)
        losses.append(result["loss"])
        if until_flat and len(losses) % FLAT_WINDOW == 0 and on_main(partial(is_flat, losses)):
            break
    return len(losses)


def is_flat(losses: Sequence[float]) -> bool:
    """Return whether the loss fell by less than MIN_FALL between the last two windows."""
    if len(losses) < 2 * FLAT_WINDOW:
        return False
    before, last = losses[-2 * FLAT_WINDOW : -FLAT_WINDOW], losses[-FLAT_WINDOW:]
    return fmean(last) > (1 - MIN_FALL) * fmean(before)
