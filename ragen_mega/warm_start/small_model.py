"""Runs without --load: the small model, its tokenizer, and its warm start by imitating scripted
play.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, PretrainedConfig

from ragen_mega.agents.examples import example_play, example_texts
from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.filters import has_return
from ragen_mega.algorithm.rewards import shape_trajectory
from ragen_mega.config import ModelConfig, StarPOConfig, TrainConfig
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.data.packing import pack
from ragen_mega.data.types import TokenBatch, Trajectory
from ragen_mega.environments.episode import Episode
from ragen_mega.environments.examples import read_conversations
from ragen_mega.environments.processes import opened
from ragen_mega.environments.scripted import narration_note
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import ProcessGroupCollection
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import random_weights
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.report.console import Console
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import (
    SCRIPTED_SEEDS,
    episode_config,
    episode_maker,
    held_out_states,
)
from ragen_mega.storage.model_readers import HuggingFaceReader, open_model
from ragen_mega.storage.model_writers import export, save_huggingface
from ragen_mega.storage.run_directory import BASE, WARM_START, WARM_START_CRITIC
from ragen_mega.warm_start.clone import (
    FitStep,
    always_fails,
    as_trajectory,
    fit,
    recorded_trajectory,
    scripted_episodes,
    scripted_texts,
)

TAIL = 0.25
"""Steps on a falling learning rate, as a share of the steps until the loss was flat; flags of steps
bound both together.
"""


class Start(NamedTuple):
    """Directories that training starts from; the critic's is the policy's where there is none."""

    policy: Path
    critic: Path | None


def is_complete(directory: Path) -> bool:
    """Return whether `save_huggingface` has finished there: the weights are its last file."""
    return HuggingFaceReader.is_for(directory)


def find_warm_start(config: StarPOConfig) -> Start | None:
    """Find the result of `warm_start` in an earlier process of this run, or in the run whose warm
    start is taken; None without one. Collective: shared storage may answer each node otherwise.
    """
    critic = config.run_directory / WARM_START_CRITIC if config.warm_starts_critic else None
    start = Start(config.run_directory / WARM_START, critic)
    is_whole = on_main(lambda: all(is_complete(path) for path in start if path is not None))
    return start if is_whole else None


def take_warm_start(config: StarPOConfig, source: Path) -> None:
    """Copy the warm start of the run in `source` into this run, so that it is whole."""
    parts = (BASE, WARM_START, *[WARM_START_CRITIC] * config.warm_starts_critic)
    if all(is_complete(config.run_directory / name) for name in parts):
        return
    for name in parts:  # a base that is there may be of a warm start of this run's own
        unfinished = config.run_directory / f".{name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source / name, unfinished)
        shutil.rmtree(config.run_directory / name, ignore_errors=True)
        unfinished.replace(config.run_directory / name)


def small_model(config: ModelConfig, vocab_size: int) -> PretrainedConfig:
    """Return the configuration of the small model of runs without --load."""
    return AutoConfig.for_model(**config.small_model(vocab_size))


def write_small_model(config: StarPOConfig, directory: Path) -> None:
    """Train the tokenizer on scripted play and write a randomly initialised model beside it."""
    texts: list[str] = []
    vocabulary: list[str] = []
    for name in config.environment.shares:
        if is_agent(name):
            texts += example_texts(config, name)
            continue
        make_episode = episode_maker(config.environment, name)
        texts += scripted_texts(
            make_episode,
            range(200),
            skill=config.warm_start.warm_start_skill,
            name=name,
            timeout=config.environment.environment_timeout,
        )
        with opened(config.environment, name, config.environment.options(name)) as (_, environment):
            vocabulary += getattr(environment, "vocabulary", ())
    tokenizer = train_tokenizer(texts, vocabulary=vocabulary)
    # Rounded so that no layout needs padded vocabulary rows.
    rows = config.parallel.tensor_model_parallel_size * 8
    hf = small_model(config.model, vocab_size=-(-len(tokenizer) // rows) * rows)
    hf.eos_token_id, hf.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    hf.bos_token_id = None
    hf.max_position_embeddings = max(hf.max_position_embeddings, config.rollout.max_context_length)
    weights = random_weights(hf, config.seed_of_warm_start)
    save_huggingface(directory, hf, tokenizer, weights.items(), is_writer=True)


def warm_start(
    config: StarPOConfig,
    hf: PretrainedConfig,
    groups: ProcessGroupCollection,
    renderer: ChatRenderer,
    console: Console,
    base: Path,
) -> Start:
    """Clone the scripted player, or recorded play, into the model in `base`. Collective.

    A small model clones first turns first: in a short context the facts of the state are found
    several times faster, and what is learned there carries over to later turns.
    """
    warm, is_loaded = config.warm_start, config.model.load is not None
    num_steps = warm.warm_start_first_turn_steps + warm.warm_start_steps
    if is_loaded:
        num_steps = warm.sft_steps
    student = MegatronPolicy(
        hf,
        groups,
        config.parallel,
        _schedule(config, num_steps, warm.sft_lr if is_loaded else warm.warm_start_lr),
        config.loss,
        temperature=warm.warm_start_temperature,
    )
    student.load_weights(open_model(base))
    for name in config.environment.worlds:
        with opened(config.environment, name, config.environment.options(name)) as (_, environment):
            note = narration_note(name, Episode(environment, episode_config(config.environment)))
        if note:
            console.say(note)
    count, stages = warm.warm_start_trajectories, []
    if not is_loaded:
        first_turns = scripted_play(
            config, renderer, console, 4 * count, max_turns=warm.warm_start_first_turns
        )
        size = 2 * warm.warm_start_batch
        stages.append((pack(first_turns), warm.warm_start_first_turn_steps, size))
    if warm.sft_file is None:
        episodes = scripted_play(config, renderer, console, count)
    else:
        episodes = recorded_play(config, renderer, warm.sft_file)
    num_last = warm.sft_steps if is_loaded else warm.warm_start_steps
    stages.append((pack(episodes), num_last, warm.warm_start_batch))
    losses = _fit(
        student,
        student.clone,
        stages,
        console,
        "warm start",
        seed=config.seed_of_warm_start,
        until_flat=warm.warm_start_until_flat,
    )
    if is_loaded:
        console.say(
            f"warm start: {len(losses)} optimizer steps on {len(episodes)} trajectories of"
            f" {warm.sft_file or 'scripted play'}; loss {losses[0]:.3f}, at the end"
            f" {losses[-1]:.3f} nats a token"
        )
    start = Start(config.run_directory / WARM_START, None)
    export(start.policy, hf, renderer.tokenizer, student.export_weights())
    if not config.warm_starts_critic:
        return start
    critic = warm_start_critic(config, hf, groups, console, start.policy, episodes)
    directory = config.run_directory / WARM_START_CRITIC
    export(directory, hf, renderer.tokenizer, critic.export_weights(), is_critic=True)
    return start._replace(critic=directory)


def warm_start_critic(
    config: StarPOConfig,
    hf: PretrainedConfig,
    groups: ProcessGroupCollection,
    console: Console,
    start: Path,
    episodes: Sequence[Trajectory],
) -> MegatronCritic:
    """Regress a critic with the weights in `start` to the returns of scripted episodes, which the
    clone would earn too. Collective.
    """
    warm = config.warm_start
    schedule = _schedule(config, warm.warm_start_critic_steps, config.train.lr)
    loss = replace(config.loss, value_clip=None)
    critic = MegatronCritic(hf, groups, config.parallel, schedule, loss)
    critic.load_weights(open_model(start))
    terms = config.advantage.reward_terms
    episodes = [shape_trajectory(each, terms) for each in episodes if has_return(each)]
    batch = pack(episodes)
    zeros = torch.zeros(batch.num_positions)
    batch = batch.with_fields(values=zeros, old_logprobs=zeros)
    # Its policy is the reference, so that a KL in the reward is 0.
    plain = replace(
        config.advantage, lam=1.0, turn_lam=None, kl_in_reward="none", kl_reward_coef=0.0
    )
    batch = estimate_advantages(batch, episodes, plain)
    stages = [(batch, warm.warm_start_critic_steps, 2 * warm.warm_start_batch)]
    title = "warm start of the critic"
    _fit(critic, critic.update, stages, console, title, seed=config.seed_of_warm_start)
    return critic


def _fit(
    model: MegatronPolicy | MegatronCritic,
    step: FitStep,
    stages: Sequence[tuple[TokenBatch, int, int]],
    console: Console,
    title: str,
    *,
    seed: int,
    until_flat: bool = False,
) -> list[float]:
    """Take steps on (batch, number of steps, minibatch size) of each stage, under one progress bar.
    `until_flat`: at most so many, the last of them while the learning rate falls. Returns their
    losses.
    """
    losses: list[float] = []
    stages = [stage for stage in stages if stage[1]] or stages[-1:]
    # Positions of a step, by which it takes its time.
    costs = [size * batch.num_positions / batch.num_trajectories for batch, _, size in stages]
    total = sum(num_steps for _, num_steps, _ in stages)
    with console.progress(title, total) as progress:
        progress.work = sum(
            cost * num_steps for cost, (_, num_steps, _) in zip(costs, stages, strict=True)
        )

        def report(cost: float, metrics: dict[str, float]) -> None:
            losses.append(metrics["loss"])
            model.trainer.schedule.step(1)
            progress.spent += cost
            progress.advance(note=f"loss {metrics['loss']:.3f}")

        taken = 0
        for cost, (batch, num_steps, size) in zip(costs, stages, strict=True):
            fitted = partial(fit, step, batch, batch_size=size, seed=seed)
            num_steps, say = _before_fall(num_steps, until_flat), partial(report, cost)
            taken += fitted(num_steps=num_steps, report=say, until_flat=until_flat)
        if not until_flat:
            return losses
        num_falling = min(round(TAIL * taken), total - taken)
        progress.total = taken + num_falling
        progress.work = progress.spent + num_falling * cost
        left = iter(range(num_falling - 1, -1, -1))

        def fall(metrics: dict[str, float]) -> None:
            report(cost, metrics)
            model.trainer.set_lr_factor(next(left) / num_falling)

        fit(step, batch, batch_size=size, num_steps=num_falling, seed=seed + 1, report=fall)
    return losses


def scripted_play(
    config: StarPOConfig,
    renderer: ChatRenderer,
    console: Console,
    count: int,
    *,
    max_turns: int | None = None,
) -> list[Trajectory]:
    """Return the warm start's data, each rank writing its part; the same list, in the same order,
    on every rank and on any number of ranks. Boards that are evaluated on are not among it. Raises
    ValueError on all ranks if no episode of an environment has a turn.
    """
    names, world_size = list(config.environment.shares), collectives.world_size()
    mine = range(collectives.rank(), count, world_size)
    own: dict[int, Trajectory | None] = {}
    failed: dict[str, str | None] = {}  # environment -> reason, None if an episode has a turn
    with console.progress("scripted play", len(mine)) as progress:
        for place, name in enumerate(names):
            indices = [index for index in mine if index % len(names) == place]
            if is_agent(name):
                own |= example_play(config, name, renderer, indices)
                progress.advance(len(indices))
                continue
            episodes = scripted_episodes(
                episode_maker(config.environment, name),
                [SCRIPTED_SEEDS + index for index in indices],
                skill=config.warm_start.warm_start_skill,
                name=name,
                timeout=config.environment.environment_timeout,
                max_turns=max_turns,
                in_sentences=config.model.load is not None,
                is_part=True,
            )
            held_out = held_out_states(config.environment, name, config.evaluation.boards)
            for index, played in zip(indices, episodes, strict=True):
                if played.is_answered:
                    failed[name] = None
                else:
                    failed.setdefault(name, always_fails(name, played))
                # An environment that failed before the first answer leaves nothing to imitate, and
                # a board that is evaluated on must not be.
                is_left_out = not played.turns or (
                    isinstance(played.initial_state, str) and played.initial_state in held_out
                )
                own[index] = (
                    None
                    if is_left_out
                    else as_trajectory(
                        played,
                        renderer,
                        name,
                        max_context=config.rollout.max_context_length,
                        window=config.rollout.context_window,
                    )
                )
                progress.advance()
    parts, reasons = zip(*collectives.gather_objects((own, failed)), strict=True)
    for name in names:
        if (said := [each[name] for each in reasons if name in each]) and all(said):
            raise ValueError(said[0])
    ordered = (parts[index % world_size][index] for index in range(count))
    written = [episode for episode in ordered if episode is not None]
    return _that_fit(config, written, f"{', '.join(names)} with the answer of scripted play")


def recorded_play(config: StarPOConfig, renderer: ChatRenderer, file: str) -> list[Trajectory]:
    """Return the conversations of `file` as the warm start's data."""
    name, room = next(iter(config.environment.shares)), config.rollout.max_context_length
    written = [
        recorded_trajectory(conversation, renderer, name, max_context=room)
        for conversation in read_conversations(file)
    ]
    return _that_fit(config, written, f"{file} with its answer")


def _that_fit(config: StarPOConfig, written: Sequence[Trajectory], what: str) -> list[Trajectory]:
    """Return the trajectories that have a turn. Raises ValueError if none of them has one."""
    kept = [episode for episode in written if episode.turns]
    if written and not kept:
        raise ValueError(
            f"no first prompt of {what} fits into max_context_length"
            f" {config.rollout.max_context_length}, so that the warm start has nothing to imitate;"
            " raise --max-context-length or shorten the prompt"
        )
    return kept


def _before_fall(num_steps: int, until_flat: bool) -> int:
    """Return how many steps may come before the learning rate falls."""
    return math.ceil(num_steps / (1 + TAIL)) if until_flat else num_steps


def _schedule(config: StarPOConfig, num_steps: int, lr: float) -> TrainConfig:
    """Return the optimizer's settings of a stage of the warm start; `lr` is the policy's."""
    return replace(
        config.train,
        lr=lr,
        decoupled_lr=None,
        critic_lr=config.warm_start.warm_start_critic_lr,
        lr_decay="constant" if config.warm_start.warm_start_until_flat else "cosine",
        lr_warmup=_before_fall(num_steps, config.warm_start.warm_start_until_flat) // 20,
        critic_warmup=0,
        num_steps=max(1, num_steps),  # none are allowed, and then none are taken
        weight_decay=0.0,
        adam_beta2=0.99,
        adam_eps=1e-8,
    )
