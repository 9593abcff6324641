"""Behaviour cloning of a scripted player, so that reinforcement learning starts from the format and
true thoughts.

The scripted player's actions are as good as chance (or as `skill` says): what is cloned is how to
answer and how to describe the state, never how to play.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch

from ragen_mega.data.packing import minibatches
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, TurnResult, failed_turn
from ragen_mega.environments.pool import EnvironmentFailed, guarded
from ragen_mega.environments.protocol import Message
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.warm_start.scripted import scripted_response

FitStep = Callable[[TokenBatch], dict[str, float]]
"""One optimizer step on a minibatch, cloning or value regression -> its metrics."""


def scripted_texts(
    make_episode: Callable[[], Episode], seeds: Sequence[int], *, skill: float
) -> list[str]:
    """Everything that is said in scripted episodes, one string per message: the corpus of the
    tokenizer.
    """
    # The chat template's words, as frequent as they will be.
    texts = ["system\nuser\nassistant\n"] * len(seeds)
    episode = make_episode()
    for seed in seeds:
        texts.extend(message.content for message in _start(episode, seed))
        for response, result in _scripted_turns(episode, seed, skill):
            texts.append(response)
            texts.extend(message.content for message in result.messages)
    calls.close(episode.environment)
    return texts


def scripted_trajectory(
    episode: Episode,
    renderer: ChatRenderer,
    name: str,
    seed: int,
    *,
    skill: float,
    max_turns: int | None = None,
) -> Trajectory:
    """The first `max_turns` turns (None: all) of a scripted episode; the loss mask covers what the
    player says. The episode's environment is closed.
    """
    trajectory = Trajectory(group_id=seed, environment=name, seed=seed, outcome_seed=seed)
    trajectory.append_observation(renderer.start(_start(episode, seed), episode.tools))
    for response, result in _scripted_turns(episode, seed, skill):
        tokens = [
            *renderer.tokenizer.encode(response, add_special_tokens=False),
            renderer.end_of_turn,
        ]
        turn = trajectory.append_action(Completion(tokens, [0.0] * len(tokens), "stop"))
        turn.reward, turn.info = result.reward, result.info
        if not result.messages or len(trajectory.turns) == max_turns:
            break
        trajectory.append_observation(renderer.observe(result.messages, finished_cleanly=True))
    calls.close(episode.environment)
    return trajectory


def _start(episode: Episode, seed: int) -> list[Message]:
    try:
        return guarded(lambda: episode.start(seed, outcome_seed=seed))
    except EnvironmentFailed as error:
        kind = type(episode.environment).__name__
        raise ValueError(f"environment {kind} cannot start from seed {seed}: {error}") from error


def _scripted_turns(episode: Episode, seed: int, skill: float) -> Iterator[tuple[str, TurnResult]]:
    """What the player says and what it leads to; an environment that fails ends the episode."""
    generator = np.random.default_rng([seed, 1])
    while not episode.done:
        response = scripted_response(episode, generator, skill=skill)
        try:
            yield response, guarded(partial(episode.respond, response))
        except EnvironmentFailed as error:
            yield response, failed_turn(error)
            return


def fit(
    step: FitStep,
    batch: TokenBatch,
    *,
    batch_size: int,
    num_steps: int,
    seed: int,
    report: Callable[[dict[str, float]], None],
) -> None:
    """Take `num_steps` optimizer steps over the trajectories of `batch`, in as many passes as that
    needs.
    """
    generator = torch.Generator().manual_seed(seed)
    passes = -(-num_steps * batch_size // batch.num_trajectories) + 1
    drawn = minibatches(batch, batch_size, num_passes=passes, generator=generator)
    for minibatch in islice(drawn, num_steps):
        report(step(minibatch))
