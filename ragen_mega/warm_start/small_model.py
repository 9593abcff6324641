"""Runs without --load: the small model, its tokenizer, and what imitating scripted play makes of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, Qwen2Config

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.config import ModelConfig, StarPOConfig, TrainConfig
from ragen_mega.data import distributed
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Trajectory
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.weights import CheckpointReader
from ragen_mega.models.huggingface import random_weights, save_huggingface
from ragen_mega.rollout.tasks import episode_maker
from ragen_mega.run.run import Run
from ragen_mega.warm_start.clone import fit, scripted_texts, scripted_trajectory
from ragen_mega.warm_start.scripted import narration_note
from ragen_mega.warm_start.tokenizer import train_tokenizer

BASE, WARM_START, WARM_START_CRITIC = "base", "warm_start", "warm_start_critic"
"""Subdirectories of a run without --load: the random small model, what cloning made of it, and the
critic of that.
"""
WARM_START_SEEDS = 100_000
"""First prompt seed of scripted play: above the evaluation sets, below training."""


def is_complete(directory: Path) -> bool:
    """Whether `save_huggingface` has finished there: the weights are its last file."""
    return (directory / "model.safetensors").exists()


def find_warm_start(run: Run) -> tuple[Path, Path | None] | None:
    """The directories that `warm_start` returned in an earlier process of this run, None if it did
    not get that far.
    """
    has_critic = run.critic is not None and run.config.warm_start.warm_start_critic_steps > 0
    policy, critic = (
        run.config.run_directory / WARM_START,
        run.config.run_directory / WARM_START_CRITIC,
    )
    if not is_complete(policy) or (has_critic and not is_complete(critic)):
        return None
    return policy, critic if has_critic else None


def small_model(config: ModelConfig, vocab_size: int) -> PretrainedConfig:
    """The small Qwen2 of runs without --load."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        # Contexts are short and the widths far below Qwen's: its own 1e6 and 0.02 make the warm
        # start 2 to 4 times slower.
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        initializer_range=0.1,
        dtype="float32",
    )


def write_small_model(config: StarPOConfig, directory: Path) -> None:
    """Train the tokenizer on scripted play and write a randomly initialised model beside it."""
    texts = []
    for name in config.environment.shares:
        texts += scripted_texts(
            episode_maker(config.environment, name),
            range(200),
            skill=config.warm_start.warm_start_skill,
        )
    tokenizer = train_tokenizer(texts)
    rows = (
        config.parallel.tensor_model_parallel_size * 8
    )  # so that no layout needs padded vocabulary rows
    hf = small_model(config.model, vocab_size=-(-len(tokenizer) // rows) * rows)
    hf.eos_token_id, hf.pad_token_id, hf.bos_token_id = (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        None,
    )
    weights = random_weights(hf, config.train.seed)
    save_huggingface(directory, hf, tokenizer, weights.items(), is_writer=True)


def warm_start(run: Run, start: Path) -> tuple[Path, Path | None]:
    """Clone the scripted player from the model in `start`; returns the directories of policy and
    critic. Collective.

    First turns come first: in a short context the facts of the state are found several times
    faster, and what is learned there carries over to later turns.
    """
    config, warm = run.config, run.config.warm_start
    num_steps = warm.warm_start_first_turn_steps + warm.warm_start_steps
    student = MegatronPolicy(
        run.policy.hf,
        run.policy.groups,
        config.parallel,
        _warm_start_schedule(config, num_steps),
        config.loss,
        temperature=warm.warm_start_temperature,
    )
    student.load_weights(CheckpointReader(start))
    for name in config.environment.shares:
        if note := narration_note(name, episode_maker(config.environment, name)()):
            run.console.say(note)
    first_turns = _scripted_trajectories(run, 4 * warm.warm_start_trajectories, max_turns=1)
    episodes = _scripted_trajectories(run, warm.warm_start_trajectories, max_turns=None)
    with run.console.phase("warm start", num_steps) as progress:

        def report(metrics: dict[str, float]) -> None:
            student.trainer.schedule.step(1)
            progress.advance(note=f"loss {metrics['loss']:.3f}")

        for trajectories, steps, batch_size in (
            (first_turns, warm.warm_start_first_turn_steps, 2 * warm.warm_start_batch),
            (episodes, warm.warm_start_steps, warm.warm_start_batch),
        ):
            fit(
                student.clone,
                pack(trajectories),
                batch_size=batch_size,
                num_steps=steps,
                seed=config.train.seed,
                report=report,
            )
    directory = config.run_directory / WARM_START
    save_huggingface(
        directory,
        student.hf,
        run.renderer.tokenizer,
        student.export_weights(),
        is_writer=distributed.is_main(),
    )
    distributed.barrier()
    if run.critic is None or warm.warm_start_critic_steps == 0:
        return directory, None
    return directory, warm_start_critic(run, directory, episodes)


def warm_start_critic(run: Run, start: Path, episodes: Sequence[Trajectory]) -> Path:
    """Regress a critic with the weights in `start` to the returns of scripted episodes, which the
    clone would earn too.

    Returns its directory. Collective.
    """
    config, warm = run.config, run.config.warm_start
    schedule = _warm_start_schedule(config, warm.warm_start_critic_steps)
    loss = replace(config.loss, value_clip=None)
    critic = MegatronCritic(run.policy.hf, run.policy.groups, config.parallel, schedule, loss)
    critic.load_weights(CheckpointReader(start))
    batch = pack(episodes)
    batch = batch.with_fields(values=torch.zeros(batch.num_positions))
    batch = estimate_advantages(batch, episodes, replace(config.advantage, lam=1.0, turn_lam=None))
    with run.console.phase("warm start of the critic", warm.warm_start_critic_steps) as progress:

        def report(metrics: dict[str, float]) -> None:
            critic.trainer.schedule.step(1)
            progress.advance(note=f"loss {metrics['loss']:.3f}")

        fit(
            critic.update,
            batch,
            batch_size=2 * warm.warm_start_batch,
            num_steps=warm.warm_start_critic_steps,
            seed=config.train.seed,
            report=report,
        )
    directory = config.run_directory / WARM_START_CRITIC
    save_huggingface(
        directory,
        run.policy.hf,
        run.renderer.tokenizer,
        critic.export_weights(),
        is_writer=distributed.is_main(),
    )
    distributed.barrier()
    return directory


def _warm_start_schedule(config: StarPOConfig, num_steps: int) -> TrainConfig:
    """The optimizer's settings of a stage of the warm start."""
    return replace(
        config.train,
        lr=config.warm_start.warm_start_lr,
        critic_lr=config.warm_start.warm_start_critic_lr,
        lr_decay="cosine",
        lr_warmup=num_steps // 20,
        num_steps=num_steps,
        weight_decay=0.0,
        adam_beta2=0.99,
        adam_eps=1e-8,
    )


def _scripted_trajectories(run: Run, count: int, *, max_turns: int | None) -> list[Trajectory]:
    """The warm start's data, each rank writing its part; the same list on every rank."""
    config, warm = run.config.environment, run.config.warm_start
    shares = config.shares
    with run.console.phase("scripted play", count // distributed.world_size()) as progress:
        mine = []
        for index in range(distributed.rank(), count, distributed.world_size()):
            name = list(shares)[index % len(shares)]
            mine.append(
                scripted_trajectory(
                    episode_maker(config, name)(),
                    run.renderer,
                    name,
                    WARM_START_SEEDS + index,
                    skill=warm.warm_start_skill,
                    max_turns=max_turns,
                )
            )
            progress.advance()
    return [trajectory for part in distributed.gather_objects(mine) for trajectory in part]
