"""Rules among several sections of the configuration."""

from dataclasses import dataclass, field, fields, replace
from typing import Self, get_type_hints

from ragen_mega.algorithm.tables import find_filter, is_judge, judges_tasks
from ragen_mega.config.sections.advantage import AdvantageConfig
from ragen_mega.config.sections.agent import AgentConfig, is_agent
from ragen_mega.config.sections.checkpoint import CheckpointConfig
from ragen_mega.config.sections.environment import EnvironmentConfig, is_task_file
from ragen_mega.config.sections.evaluation import EvaluationConfig
from ragen_mega.config.sections.filter import FilterConfig
from ragen_mega.config.sections.guard import GuardConfig
from ragen_mega.config.sections.logging import LoggingConfig
from ragen_mega.config.sections.lora import LoraConfig
from ragen_mega.config.sections.loss import LossConfig
from ragen_mega.config.sections.model import ModelConfig
from ragen_mega.config.sections.parallel import ParallelConfig
from ragen_mega.config.sections.rollout import RolloutConfig
from ragen_mega.config.sections.section import Section, check_effects, flag_of
from ragen_mega.config.sections.train import TrainConfig
from ragen_mega.config.sections.warm_start import WarmStartConfig


@dataclass(frozen=True)
class Sections:
    """The sections of the configuration, in the order of `--help`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def located(self) -> Self:
        """Return the configuration with absolute paths, and with the terms of the reward that tasks
        judge themselves among their options.
        """
        found = {name: part.located() for name, part in vars(self).items()}
        terms = [*filter(judges_tasks, self.advantage.reward_terms)]
        found["environment"] = found["environment"].with_terms(terms)
        return replace(self, **found)


def section_types() -> dict[str, type[Section]]:
    """Return section name -> class, in the order of `--help`."""
    return get_type_hints(Sections)


def check_rules(config: Sections) -> None:
    """Raise ValueError for a field that does nothing beside the fields of other sections, and for
    sections that do not go together.
    """
    check_effects(*(getattr(config, item.name) for item in fields(config)))
    for check in (
        _check_step,
        _check_directories,
        _check_guard,
        _check_groups,
        _check_objectives,
        _check_rewards,
        _check_routing,
        _check_placement,
        _check_critic,
        _check_lora,
        _check_teacher,
        _check_agents,
    ):
        check(config)


def _check_step(config: Sections) -> None:
    """Check that a step has trajectories and batches to train on."""
    advantage, rollout = config.advantage, config.rollout
    name = advantage.advantage_estimator
    kept = find_filter(config.filter.filter_strategy)
    kept.check(config.filter.filter_strategy, config.filter.value, rollout.num_groups)
    shares = sum(config.environment.shares.values())
    num_kept = config.filter.num_kept(rollout.num_groups)
    minibatch, trained = config.train.minibatch_size, int(num_kept or 0) * rollout.group_size
    if minibatch < trained and trained % minibatch != 0:
        divisor = next(size for size in range(minibatch, 0, -1) if trained % size == 0)
        raise ValueError(
            f"minibatch_size ({minibatch}) must divide the {trained} trajectories that a step"
            f" trains on ({num_kept} groups of {rollout.num_groups}, group_size"
            f" {rollout.group_size}); set --minibatch-size {divisor}"
        )
    max_response_length = config.environment.max_response_length or 0
    if max_response_length >= rollout.max_context_length:
        raise ValueError(
            f"max_response_length ({max_response_length}) must be below"
            f" max_context_length ({rollout.max_context_length}), which holds prompts too;"
            " lower --max-response-length or raise --max-context-length"
        )
    if config.train.shared_prefixes == "on" and config.parallel.fp8 != "none":
        raise ValueError(
            f"shared_prefixes on does not go with fp8 {config.parallel.fp8}, which rounds a token"
            " by what else is in its tensor; drop --shared-prefixes or --fp8"
        )
    if rollout.num_groups % shares != 0:
        raise ValueError(
            f"num_groups ({rollout.num_groups}) must be a multiple of the sum of environment"
            f" shares ({shares}); set --num-groups"
            f" {shares * max(1, rollout.num_groups // shares)}"
        )
    if rollout.max_sampling_rounds > 1 and (
        num_kept is None or not kept.drops_constant or config.filter.filter_keep_zero
    ):
        raise ValueError(
            "max_sampling_rounds needs a filter that keeps a known number of groups, none of"
            f" them constant, and filter_strategy is {config.filter.filter_strategy}"
            f"{' with filter_keep_zero' if config.filter.filter_keep_zero else ''}; set"
            " --filter-strategy top_fraction and --no-filter-keep-zero, --filter-value 1 for"
            " all of them"
        )
    if rollout.max_sampling_rounds > 1 and config.filter.filter_start > 0:
        raise ValueError(
            "max_sampling_rounds keeps the groups that vary most, and filter_start"
            f" {config.filter.filter_start} passes over them; drop --max-sampling-rounds or"
            " --filter-start"
        )
    if advantage.estimator.level == "turn" and config.loss.loss_mask == "legacy":
        raise ValueError(
            f"{name} works on sampled turns, and loss_mask legacy spreads over states; drop"
            " --loss-mask"
        )


def _check_directories(config: Sections) -> None:
    """Check that a run begins and ends with one set of weights."""
    if config.checkpoint.resume and config.logging.overwrite:
        raise ValueError(
            "resume continues a run and overwrite deletes it; drop --resume or --overwrite"
        )
    if config.warm_start.warm_start_from is not None and config.model.load is not None:
        raise ValueError(
            f"warm_start_from and load ({config.model.load}) both say what to begin with; drop one"
        )
    interval, num_steps = config.evaluation.eval_interval, config.train.num_steps
    for name, is_given in (
        ("stop_at_success", config.evaluation.stop_at_success is not None),
        ("keep_best", config.checkpoint.keep_best),
    ):
        if is_given and not 0 < interval < num_steps:
            raise ValueError(
                f"{name} looks at evaluations on the way, and eval_interval {interval} leaves none"
                f" in num_steps {num_steps}; drop it or set --eval-interval"
            )


def _check_groups(config: Sections) -> None:
    """Check that settings which compare trajectories have more than one to compare."""
    advantage, rollout, shares = config.advantage, config.rollout, config.environment.shares
    size, scope = rollout.group_size, advantage.reward_normalization_scope
    fewest = {
        "group": size,
        "environment": size * rollout.num_groups * min(shares.values()) // sum(shares.values()),
        "batch": size * rollout.num_groups,
    }[scope]
    if size < advantage.estimator.min_group_size:
        raise ValueError(
            f"{advantage.advantage_estimator} compares trajectories of a group, but group_size"
            f" is {size}; raise --group-size"
        )
    if size == 1 and find_filter(config.filter.filter_strategy).drops_constant:
        raise ValueError(
            "the filter ranks groups by the spread of their returns, but group_size is 1;"
            " raise --group-size or set --filter-strategy none"
        )
    if size == 1 and config.filter.soft_reweighting:
        raise ValueError(
            "soft_reweighting scales by the spread of a group's returns, but group_size is 1;"
            " raise --group-size or drop --soft-reweighting"
        )
    if advantage.reward_normalization != "identity" and fewest < 2:
        raise ValueError(
            f"reward_normalization {advantage.reward_normalization} compares the trajectories"
            f" of {'an' if scope == 'environment' else 'a'} {scope}, which are one; raise"
            " --group-size or drop --reward-normalization"
        )


def _check_objectives(config: Sections) -> None:
    """Check that objectives over whole trajectories get them."""
    advantage, window = config.advantage, config.rollout.context_window
    is_gspo = config.loss.policy_loss == "gspo"
    if is_gspo and advantage.estimator.level != "trajectory":
        raise ValueError(
            "policy_loss gspo has one ratio for a trajectory and needs one advantage for it,"
            f" and {advantage.advantage_estimator} gives each token its own; set"
            " --advantage-estimator grpo"
        )
    if window > 0 and (is_gspo or config.loss.importance_level == "sequence"):
        raise ValueError(
            f"context_window {window} cuts a trajectory into samples, and policy_loss gspo and"
            " importance_level sequence need it whole; drop --context-window"
        )


def _check_rewards(config: Sections) -> None:
    """Check that rewards of thoughts and actions can see some."""
    world, terms = config.environment, config.advantage.reward_terms
    for term, is_blind, why in (
        ("action_effectiveness", not world.worlds, "agents have no actions"),
        ("grounded_thought", not world.worlds, "thoughts of agents are not checked"),
        ("grounded_thought", not world.think, "without --think there are no thoughts"),
    ):
        if is_blind and term in terms:
            raise ValueError(f"reward {term} is always 0, for {why}; drop it from --reward")
    others = [name for name in world.shares if not is_task_file(name)]
    for term in filter(judges_tasks, terms):
        if others:
            raise ValueError(
                f"reward {term} has a parameter completions and judges tasks of a file, which"
                f" {others[0]} does not play; let it take a trajectory, or drop it from --reward"
            )


def _check_routing(config: Sections) -> None:
    """Check that the choices of routers are there before an update repeats them."""
    if config.train.routing_replay == "policy" and config.loss.old_logprobs != "recompute":
        raise ValueError(
            "routing_replay policy repeats the choices of the pass of old log-probabilities, and"
            f" old_logprobs {config.loss.old_logprobs} may do without it; set --old-logprobs"
            " recompute, or --routing-replay engine"
        )


_OWN_SERVERS = ("sglang_python", "sglang_arguments", "rollout_deterministic", "weight_transfer")
"""Settings of servers that the run starts itself."""


def _check_placement(config: Sections) -> None:
    """Check that samples of earlier weights can be trained on."""
    rollout, loss, staleness = config.rollout, config.loss, config.rollout.max_staleness
    least = config.environment.curriculum_success
    if config.parallel.placement == "separate" and least is not None:
        raise ValueError(
            f"curriculum_success {least} chooses tasks by the"
            " success of the step before, which placement separate samples ahead of; drop one of"
            " them"
        )
    if config.parallel.weight_senders > 1 and rollout.rollout_engine != "sglang":
        raise ValueError(
            f"weight_senders {config.parallel.weight_senders} send to SGLang, and the embedded"
            " engine takes weights from the first rank that trains; drop --weight-senders or add"
            " --rollout-engine sglang"
        )
    own = [name for name in _OWN_SERVERS if getattr(rollout, name) not in (None, False, "auto")]
    if rollout.given_engines and config.parallel.placement == "colocated" and own:
        raise ValueError(
            f"{own[0]} is for servers of the run, and engine_addresses names all that sample; drop"
            f" {flag_of(own[0])}, or start the engines so"
        )
    if rollout.carry_over > 0 and staleness < 2:
        raise ValueError(
            f"carry_over {rollout.carry_over} leaves trajectories for the next weights, for"
            f" which the trainers would wait at max_staleness {staleness}; set --max-staleness"
            " 2 or drop --carry-over"
        )
    if rollout.carry_over > 0 and rollout.max_sampling_rounds > 1:
        raise ValueError(
            f"carry_over {rollout.carry_over} does not go with max_sampling_rounds"
            f" {rollout.max_sampling_rounds}, which judges whole rollouts before it goes on;"
            " drop one of them"
        )
    if rollout.carry_over_cache == "keep" and rollout.rollout_engine == "sglang":
        raise ValueError(
            "carry_over_cache keep needs rollout_engine embedded: SGLang drops its caches when"
            " it takes weights; drop --carry-over-cache or --rollout-engine sglang"
        )
    if 0 < staleness >= config.train.num_steps:
        raise ValueError(
            f"max_staleness ({staleness}) must be below num_steps ({config.train.num_steps}), or"
            " every rollout is sampled under the first weights; lower --max-staleness"
        )
    if staleness > 0 and loss.old_logprobs == "auto" and loss.importance_cap is None:
        raise ValueError(
            f"max_staleness {staleness} trains on samples of other weights, and nothing"
            " corrects for that: add --importance-cap 2 (decoupled PPO), or --old-logprobs"
            " engine (the ratio is to those that sampled), or --old-logprobs recompute to go"
            " without"
        )
    if staleness > 0 and config.advantage.estimator.needs_fresh_samples:
        raise ValueError(
            f"{config.advantage.advantage_estimator} needs samples of the present weights, as it"
            f" declares, and max_staleness is {staleness}; set --max-staleness 0 or another"
            " --advantage-estimator"
        )


def _check_critic(config: Sections) -> None:
    """Check that settings of the critic have one."""
    name, has_none = config.advantage.advantage_estimator, not config.advantage.uses_critic
    if has_none and config.parallel.offload == "turns" and config.model.teacher_load is None:
        raise ValueError(
            f"offload turns is for actor and critic or teacher, and advantage_estimator {name} has"
            " no critic; set --offload rollout"
        )
    if has_none and config.train.critic_warmup > 0:
        raise ValueError(
            f"critic_warmup does nothing: advantage_estimator {name} has no critic; drop it"
        )
    if 0 < config.train.critic_warmup >= config.train.num_steps:
        raise ValueError(
            f"critic_warmup ({config.train.critic_warmup}) must be below num_steps"
            f" ({config.train.num_steps}), or the policy is never trained; lower --critic-warmup"
            " or raise --num-steps"
        )
    if has_none and config.model.critic_load is not None:
        raise ValueError(
            f"critic_load does nothing: advantage_estimator {name} has no critic; drop it"
        )
    if config.warm_start.warm_start_critic_steps > 0:
        terms, normalization = config.advantage.reward_terms, config.advantage.reward_normalization
        lacks = [name for name in terms if is_judge(name) or name == "group_relative"]
        if normalization != "identity":
            lacks.append(f"reward_normalization {normalization}")
        if lacks:
            raise ValueError(
                "warm_start_critic_steps teaches the critic returns of single scripted episodes,"
                f" without the group or the judge of {lacks[0]}; drop one of them"
            )


def _check_lora(config: Sections) -> None:
    """Check that adapters have one base, which stays as it is."""
    model, warm = config.model, config.warm_start
    if not config.lora.rank:
        return
    if model.critic_load not in (None, model.load):
        raise ValueError(
            f"lora_rank {config.lora.rank} has one model for actor and critic, and critic_load"
            f" ({model.critic_load}) is another than load ({model.load}); drop --critic-load"
        )
    if warm.warm_start_critic_steps > 0:
        raise ValueError(
            f"lora_rank {config.lora.rank} has one model for actor and critic, and"
            " warm_start_critic_steps makes another one for the critic; drop it"
        )
    if config.lora.lora_sync == "merged":
        return
    if config.rollout.given_engines:
        raise ValueError(
            "lora_sync adapter is for engines of the run, and engine_addresses names others; drop"
            " --lora-sync"
        )
    if config.rollout.rollout_engine == "sglang" and "attention" not in config.lora.targets:
        raise ValueError(
            "lora_sync adapter with rollout_engine sglang needs adapters of the attention, which"
            " SGLang asks for in each; set --lora-targets attention,mlp, or drop --lora-sync"
        )


def _check_teacher(config: Sections) -> None:
    """Check that a teacher differs from the policy, and that its log-ratios reach the loss."""
    model, advantage, loss = config.model, config.advantage, config.loss
    is_given = model.teacher_load is not None or model.restates_prompts
    if is_given and not advantage.has_teacher:
        raise ValueError(
            f"a teacher does nothing with reward {advantage.reward}; drop --teacher-..., or set"
            ' --reward "environment + 0.1*teacher", or --reward teacher with --advantage-estimator'
            " none"
        )
    if not advantage.has_teacher:
        return
    if not is_given:
        raise ValueError(
            "reward teacher needs a teacher that is not the policy itself; set --teacher-load"
            " MODEL, --teacher-prompt-examples 4 or --teacher-system-prompt TEXT"
        )
    names, given = set(config.environment.shares), set(model.teachers)
    if model.teacher_load is not None and given not in ({""}, names):
        raise ValueError(
            "teacher_load must name a teacher for each environment that is trained"
            f" ({', '.join(sorted(names))}), not for {', '.join(sorted(given)) or 'none'}; write"
            " one for each, or a single model for all"
        )
    is_gspo = loss.policy_loss == "gspo" and not advantage.teacher_top_k
    if is_gspo or loss.loss_mask == "legacy":
        raise ValueError(
            "a teacher gives each sampled token an advantage of its own, which policy_loss gspo"
            " and loss_mask legacy have no place for; drop --policy-loss or --loss-mask, or for"
            " gspo set --teacher-top-k 16"
        )
    if advantage.advantage_estimator == "none" and config.filter.soft_reweighting:
        raise ValueError(
            "soft_reweighting scales advantages of rewards, and advantage_estimator none has none;"
            " drop --soft-reweighting"
        )
    if (
        advantage.advantage_estimator == "none"
        and find_filter(config.filter.filter_strategy).drops_constant
    ):
        raise ValueError(
            f"filter_strategy {config.filter.filter_strategy} ranks groups by their returns, and"
            f" reward {advantage.reward} leaves none; set --filter-strategy none"
        )
    if model.restates_prompts and config.rollout.context_window:
        raise ValueError(
            f"context_window {config.rollout.context_window} writes prompts anew in the middle of"
            " an episode, and a teacher has its own first prompt alone; drop --context-window, or"
            " --teacher-prompt-examples and --teacher-system-prompt"
        )


def _check_agents(config: Sections) -> None:
    """Check that settings of agents have one, and that agents have no settings of environments."""
    agents = [name for name in config.environment.evaluated if is_agent(name)]
    given = [
        item.name
        for item in fields(AgentConfig)
        if getattr(config.agent, item.name) != item.default
    ]
    if given and not agents:
        raise ValueError(
            f"{given[0]} does nothing without an agent; drop {flag_of(given[0])} or set --agent"
            " my_module:run"
        )
    if not agents:
        return
    for name, value in (
        ("context_window", config.rollout.context_window or None),
        ("prompt_examples", config.environment.prompt_examples or None),
        ("teacher_prompt_examples", config.model.teacher_prompt_examples),
        ("teacher_system_prompt", config.model.teacher_system_prompt),
    ):
        if value is not None:
            raise ValueError(
                f"{name} {value!r} is for environments, and {agents[0]} writes its own prompts;"
                f" drop {flag_of(name)}"
            )
    world, are_served = config.environment, all("://" in name for name in agents)
    processes = world.environment_processes if are_served else 0
    for name, unread, why in (
        ("format_penalty", world.format_penalty, "judges its answers itself"),
        ("environment_processes", processes or None, "runs elsewhere"),
    ):
        if unread is not None and agents == world.evaluated:
            raise ValueError(
                f"{name} {unread} does nothing with {agents[0]}, which {why}; drop {flag_of(name)}"
            )
    if config.loss.policy_loss == "gspo" or config.loss.importance_level == "sequence":
        raise ValueError(
            f"policy_loss gspo and importance_level sequence need a trajectory whole, and"
            f" {agents[0]} may branch; drop them"
        )
    if config.loss.loss_mask == "legacy":
        raise ValueError(
            f"loss_mask legacy trains on all behind the first prompt, and {agents[0]} may have"
            " answers there that are not trained; drop --loss-mask"
        )


def _check_guard(config: Sections) -> None:
    """Check that the guard can go back and filter."""
    interval, num_steps = config.checkpoint.save_interval, config.train.num_steps
    is_saved = 0 < interval < num_steps or config.checkpoint.keep_best
    if config.guard.guard == "react" and not is_saved:
        raise ValueError(
            f"guard react goes back to a checkpoint, and save_interval {interval} writes none on"
            f" the way in num_steps {num_steps}; set --save-interval"
        )
    if config.guard.guard != "react" or config.guard.guard_filter >= 1:
        return
    rule = "guard_filter ranks groups by the spread of their returns"
    if config.rollout.group_size == 1:
        raise ValueError(f"{rule}, but group_size is 1; raise --group-size or set --guard-filter 1")
    if not config.advantage.reward_terms:
        raise ValueError(f"{rule}, and reward teacher alone gives none; set --guard-filter 1")
