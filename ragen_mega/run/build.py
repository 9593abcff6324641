"""Configuration -> run: policy, critic, engine, tasks, logger. The only file that picks a backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

import torch
from transformers import PretrainedConfig

from ragen_mega.config import StarPOConfig
from ragen_mega.data import distributed
from ragen_mega.data.distributed import on_main
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.engines.sglang.engine import SGLangEngine
from ragen_mega.engines.sglang.follower import SGLangFollower
from ragen_mega.engines.sglang.fp8_blocks import check_blocks
from ragen_mega.engines.sglang.server import ServerSettings
from ragen_mega.environments.reference_players import Baselines
from ragen_mega.megatron import precision
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.model import check_model
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import load_config, load_tokenizer, local_directory
from ragen_mega.models.memory_plan import Setting, check_fits
from ragen_mega.models.server_cut import check_cpu_cut, head_rows
from ragen_mega.models.shape import ModelShape
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import CONFIG_FILE, RunLogger
from ragen_mega.rollout.engine import EngineShard, RolloutEngine
from ragen_mega.rollout.evaluate import reference_players
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TaskSampler, evaluation_boards
from ragen_mega.run.placement import ACTOR, CRITIC, PhaseMachine
from ragen_mega.run.run import Run
from ragen_mega.storage.checkpoints import (
    CHECKPOINTS,
    Checkpoint,
    check_config,
    find_latest,
    lock_run,
)
from ragen_mega.storage.model_readers import open_model
from ragen_mega.warm_start.small_model import (
    BASE,
    find_warm_start,
    is_complete,
    small_model,
    warm_start,
    write_small_model,
)


def build(config: StarPOConfig) -> Run:
    """Everything a run needs, warm start included. Raises ValueError before any training if
    something cannot work.
    """
    groups = initialize(config.parallel, config.train.seed)
    boards = {
        name: evaluation_boards(config.environment, name, config.evaluation.boards)
        for name in config.environment.shares
    }
    if config.model.load is None:
        hf = small_model(config.model, vocab_size=512)
    else:
        hf = load_config(str(local_directory(config.model.load)))
    check_model(hf, config.parallel)
    on_main(lambda: check_weights(config, hf))
    check_engine(config, hf)
    if torch.cuda.is_available():
        setting = Setting.from_config(config, distributed.world_size())
        check_fits(ModelShape.from_config(hf.to_dict()), setting, torch.cuda.mem_get_info()[1])
    lock, checkpoint = claim(config)
    values = config.to_dict()
    if checkpoint and all(
        checkpoint.config[section] == values[section] for section in ("environment", "evaluation")
    ):
        references = {
            name: Baselines(**saved) for name, saved in checkpoint.state["references"].items()
        }
    else:
        references = {
            name: reference_players(
                config.environment, name, boards[name], config.evaluation.eval_prompts
            )
            for name in config.environment.shares
        }
    logger = RunLogger(
        config.run_directory,
        is_writer=distributed.is_main(),
        wandb_project=config.logging.wandb_project,
        resume=config.checkpoint.resume,
        overwrite=config.logging.overwrite,
    )
    logger.write_config(values)
    distributed.barrier()
    console = Console(is_writer=distributed.is_main(), num_steps=config.train.num_steps)

    if config.model.load is None:
        start = config.run_directory / BASE
        if distributed.is_main() and not is_complete(start):
            write_small_model(config, start)
        distributed.barrier()
    else:
        start = local_directory(config.model.load)
    hf = load_config(str(start))
    renderer = ChatRenderer(load_tokenizer(str(start)), think=config.environment.think)
    policy = MegatronPolicy(
        hf,
        groups,
        config.parallel,
        config.train,
        config.loss,
        temperature=config.rollout.temperature,
        keep_reference=config.needs_reference,
    )
    console.say(f"model: {precision.describe(policy.module.config)}")
    phases = PhaseMachine(config.parallel.offload)
    phases.add(ACTOR, policy.trainer.memory)
    engine = build_engine(config, hf)
    critic = None
    if config.advantage.uses_critic:
        critic = MegatronCritic(hf, groups, config.parallel, config.train, config.loss)
        phases.add(CRITIC, critic.trainer.memory)
    run = Run(
        config,
        policy,
        critic,
        engine,
        renderer,
        TaskSampler(config),
        boards,
        references,
        logger,
        console,
        lock,
        phases=phases,
    )
    critic_start = config.model.critic_load and local_directory(config.model.critic_load)
    if config.model.load is None:
        start, warm_critic = find_warm_start(run) or warm_start(run, start)
        critic_start = critic_start or warm_critic
    policy.load_weights(open_model(start, verify=False))
    if critic:
        critic.load_weights(open_model(critic_start or start, is_critic=True, verify=False))
    if checkpoint:
        run.restore(checkpoint)  # the policy's first weights stay as the reference policy
    else:
        run.record_warm_start(run.evaluate(0))
    return run


def build_engine(config: StarPOConfig, hf: PretrainedConfig) -> RolloutEngine:
    """Who samples for this rank. An SGLang server is started when it is first needed. Collective."""
    rollout = config.rollout
    num_sessions = rollout.sessions_per_engine(num_engines(config))
    if rollout.rollout_engine == "embedded":
        return EmbeddedEngine(hf, max_context=rollout.max_context_length, max_sessions=num_sessions)
    is_on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if config.parallel.bf16 else "float32"
    tp = rollout.rollout_tensor_parallel_size
    group = distributed.consecutive_group(tp)
    transfer = (
        rollout.weight_transfer
        if rollout.weight_transfer != "auto"
        else "ipc"
        if is_on_gpu
        else "file"
    )
    if group is not None and distributed.rank() % tp:
        part = EngineShard(distributed.rank() % tp, tp)
        return SGLangFollower(
            hf, part, getattr(torch, dtype), group=group, transfer=transfer, fp8=rollout.rollout_fp8
        )
    settings = ServerSettings(
        python=Path(rollout.sglang_python or sys.executable),
        directory=config.run_directory / "sglang" / f"rank_{distributed.rank():05d}",
        max_context=rollout.max_context_length,
        max_running_requests=num_sessions,
        kv_cache_tokens=rollout.kv_cache_size(num_sessions),
        device="cuda" if is_on_gpu else "cpu",
        dtype=dtype,
        tensor_parallel_size=tp,
        fp8=rollout.rollout_fp8,
        deterministic=rollout.rollout_deterministic,
        random_seed=config.train.seed + distributed.rank(),
        options={"base-gpu-id": int(os.environ["LOCAL_RANK"])} if is_on_gpu else {},
    )
    return SGLangEngine(hf, settings, group=group, transfer=transfer)


def check_weights(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Raise ValueError, before anything is built, if a directory to load does not hold this model."""
    if config.model.load is not None:
        open_model(local_directory(config.model.load))
    if config.model.critic_load is not None:
        open_model(local_directory(config.model.critic_load), hf, is_critic=True)


def check_engine(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Raise ValueError where the engine could not serve this model on this machine."""
    tp = config.rollout.rollout_tensor_parallel_size
    num_engines(config)
    head_rows(hf, 0, tp)
    capability = precision.Machine.here().capability
    if config.rollout.rollout_engine == "sglang" and capability is None:
        check_cpu_cut(hf, tp)
    if config.rollout.rollout_fp8:
        if capability is None or capability < (8, 9):
            here = "none" if capability is None else "one of {}.{}".format(*capability)
            raise ValueError(
                "rollout_fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and"
                f" here is {here}; drop --rollout-fp8"
            )
        check_blocks(hf, tp)


def num_engines(config: StarPOConfig) -> int:
    """Rollout engines of this job. Raises ValueError unless every one has its ranks on one node."""
    world_size = distributed.world_size()
    return config.rollout.num_engines(
        world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    )


def claim(config: StarPOConfig) -> tuple[TextIO | None, Checkpoint | None]:
    """Lock the run directory (the lock is rank 0's), and with --resume find what to go on from.
    Collective.

    Raises ValueError if another process works there or if the checkpoint is of another model.
    """
    locks: list[TextIO] = []
    on_main(lambda: locks.append(lock_run(config.run_directory)))

    def say(line: str) -> None:
        print(line, flush=True)

    def find() -> Checkpoint | None:
        if not config.checkpoint.resume:
            return None
        if not (config.run_directory / CONFIG_FILE).exists():
            say(f"resume: there is no run in {config.run_directory} yet: it begins")
            return None
        checkpoint = find_latest(config.run_directory / CHECKPOINTS, say)
        for line in (
            check_config(checkpoint, config.to_dict())
            if checkpoint
            else ("no checkpoint yet: training starts anew",)
        ):
            say(f"resume: {line}")
        return checkpoint

    return (locks[0] if locks else None), on_main(find)
