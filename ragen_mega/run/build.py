"""Configuration -> run: policy, critic, engine, tasks, logger. The only file that picks a
backend.
"""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from transformers import PretrainedConfig

from ragen_mega.agents.examples import find_references
from ragen_mega.config import EnvironmentConfig, StarPOConfig, TrainConfig
from ragen_mega.config.recorded import flat, known_config, read_recorded
from ragen_mega.config.sections.section import flag_of
from ragen_mega.data.fields import (
    ROUTES,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TOKEN_FIELDS,
    add_likeliest,
    add_routes,
)
from ragen_mega.engines.sglang.engine import SGLangEngine, SGLangFollower
from ragen_mega.engines.sglang.fp8_blocks import check_blocks
from ragen_mega.engines.sglang.given import connect
from ragen_mega.engines.sglang.http_json import ConnectionLost
from ragen_mega.engines.sglang.server import ServerSettings
from ragen_mega.environments.reference_players import Prompt
from ragen_mega.megatron import precision
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import ProcessGroupCollection, initialize
from ragen_mega.megatron.model import check_model
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.scorer import FrozenPolicy
from ragen_mega.models.directory import content_digest, find_gguf
from ragen_mega.models.huggingface import load_config, load_tokenizer
from ragen_mega.models.lora import adapted
from ragen_mega.models.server_cut import check_cpu_cut
from ragen_mega.models.shape import ModelShape, server_error
from ragen_mega.planning.memory import check_trajectories, fit
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import METRICS_FILE, SUMMARY_FILE, RunLogger, read_metrics
from ragen_mega.report.provenance import describe_start
from ragen_mega.rollout.engine import EngineShard, RolloutEngine
from ragen_mega.rollout.renderer import ChatRenderer, load_renderer
from ragen_mega.rollout.tasks import (
    TaskSampler,
    check_first_prompts,
    evaluation_prompts,
    forget_files,
    held_out_note,
    prompt_examples,
)
from ragen_mega.run.check import (
    check,
    check_routing,
    flags_without_effect,
    import_agents,
    recipe_note,
    task_notes,
    warmup_note,
)
from ragen_mega.run.evaluation import KnownBaselines
from ragen_mega.run.nodes import join_job
from ragen_mega.run.placement import (
    ACTOR,
    CRITIC,
    TEACHER,
    Colocated,
    device_capacity,
    host_memory,
)
from ragen_mega.run.run import Run
from ragen_mega.run.separate import Role, Sampler, divide
from ragen_mega.run.teacher import Model, Teacher, check_tokens
from ragen_mega.run.timers import Timers
from ragen_mega.storage.adapter_files import AdapterReader
from ragen_mega.storage.checkpoints import (
    BASE_MODEL,
    CHECKPOINTS,
    Checkpoint,
    check_config,
    find_latest,
    lock_named,
)
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.model_sources import local_directory
from ragen_mega.storage.run_directory import (
    BASE,
    CONFIG_FILE,
    FINAL_EXPORT,
    WARM_START,
    recover,
)
from ragen_mega.system.outputs import waiting
from ragen_mega.warm_start.rehearsal import check_play, fit_context
from ragen_mega.warm_start.small_model import (
    Start,
    find_warm_start,
    is_complete,
    small_model,
    take_warm_start,
    warm_start,
    write_small_model,
)


def build(config: StarPOConfig) -> Run | Sampler:
    """Return everything a run needs, warm start included; on a rank that only samples what that
    needs. Raises ValueError before any training if something cannot work.
    """
    config, directory = config.located(), os.getcwd()  # which worlds may leave
    forget_files()
    join_job(config)
    world_size = collectives.world_size()
    on_main(lambda: check(config, world_size, ranks_per_node(world_size)))
    import_agents(config.environment)
    config = with_models(config)
    if config.rollout.fit_context:
        config = on_main(lambda: fit_context_once(config))
    role = divide(config)
    if role.samples:
        return Sampler(config, role, partial(build_sampling, config))
    groups = initialize(config.parallel, config.train.seed)
    names, trained = config.environment.evaluated, config.environment.shares
    prompts = {
        name: evaluation_prompts(
            config.environment,
            name,
            config.evaluation.eval_prompts,
            config.evaluation.boards if name in trained else None,
        )
        for name in names
    }
    with waiting("checking the model, its files and its memory"):
        config = check_model_and_engine(config)
    with ExitStack() as refused:  # a notebook would hold the lock as long as it shows the error
        config, lock, checkpoint = claim(config, refused)
        with waiting(f"the random and the optimal player play {', '.join(names)}"):
            references = known_references(config, checkpoint) or KnownBaselines(
                {name: find_references(config, name, prompts[name]) for name in names}
            )
        logger = open_log(config, directory, first_step=checkpoint.step if checkpoint else 0)
        with logger.beginning():
            run = build_run(config, role, groups, prompts, references, logger, checkpoint)
        run.lock = lock  # not before: a run that is put back is put back under the lock
        refused.pop_all()
    return run


def fit_context_once(config: StarPOConfig) -> StarPOConfig:
    """`config` with the context that scripted play needs; a run that goes on keeps its own."""
    if config.checkpoint.resume and (config.run_directory / CONFIG_FILE).exists():
        length = known_config(read_recorded(config.run_directory)).rollout.max_context_length
        if length != config.rollout.max_context_length:  # of a recipe, or given
            print(
                f"resume: --max-context-length {config.rollout.max_context_length} does nothing:"
                f" fit_context keeps the {length} of the run; another needs --no-fit-context",
                flush=True,
            )
        return replace(config, rollout=replace(config.rollout, max_context_length=length))
    return fit_context(config)


def build_run(
    config: StarPOConfig,
    role: Role,
    groups: ProcessGroupCollection,
    prompts: dict[str, list[Prompt]],
    references: KnownBaselines,
    logger: RunLogger,
    checkpoint: Checkpoint | None,
) -> Run:
    """Return the run whose directory is there: its models, warm start included, and what it knows
    after the steps of `checkpoint`, or of itself before the first.
    """
    console = Console(
        is_writer=collectives.is_main(),
        num_steps=config.train.num_steps,
        evaluations=config.planned_evaluations(num_engines(config.at_trainers)),
    )

    splits, asked = on_main(lambda: task_notes(config.environment)), config.evaluation.eval_prompts
    fewer = [held_out_note(name, len(states), asked) for name, states in prompts.items()]
    of_flags = recipe_note(config), *flags_without_effect(config), warmup_note(config.train)
    for note in filter(None, (*of_flags, *splits, *fewer)):
        console.say(note)
    base = base_directory(config)
    hf = load_config(str(base))
    renderer = load_renderer(str(base), think=config.environment.think)
    on_main(lambda: check_teachers(config, hf, renderer))
    for note in example_notes(config.environment, renderer):
        console.say(note)
    for note in on_main(lambda: check_first_prompts(config, prompts, renderer)):
        console.say(note)
    notes = [note for known in references.values() for note in known.notes]
    notes += on_main(lambda: check_play(config, renderer))
    for note in notes:
        console.say(note)
    start = Start(base, None)
    if config.has_warm_start:
        start = find_warm_start(config) or warm_start(config, hf, groups, renderer, console, base)
    if config.model.critic_load:
        start = start._replace(critic=local_directory(config.model.critic_load))

    timers = Timers()
    placement = Colocated(config.parallel.offload, timers.timed)
    with waiting("loading the model"):
        policy, critic, teacher = build_models(config, hf, groups, start, placement, renderer)
    console.say(f"model: {precision.describe(policy.head.config)}")
    for note in teacher.notes if teacher else ():
        console.say(note)
    if config.parallel.fp8 != "none" and config.train.shared_prefixes == "auto":
        console.say("shared prefixes: computed for each trajectory, as always with FP8")
    run = Run(
        config=config,
        policy=policy,
        critic=critic,
        teacher=teacher,
        engine=build_engine(config.at_trainers, hf),
        renderer=renderer,
        tasks=TaskSampler(config),
        prompts=prompts,
        references=references,
        logger=logger,
        console=console,
        placement=placement,
        timers=timers,
        role=role,
        models=model_digests(config) if collectives.is_main() else {},
    )
    with ExitStack() as refused:
        refused.callback(run.shutdown, 2)
        if samplers := run.rollouts.samplers:
            samplers.begin(base)
        begin_run(run, checkpoint, notes)
        refused.pop_all()
    return run


def begin_run(run: Run, checkpoint: Checkpoint | None, notes: Sequence[str]) -> None:
    """Take a run to its first step: restore its checkpoint, or evaluate the policy as it is. The
    `notes` of the start are logged with step 0, also where it is repeated.
    """
    if checkpoint:
        run.restore(checkpoint)  # the policy's first weights stay as the reference policy
    run.log.repeat_from(run.step)
    for note in notes if run.step == 0 else ():
        run.logger.note(0, note)
    if checkpoint is None:
        found = run.evaluation.play(0)
        run.evaluation.warm_start = {name: result.to_dict() for name, result in found.items()}
        run.step_version = run.engine.weight_version


def example_notes(config: EnvironmentConfig, renderer: ChatRenderer) -> list[str]:
    """Return a line for each environment whose prompts show examples."""
    return [
        f"{name}: worked examples in every prompt: {config.prompt_examples}, of"
        f" {len(renderer.start(shown))} tokens"
        for name in config.evaluated
        if (shown := prompt_examples(config, name))
    ]


def build_sampling(
    config: StarPOConfig, base: Path, name: str | None
) -> tuple[RolloutEngine, ChatRenderer, PretrainedConfig]:
    """Build the engine, the renderer and the configuration of a rank that only samples, in the run
    of this name; `base` holds tokenizer and configuration of the model.
    """
    config = replace(config, logging=replace(config.logging, name=name))
    hf = load_config(str(base))
    set_fields(config, hf)
    renderer = load_renderer(str(base), think=config.environment.think)
    return build_engine(config, hf), renderer, hf


def with_models(config: StarPOConfig) -> StarPOConfig:
    """Return the configuration with the directories of hub models' downloads, which name the
    commit, in place of hub names, and of dequantised models in place of GGUF files. Collective.
    """

    def model(name: str | None) -> str | None:
        if name is None or Path(name).is_dir() and not find_gguf(Path(name)):
            return name
        commit = on_main(lambda: local_directory(name).name)  # once: it may change meanwhile
        if os.environ.get("LOCAL_RANK", "0") == "0":
            local_directory(name, commit)
        collectives.barrier()
        return str(local_directory(name, commit, fetch=False))

    given = config.model
    found = replace(given, load=model(given.load), critic_load=model(given.critic_load))
    if teachers := {name: str(model(each)) for name, each in given.teachers.items()}:
        found = found.with_teachers(teachers)
    return replace(config, model=found)


def open_log(config: StarPOConfig, directory: str, *, first_step: int) -> RunLogger:
    """Return the run's directory and its log, which rank 0 writes. `directory`: folder in which the
    run was started. Collective.
    """
    opened: list[RunLogger] = []
    world_size = collectives.world_size()

    def begin() -> None:
        logger = RunLogger(
            config.run_directory,
            is_writer=True,
            wandb_project=config.logging.wandb_project,
            resume=config.checkpoint.resume,
            overwrite=config.logging.overwrite,
        )
        start = describe_start(
            config,
            directory,
            first_step=first_step,
            world_size=world_size,
            ranks_per_node=ranks_per_node(world_size),
        )
        logger.write_config(config.to_dict(), start)
        opened.append(logger)

    on_main(begin)
    return opened[0] if opened else RunLogger(config.run_directory, is_writer=False)


def build_models(
    config: StarPOConfig,
    hf: PretrainedConfig,
    groups: ProcessGroupCollection,
    start: Start,
    placement: Colocated,
    renderer: ChatRenderer,
) -> tuple[MegatronPolicy, MegatronCritic | None, Teacher | None]:
    """Return the policy and critic with the weights that training starts from, and the teacher."""
    policy = MegatronPolicy(
        hf,
        groups,
        config.parallel,
        config.train,
        config.loss,
        temperature=config.rollout.temperature,
        keep_reference=config.needs_reference,
        lora=config.lora,
        teacher_coef=config.advantage.teacher_coef,
    )
    policy.load_weights(open_model(start.policy, verify=False))
    if config.lora.lora_load is not None:
        policy.load_adapter(open_given_adapter(config, hf))
    placement.add(ACTOR, policy.trainer.memory)
    teacher = build_teacher(config, hf, policy, placement, renderer)
    if not config.advantage.uses_critic:
        return policy, None, teacher
    base = policy.chunks if config.lora.rank else None
    critic = MegatronCritic(
        hf, groups, config.parallel, config.train, config.loss, lora=config.lora, base=base
    )
    if base is None:
        critic.load_weights(open_model(start.critic or start.policy, is_critic=True, verify=False))
    placement.add(CRITIC, critic.trainer.memory)
    return policy, critic, teacher


def check_teachers(config: StarPOConfig, hf: PretrainedConfig, renderer: ChatRenderer) -> None:
    """Raise ValueError unless the models of --teacher-load have the policy's tokens and fit the
    layout, and there are as many tokens as are taught.
    """
    top_k = config.advantage.teacher_top_k
    if top_k > hf.vocab_size:
        raise ValueError(
            f"teacher_top_k ({top_k}) must be at most the {hf.vocab_size} tokens of the policy; set"
            " --teacher-top-k 16"
        )
    for name in config.loaded_teachers:
        directory = str(local_directory(name))
        model = load_config(directory)
        check_model(model, config.parallel)
        check_tokens(directory, (load_tokenizer(directory), model), (renderer.tokenizer, hf))


def build_teacher(
    config: StarPOConfig,
    hf: PretrainedConfig,
    policy: MegatronPolicy,
    placement: Colocated,
    renderer: ChatRenderer,
) -> Teacher | None:
    """Return the teachers: the policy's frozen start, or the models of --teacher-load."""
    if not config.advantage.has_teacher:
        return None
    top_k, below = config.advantage.teacher_top_k, hf.vocab_size
    scores = partial(policy.reference_scores, top_k=top_k, top_below=below)
    start = Model(scores, hf.max_position_embeddings)
    models = dict.fromkeys(config.teachers, start)
    for name, taught in config.loaded_teachers.items():
        directory = local_directory(name)
        own = load_config(str(directory))
        frozen = FrozenPolicy(
            own,
            policy.groups,
            config.parallel,
            config.train,
            open_model(directory, verify=False),
            temperature=config.rollout.temperature,
        )
        placement.add(f"{TEACHER} of {', '.join(taught)}", frozen.trainer.memory)
        scores = partial(frozen.scores, top_k=top_k, top_below=below)
        model = Model(scores, own.max_position_embeddings)
        models |= dict.fromkeys(taught, model)
    return Teacher(config, models, renderer)


def base_directory(config: StarPOConfig) -> Path:
    """Return the model directory with configuration and tokenizer: what --load names, else the
    small model's, which is written, or taken from another run, if it is not there. Collective.
    """
    if config.model.load is not None:
        return local_directory(config.model.load)
    base = config.run_directory / BASE

    def write() -> None:
        if config.warm_start.warm_start_from is not None:
            take_warm_start(config, Path(config.warm_start.warm_start_from))
        elif not is_complete(base):
            write_small_model(config, base)

    on_main(write)
    return base


def known_references(config: StarPOConfig, checkpoint: Checkpoint | None) -> KnownBaselines:
    """Return the reference players of a checkpoint that was made under the same rules of play; none
    of any other.
    """
    references, values = KnownBaselines(), config.to_dict()
    if checkpoint is not None and all(
        checkpoint.config[section] == values[section] for section in ("environment", "evaluation")
    ):
        references.load_state_dict(checkpoint.state["references"])
    return references


def set_fields(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Have tokens keep the routes of this model if the run replays them, and the likeliest tokens
    of a teacher if the run learns them, and not those fields that another run of this process
    kept. Raises ValueError for a model that has no routes.
    """
    for name in (ROUTES, TEACHER_IDS, TEACHER_LOGPROBS):
        TOKEN_FIELDS.pop(name, None)
    if config.advantage.teacher_top_k:
        add_likeliest(config.advantage.teacher_top_k)
    shape, source = ModelShape.of(hf), config.train.routing_replay
    check_routing(config, shape)
    if source == "none":
        return
    add_routes(
        shape.num_layers,
        shape.experts_per_token,
        shape.num_experts,
        by_engine=source == "engine",
    )


def build_engine(config: StarPOConfig, hf: PretrainedConfig) -> RolloutEngine:
    """Return the engine that samples for this rank. An SGLang server is started when it is first
    needed. Collective.
    """
    rollout = config.rollout
    if rollout.rollout_engine == "embedded":
        # Only here, for it brings a compiler (numba), which a server's ranks need not load.
        from ragen_mega.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(
            hf,
            max_context=rollout.max_context_length,
            max_sessions=rollout.sessions_per_engine(num_engines(config)),
            dtype=torch.bfloat16 if config.parallel.bf16 else torch.float32,
            records_routes=config.train.routing_replay == "engine",
            lora=config.lora if config.lora.lora_sync == "adapter" else None,
        )
    settings = server_settings(config)
    size = collectives.world_size() // num_engines(config)  # ranks that share an engine
    group, place = collectives.consecutive_group(size), collectives.rank() % size
    transfer = (
        rollout.weight_transfer
        if rollout.weight_transfer != "auto"
        else "ipc"
        if settings.device == "cuda"
        else "file"
    )
    if group is not None and place:
        part = EngineShard(place, size, settings.expert_parallel_size)
        return SGLangFollower(
            hf,
            None if settings.address else part,
            getattr(torch, settings.dtype),
            group=group,
            transfer=transfer,
            fp8=rollout.rollout_fp8,
            keeps_base=settings.lora is not None,
        )
    return SGLangEngine(hf, settings, group=group, transfer=transfer)


def server_settings(config: StarPOConfig) -> ServerSettings:
    """Return the settings of this rank's SGLang server. Raises ValueError if it cannot start."""
    rollout, is_on_gpu = config.rollout, torch.cuda.is_available()
    num, given = num_engines(config), rollout.given_engines
    num_sessions = rollout.sessions_per_engine(num)
    rank = int(os.environ.get("RANK", 0))  # in the whole job, samplers included
    return ServerSettings(
        python=Path(rollout.sglang_python or sys.executable),
        directory=config.run_directory / "sglang" / f"rank_{rank:05d}",
        max_context=rollout.max_context_length,
        max_running_requests=num_sessions,
        kv_cache_tokens=rollout.kv_cache_size(num_sessions),
        device="cuda" if is_on_gpu else "cpu",
        dtype="bfloat16" if config.parallel.bf16 else "float32",
        tensor_parallel_size=rollout.rollout_tensor_parallel_size,
        expert_parallel_size=rollout.rollout_expert_parallel_size,
        fp8=rollout.rollout_fp8,
        deterministic=rollout.rollout_deterministic,
        returns_routes=config.train.routing_replay == "engine",
        random_seed=(config.train.seed + rank) % 2**31,
        start_timeout=rollout.sglang_start_timeout or (1800.0 if rollout.rollout_fp8 else 300.0),
        command_line=rollout.sglang_command_line,
        lora=config.lora if config.lora.lora_sync == "adapter" else None,
        address=given[collectives.rank() * num // collectives.world_size()] if given else None,
        options={"base-gpu-id": torch.cuda.current_device()} if is_on_gpu else {},
    )


def check_model_and_engine(config: StarPOConfig) -> StarPOConfig:
    """Return `config` with the microbatch that fits into the memory of a rank. Raises ValueError
    where trainer or engine could not take this model on this machine.
    """
    if config.model.load is None:
        hf = small_model(config.model, vocab_size=512)
    else:
        hf = load_config(str(local_directory(config.model.load)))
    check_model(hf, config.parallel)
    adapted(ModelShape.of(hf), config.lora)  # which has the targets
    if config.lora.lora_load is not None:
        open_given_adapter(config, hf)
    set_fields(config, hf)
    on_main(lambda: check_weights(config, hf))
    check_engine(config, hf)
    if config.model.load is not None:
        load_renderer(str(local_directory(config.model.load)), think=config.environment.think)
        check_context(config, hf)
    return fit_memory(config, ModelShape.of(hf))


def fit_memory(config: StarPOConfig, shape: ModelShape) -> StarPOConfig:
    """Choose the microbatch and the recomputation that fit into the memory of a rank, where no flag
    does, and say so in a line. Raises ValueError where the plan does not fit. Collective.
    """
    on_host, num_ranks = not torch.cuda.is_available(), collectives.world_size()
    room = min(collectives.gather_objects(device_capacity()))
    on_main(lambda: check_trajectories(config, host_memory()))
    config, lines = fit(config, shape, num_ranks, room, on_host=on_host)
    for line in lines if collectives.is_main() else ():
        print(line, flush=True)
    return config


def check_context(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Raise ValueError where the loaded model has no position for the context."""
    if config.rollout.max_context_length > hf.max_position_embeddings:
        raise ValueError(
            f"max_context_length ({config.rollout.max_context_length}) must be at most"
            f" {hf.max_position_embeddings}, the positions of {config.model.load}; lower"
            " --max-context-length"
        )


def check_engine(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Raise ValueError where the engine could not serve this model on this machine."""
    tp, ep = (
        config.rollout.rollout_tensor_parallel_size,
        config.rollout.rollout_expert_parallel_size,
    )
    shape, capability = ModelShape.of(hf), precision.Device.here().capability
    if error := server_error(shape, tp, ep):
        raise ValueError(error)
    if config.rollout.rollout_engine == "sglang" and capability is None:
        if config.train.routing_replay == "engine":
            raise ValueError(
                "routing_replay engine needs GPUs with rollout_engine sglang, which keeps routes in"
                " pinned memory; set --rollout-engine embedded, or --routing-replay policy"
            )
        check_cpu_cut(shape, tp, ep)
    own = config.at_trainers.rollout
    starts_servers = own.rollout_engine == "sglang" and not own.given_engines
    if starts_servers and capability is not None and not config.parallel.bf16:
        raise ValueError(
            "rollout_engine sglang needs bf16 on GPUs, where SGLang has no norm and no attention in"
            " float32; add --bf16, or set --rollout-engine embedded"
        )
    is_adapted = config.rollout.rollout_engine == "sglang" and config.lora.lora_sync == "adapter"
    if is_adapted and capability is None:
        raise ValueError(
            "lora_sync adapter needs GPUs with rollout_engine sglang, which pins memory for"
            " adapters; drop --lora-sync, or set --rollout-engine embedded"
        )
    if is_adapted and shape.num_experts and "experts" in config.lora.targets:
        raise ValueError(
            "lora_sync adapter leaves experts to SGLang, which computes their adapters in Triton"
            " kernels of GPUs alone, never compared with the trainer; drop --lora-sync, or set"
            " --lora-targets attention"
        )
    if config.rollout.rollout_fp8:
        # Blackwell's kernels have another format of scales, to which SGLang converts what it loads.
        if capability is None or not (8, 9) <= capability < (10, 0):
            here = "none" if capability is None else "one of {}.{}".format(*capability)
            raise ValueError(
                "rollout_fp8 needs a GPU of compute capability 8.9 or 9.0 (Ada, Hopper), and here"
                f" is {here}; drop --rollout-fp8"
            )
        check_blocks(hf, tp)
    if config.rollout.given_engines:
        on_main(lambda: check_given_engines(config, hf))
    if config.rollout.sglang_arguments:
        on_main(lambda: server_settings(config).check_command_line())


def check_given_engines(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Raise ValueError unless each engine of --engine-addresses answers and fits the run."""
    settings = server_settings(replace(config, rollout=config.at_trainers.rollout))
    for address in config.rollout.given_engines:
        try:
            connect(replace(settings, address=address), hf)
        except ConnectionLost as error:
            raise ValueError(str(error)) from None


def check_weights(config: StarPOConfig, hf: PretrainedConfig) -> None:
    """Raise ValueError if a directory to load does not hold this model, whole and undamaged."""
    if config.model.load is not None:
        open_model(local_directory(config.model.load))
    if config.model.critic_load is not None:
        open_model(local_directory(config.model.critic_load), hf, is_critic=True)
    for name in set(config.model.teachers.values()):
        open_model(local_directory(name))


def num_engines(config: StarPOConfig) -> int:
    """Return the number of rollout engines of this job. Raises ValueError if one would span several
    nodes.
    """
    world_size = collectives.world_size()
    return config.rollout.num_engines(world_size, ranks_per_node(world_size))


def ranks_per_node(world_size: int) -> int:
    """Return the ranks on this machine, of this part of the job."""
    return min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def model_digests(config: StarPOConfig) -> dict[str, str]:
    """Return a map: flag -> digest of the content of the model that it loads."""
    loaded = {name: getattr(config.model, name) for name in ("load", "critic_load")}
    if config.lora.rank and (base := lora_base(config)).exists():
        loaded[BASE_MODEL] = str(base)
    found = {flag: content_digest(Path(path)) for flag, path in loaded.items() if path is not None}
    teachers = config.model.teachers.items()
    if of_teachers := [f"{name} {content_digest(Path(path))}".strip() for name, path in teachers]:
        found["teacher_load"] = ", ".join(of_teachers)
    return found


def lora_base(config: StarPOConfig) -> Path:
    """Return the directory of the model beside whose layers adapters stand."""
    loaded = config.model.load
    if loaded is None or config.has_warm_start:
        return config.run_directory / WARM_START
    return Path(loaded)


def open_given_adapter(config: StarPOConfig, hf: PretrainedConfig) -> AdapterReader:
    """Return the adapter to go on from. Raises ValueError if it is of another model or other
    settings.
    """
    adapter, base = Path(str(config.lora.lora_load)), lora_base(config)
    reader = AdapterReader(adapter, ModelShape.of(hf))
    reader.check(config.lora, content_digest(base) if base.exists() else None)
    return reader


def check_beginning(config: StarPOConfig, unread: Sequence[str]) -> None:
    """Raise ValueError if a run without a checkpoint that can be read has come so far that it had
    one: to begin anew would delete what it has learned. `unread` says why each was skipped.
    """
    directory = config.run_directory
    log = directory / METRICS_FILE
    before = known_config(read_recorded(directory))
    interval = max(before.checkpoint.save_interval, config.checkpoint.save_interval)
    num_steps = len(read_metrics(log)) if log.exists() else 0
    if unread:
        had = f"has {len(unread)} checkpoints"
    elif (directory / SUMMARY_FILE).exists():
        had = "has finished"
    elif interval and num_steps > 2 * interval:  # the first was written then, or could not be
        had = f"has done {num_steps} steps"
    else:
        check_same_start(before, config)
        return
    reasons = "".join(f"; {line}" for line in unread)
    remedy = "mount or restore that folder, or begin anew with --overwrite"
    if unread and all("its format is" in line for line in unread):  # they are whole
        remedy = (
            "go on with the version that wrote them, whose commit is in config.json, or begin"
            f" another run with --load {directory / FINAL_EXPORT}, which a finished run has"
        )
    raise ValueError(
        f"run {directory} {had} and none in {directory / CHECKPOINTS} can be read{reasons};"
        f" {remedy}"
    )


_LATER = (
    *("model.teacher_", "model.critic_load", "warm_start.warm_start_from"),
    *("environment.eval_", "environment.curriculum"),
    *("environment.environment_timeout", "environment.environment_processes"),
)
"""Beginnings of settings of models and worlds under which a warm start stays what it was."""


def check_same_start(before: StarPOConfig, config: StarPOConfig) -> None:
    """Raise ValueError if the model or the warm start that a run would take again was made under
    other settings.
    """
    was, now = (
        flat({name: vars(getattr(each, name)) for name in ("model", "warm_start", "environment")})
        | {"warm_start.warm_start_seed": each.seed_of_warm_start}
        for each in (before, config)
    )
    changed = [key for key in now if now[key] != was[key] and not key.startswith(_LATER)]
    if changed and any((config.run_directory / name).exists() for name in (BASE, WARM_START)):
        raise ValueError(
            f"{changed[0]} was {was[changed[0]]} when {config.run_directory} made its first model"
            f" and is {now[changed[0]]} now; give what it was, or begin anew with --overwrite"
        )


def schedule_jump(before: TrainConfig, config: StarPOConfig, checkpoint: Checkpoint) -> list[str]:
    """Return a line if the schedules, which span the whole run, give the next step other learning
    rates than it would have had.
    """
    now, step, said, remedy = config.train, checkpoint.step, [], ""
    guard = checkpoint.state.get("collapse_guard", {})
    factor = guard.get("lr_factor", config.guard.guard_lr ** guard.get("rollbacks", 0))
    last, due, new = before.shares(max(0, step - 1)), before.shares(step), now.shares(step)
    names = {"lr": "learning rate", "decoupled_lr": "decoupled one", "critic_lr": "critic's"}
    for flag in names if config.advantage.uses_critic else ("lr", "decoupled_lr"):
        was, rate = getattr(before, flag), getattr(now, flag)
        if math.isclose(due[flag], new[flag], abs_tol=1e-9) or None in (was, rate):
            continue
        said.append(
            f"the {names[flag]} of step {step} would have been {was * factor * due[flag]:.3g} and"
            f" is {rate * factor * new[flag]:.3g}"
            + (f", after {was * factor * last[flag]:.3g} in step {step - 1}" if step else "")
        )
        if new[flag]:
            remedy += f" {flag_of(flag)} {was * last[flag] / new[flag]:.3g}"
    if not said:
        return []
    return [
        f"{'; '.join(said)}: the schedule --lr-decay {now.lr_decay} --lr-warmup {now.lr_warmup} is"
        f" over {now.num_steps} steps now" + (f"; if it must not jump, give{remedy}" * bool(remedy))
    ]


def claim(
    config: StarPOConfig, refused: ExitStack
) -> tuple[StarPOConfig, TextIO | None, Checkpoint | None]:
    """Name the run and lock its directory (the lock is rank 0's; `refused` opens it), and with
    --resume find the checkpoint to continue from. Collective.

    Raises ValueError if another process uses it or if the checkpoint is of another model.
    """
    locks: list[TextIO] = []

    def say(line: str) -> None:
        print(line, flush=True)

    def lock() -> StarPOConfig:
        named, said, opened = lock_named(config)
        locks.append(refused.enter_context(opened))
        if recover(named.run_directory):
            say(f"run {named.run_directory} is as before: what was to overwrite it did not begin")
        if said:
            say(said)
        return named

    config = on_main(lock)

    def has_begun() -> bool:
        found = (config.run_directory / CONFIG_FILE).exists()
        if not found:
            say(f"resume: there is no run in {config.run_directory} yet: it begins")
        return found

    def compare(checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            check_beginning(config, skipped)
        for line in skipped:
            say(line)
        said = ["no checkpoint yet: training starts anew"]
        if checkpoint is not None:
            said = check_config(checkpoint, config.to_dict(), model_digests(config))
            said += schedule_jump(known_config(checkpoint.config).train, config, checkpoint)
        for line in said:
            say(f"resume: {line}")

    skipped: list[str] = []
    found = None
    if config.checkpoint.resume and on_main(has_begun):
        found = find_latest(config.run_directory / CHECKPOINTS, skipped.append)
        on_main(lambda: compare(found))
    return config, (locks[0] if locks else None), found
