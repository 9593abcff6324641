"""The configuration: one frozen dataclass per concern, validated where it is built, flat
Megatron-style flags.

Field docstrings are the text of `--help`. A value that cannot work, or that would do nothing, is a
ValueError that names the rule, the values and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ragen_mega.environments import calls
from ragen_mega.environments.registry import make

OffloadMode = Literal["none", "rollout", "turns"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    load: str | None = None
    """Hugging Face model name or directory to start from. Without it a small Qwen2 is built and
    warm-started.
    """
    critic_load: str | None = None
    """Hugging Face model name or directory that the critic starts from (default: what the policy
    starts from).
    """
    hidden_size: int = 96
    """Width of the small model (only without --load)."""
    num_layers: int = 2
    """Depth of the small model (only without --load)."""
    num_attention_heads: int = 4
    """Attention heads of the small model (only without --load)."""
    num_query_groups: int = 2
    """Key-value heads of the small model (only without --load)."""
    ffn_hidden_size: int = 256
    """Width of the small model's SwiGLU (only without --load)."""


@dataclass(frozen=True)
class ParallelConfig:
    """How model and optimizer are laid out over the ranks, what computes the layers and in which
    numbers.
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share every matrix (TP)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (PP)."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions over the sequence (needs TP > 1)."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: the core attention only, or whole layers."""
    bf16: bool = False
    """Parameters and activations in bfloat16; their originals, gradient sums and Adam's moments in
    float32.
    """
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers: Transformer Engine's (CUDA and --bf16), or megatron-core's local ones. `auto` takes
    the former where they can compute."""
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Matrix products of the layers in FP8 (Transformer Engine): `e4m3` throughout, `hybrid` with
    e5m2 for gradients. The LM head, the critic's head and attention stay in higher precision."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """Scales of FP8 tensors: from earlier passes, from the tensor itself (default), or one per
    block of 128 or 32 values.
    """
    offload: OffloadMode = "none"
    """What waits in host memory: nothing; during rollouts all parameters, gradients and optimizer
    state; or furthermore actor and critic in turns, each while the other one computes."""

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, not {getattr(self, name)}; set {flag_of(name)} 1"
                )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel shards over tensor-parallel ranks and does nothing at"
                " tensor_model_parallel_size 1; drop --sequence-parallel or raise"
                " --tensor-model-parallel-size"
            )
        if self.transformer_impl == "transformer_engine" and not self.bf16:
            raise ValueError(
                "transformer_impl transformer_engine has no fused attention in float32; add --bf16"
                " or drop --transformer-impl"
            )
        if self.fp8 == "none":
            if self.fp8_recipe is not None:
                raise ValueError(
                    f"fp8_recipe {self.fp8_recipe} does nothing with fp8 none; drop it or add --fp8"
                    " hybrid"
                )
            return
        if self.transformer_impl == "local":
            raise ValueError(
                f"fp8 {self.fp8} needs Transformer Engine's layers; drop --transformer-impl local"
                " or --fp8"
            )
        if not self.bf16:
            raise ValueError(
                f"fp8 {self.fp8} works beside bfloat16 parameters; add --bf16 or drop --fp8"
            )

    @property
    def recipe(self) -> str:
        """How FP8 tensors are scaled. With `tensorwise` a log-probability depends on the weights
        and its own microbatch alone, not on what was computed before."""
        return self.fp8_recipe or "tensorwise"

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless the layout fits `world_size` ranks."""
        model_parallel = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % model_parallel:
            raise ValueError(
                f"tensor_model_parallel_size ({self.tensor_model_parallel_size}) x"
                f" pipeline_model_parallel_size ({self.pipeline_model_parallel_size}) must divide"
                f" the world size ({world_size}); start torchrun with --nproc-per-node"
                f" {model_parallel} or a multiple, or lower the parallel sizes"
            )


def parse_shares(environments: str) -> dict[str, int]:
    """`sokoban:4,my_module:Mine` -> {"sokoban": 4, "my_module:Mine": 1}. Raises ValueError for
    anything else than distinct names with positive shares.
    """
    shares: dict[str, int] = {}
    for part in environments.split(","):
        name, _, share = part.strip().rpartition(":")
        if not share.isdigit():  # an import path has a colon of its own
            name, share = part.strip(), "1"
        if int(share) == 0 or not name or name in shares:
            raise ValueError(
                "environments must be distinct names with positive shares, not"
                f" {environments!r}; write e.g. sokoban:4,frozen_lake:4"
            )
        shares[name] = int(share)
    return shares


@dataclass(frozen=True)
class EnvironmentConfig:
    """What is played, and within which limits."""

    environments: str = "frozen_lake"
    """Environments and their shares of the groups of a step, e.g. `frozen_lake`,
    `sokoban:4,frozen_lake:4` or, of a file my_module.py, `my_module:MyEnvironment`.
    """
    environment_options: str = "{}"
    """JSON object of options per environment, e.g. '{"sokoban": {"observation": "grid_coord"}}'."""
    curriculum: str = "{}"
    """JSON object: step -> options per environment that training adds to environment_options from
    that step on. Evaluation never uses them. E.g. '{"0": {"sokoban": {"max_shortest": 5}}, "30":
    {}}'."""
    max_turns: int = 5
    """Turns per trajectory (K)."""
    max_actions_per_turn: int = 5
    """Actions executed per turn; more are dropped."""
    max_actions: int = 10
    """Actions per trajectory."""
    format_penalty: float = -0.1
    """Reward of a turn whose answer cannot be parsed or holds an unknown action, added to what it
    earned.
    """
    think: bool = True
    """Force a `<think>` at the start of every turn."""
    prompt_style: Literal["full", "system", "compact"] = "full"
    """Instructions in the first user message, in the system message, or (small models) none at all.
    """
    environment_timeout: float = 60.0
    """Seconds an environment may take for a turn before its trajectory is closed as truncated (0:
    any time).
    """

    def __post_init__(self) -> None:
        if not 0 <= self.environment_timeout < math.inf:
            raise ValueError(
                "environment_timeout must be a number of seconds, 0 for no limit, not"
                f" {self.environment_timeout}; set --environment-timeout 60"
            )
        self._check_options(
            "environment_options", _json_object("environment_options", self.environment_options), {}
        )
        for step, options in _json_object("curriculum", self.curriculum).items():
            if not step.isdigit():
                raise ValueError(
                    f"curriculum maps steps to options, but {step!r} is no step; write e.g. "
                    '\'{"0": {"sokoban": {"max_shortest": 5}}}\''
                )
            self._check_options("curriculum", options, json.loads(self.environment_options))

    def _check_options(self, flag: str, options: Any, base: dict[str, Any]) -> None:
        if not isinstance(options, dict) or not all(
            isinstance(value, dict) for value in options.values()
        ):
            raise ValueError(
                f"{flag} must map environment names to objects, not {options!r}; "
                'write e.g. \'{"sokoban": {"observation": "grid"}}\''
            )
        if unknown := set(options) - set(self.shares):
            raise ValueError(
                f"{flag} names {', '.join(sorted(unknown))}, which is not trained"
                f" ({', '.join(self.shares)}); drop it or add it to --environments"
            )
        for name in self.shares:
            calls.close(make(name, **base.get(name, {}) | options.get(name, {})))

    @property
    def shares(self) -> dict[str, int]:
        """Environment name -> share of the groups."""
        return parse_shares(self.environments)

    def options(self, name: str) -> dict[str, Any]:
        """Options of one environment's constructor."""
        return json.loads(self.environment_options).get(name, {})

    def training_options(self, name: str, step: int) -> dict[str, Any]:
        """The options under which a training step plays: those of `options` and of the curriculum's
        latest entry.
        """
        entries = {
            int(key): value
            for key, value in json.loads(self.curriculum).items()
            if int(key) <= step
        }
        return self.options(name) | (entries[max(entries)].get(name, {}) if entries else {})


@dataclass(frozen=True)
class RolloutConfig:
    """How many trajectories are sampled in a step, and how."""

    num_groups: int = 8
    """Initial states per step (P)."""
    group_size: int = 16
    """Trajectories per initial state (N)."""
    max_response_length: int = 400
    """Tokens that may be sampled in one turn."""
    max_context_length: int = 3600
    """Tokens of a trajectory; one that would grow longer is closed as truncated."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    rollout_engine: Literal["embedded", "sglang"] = "embedded"
    """Who samples: `embedded` decodes in this process with a key-value cache per trajectory;
    `sglang` is a server of this rank or of several, kept between rollouts."""
    sglang_python: str | None = None
    """Python of an environment that has SGLang, e.g. .venv-sglang/bin/python; it need not be the
    trainer's (default: it is).
    """
    kv_cache_tokens: int | None = None
    """Tokens in SGLang's key-value cache (default: every trajectory of the server at full length).
    """
    rollout_tensor_parallel_size: int = 1
    """Consecutive ranks that share one SGLang server, each with a part of its layers. As large as
    --tensor-model-parallel-size, and weights pass to the servers without any traffic between
    tensor-parallel ranks."""
    rollout_fp8: bool = False
    """SGLang computes the linear layers in FP8, with a scale per block of 128 x 128 weights. Its
    samples then differ from the trainer's policy: correct for it with --importance-cap."""
    rollout_deterministic: bool = False
    """SGLang's samples depend on their seeds alone, not on the batch that they are drawn in;
    slower, and on GPUs only.
    """
    weight_transfer: Literal["auto", "file", "ipc"] = "auto"
    """How weights reach SGLang's servers: `ipc` copies on the device and keeps no copy, so that a
    server that died is replaced when all ranks have played their parts and can send theirs again;
    `file` goes through files in host memory, from which it is replaced at once. `auto` is `ipc` on
    GPUs and `file` on a CPU."""

    def num_engines(self, world_size: int, ranks_per_node: int) -> int:
        """Engines of a job. Raises ValueError unless every one has its ranks on one node."""
        size = self.rollout_tensor_parallel_size
        if ranks_per_node % size or world_size % size:
            raise ValueError(
                f"rollout_tensor_parallel_size ({size}) must divide the ranks of a node"
                f" ({ranks_per_node}) and of the job ({world_size}); set"
                " --rollout-tensor-parallel-size 1 or another divisor, or start other ranks"
            )
        return world_size // size

    def sessions_per_engine(self, num_engines: int) -> int:
        """Trajectories that one of `num_engines` engines plays at a time, at most."""
        return -(-self.num_groups * self.group_size // num_engines)

    def kv_cache_size(self, sessions: int) -> int:
        """Tokens of an engine's key-value cache: as set, else room for `sessions` whole
        trajectories and one more.
        """
        return self.kv_cache_tokens or (sessions + 1) * self.max_context_length

    def __post_init__(self) -> None:
        defaults = {
            "sglang_python": None,
            "kv_cache_tokens": None,
            "weight_transfer": "auto",
            "rollout_fp8": False,
            "rollout_deterministic": False,
            "rollout_tensor_parallel_size": 1,
        }
        for name, default in defaults.items():
            if self.rollout_engine == "embedded" and getattr(self, name) != default:
                raise ValueError(
                    f"{name} does nothing with rollout_engine embedded; drop it or set"
                    " --rollout-engine sglang"
                )
        for name in (
            "num_groups",
            "group_size",
            "max_response_length",
            "max_context_length",
            "rollout_tensor_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, not {getattr(self, name)}; set {flag_of(name)}"
                )
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be positive in training, not {self.temperature}: a greedy policy"
                " explores nothing; set --temperature 1"
            )


@dataclass(frozen=True)
class FilterConfig:
    """Which initial states a step trains on."""

    filter_strategy: Literal[
        "none", "top_fraction", "top_p_linear", "top_p_softmax", "top_k", "min_p"
    ] = "top_fraction"
    """How groups are kept, by the standard deviation of their raw returns (StarPO-S: top_fraction).
    """
    filter_value: float | None = None
    """Fraction, probability mass or count of the strategy (default of top_fraction: 0.25)."""
    filter_keep_zero: bool = False
    """Keep groups whose trajectories all earned the same."""
    soft_reweighting: bool = False
    """Scale each kept group's advantages by its share of the largest standard deviation."""

    def __post_init__(self) -> None:
        if self.filter_strategy == "none" and self.filter_value is not None:
            raise ValueError(
                f"filter_value {self.filter_value} does nothing with filter_strategy none; "
                "drop --filter-value or name a strategy"
            )
        if self.filter_strategy == "none" and self.filter_keep_zero:
            raise ValueError(
                "filter_keep_zero does nothing with filter_strategy none, which keeps all; drop the"
                " flag"
            )
        if self.filter_strategy not in ("none", "top_fraction") and self.filter_value is None:
            raise ValueError(
                f"filter_strategy {self.filter_strategy} needs its value; add --filter-value"
            )

    @property
    def value(self) -> float:
        return 0.25 if self.filter_value is None else self.filter_value


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    advantage_estimator: Literal[
        "gae", "bilevel_gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus"
    ] = "gae"
    """`gae` and `bilevel_gae` train a critic (PPO); the others compare trajectories of a group or
    batch.
    """
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE lambda per token."""
    turn_gamma: float | None = None
    """Discount per turn (bilevel_gae only; default 0.95)."""
    turn_lam: float | None = None
    """GAE lambda per turn (bilevel_gae only; default 1)."""
    reward_placement: Literal["trajectory", "turn"] = "trajectory"
    """Where reward enters: the whole return at the last token, or each turn's reward at the turn's
    end.
    """
    reward_normalization: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Normalisation of returns before the estimator (placement `trajectory` only)."""
    reward_normalization_scope: Literal["group", "environment", "batch"] = "group"
    """Trajectories that are normalised together."""
    whiten_advantages: bool | None = None
    """Normalise advantages over the batch (default: with a critic)."""
    kl_in_reward: Literal["none", "k1", "k2", "k3"] = "none"
    """KL to the reference policy subtracted from the reward of each token."""
    kl_reward_coef: float = 0.0
    """Its coefficient."""

    def __post_init__(self) -> None:
        bilevel = self.advantage_estimator == "bilevel_gae"
        if not bilevel and (self.turn_gamma is not None or self.turn_lam is not None):
            raise ValueError(
                "turn_gamma and turn_lam do nothing with advantage_estimator"
                f" {self.advantage_estimator}; drop them or set --advantage-estimator bilevel_gae"
            )
        if bilevel and self.reward_placement != "turn":
            raise ValueError("bilevel_gae discounts turn rewards; add --reward-placement turn")
        if (
            not self.uses_critic
            and self.reward_placement == "turn"
            and self.advantage_estimator != "reinforce_plus_plus"
        ):
            raise ValueError(
                f"{self.advantage_estimator} compares whole returns, so reward_placement turn does"
                " nothing; drop --reward-placement"
            )
        if self.reward_normalization != "identity" and self.reward_placement == "turn":
            raise ValueError(
                "reward_normalization acts on whole returns; drop it or --reward-placement turn"
            )
        if self.reward_normalization == "identity" and self.reward_normalization_scope != "group":
            raise ValueError(
                "reward_normalization_scope does nothing with identity; add --reward-normalization"
                " mean"
            )
        if (self.kl_in_reward == "none") != (self.kl_reward_coef == 0.0):
            raise ValueError(
                f"kl_in_reward ({self.kl_in_reward}) and kl_reward_coef ({self.kl_reward_coef})"
                " need each other; set both or none"
            )
        if self.kl_in_reward != "none" and self.advantage_estimator in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(
                f"{self.advantage_estimator} uses whole returns, so a per-token KL reward does"
                " nothing; use --kl-kind instead"
            )

    @property
    def uses_critic(self) -> bool:
        return self.advantage_estimator in ("gae", "bilevel_gae")

    @property
    def whitens(self) -> bool:
        return self.uses_critic if self.whiten_advantages is None else self.whiten_advantages


@dataclass(frozen=True)
class LossConfig:
    """The policy loss and the critic's."""

    clip_ratio_low: float = 0.2
    """Lower clip bound of the ratio, 1 - this."""
    clip_ratio_high: float = 0.28
    """Upper clip bound of the ratio, 1 + this (StarPO-S: clip-higher)."""
    dual_clip: float | None = None
    """Bound of the loss where the advantage is negative (arXiv:1912.09729), e.g. 3."""
    kl_kind: Literal["none", "k1", "k2", "k3"] = "none"
    """KL to the reference policy as a loss term."""
    kl_coef: float = 0.0
    """Its coefficient."""
    entropy_coef: float = 0.001
    """Coefficient of the entropy bonus."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = (
        "token-mean"
    )
    """Mean over tokens of the minibatch, or over trajectories of their token mean or token sum."""
    importance_cap: float | None = None
    """Truncated importance correction min(pi_old / pi_rollout, cap) between trainer and engine."""
    value_clip: float | None = 0.5
    """Clip range of the critic's change of value."""

    def __post_init__(self) -> None:
        if (self.kl_kind == "none") != (self.kl_coef == 0.0):
            raise ValueError(
                f"kl_kind ({self.kl_kind}) and kl_coef ({self.kl_coef}) need each other; set both"
                " or none"
            )


@dataclass(frozen=True)
class TrainConfig:
    """Optimizer steps and their schedule."""

    num_steps: int = 200
    """StarPO steps: one rollout and its updates."""
    minibatch_size: int = 32
    """Trajectories per optimizer step (E)."""
    updates_per_rollout: int = 1
    """Passes over the kept trajectories of a rollout (Online-k)."""
    max_tokens_per_microbatch: int = 16384
    """Positions in one forward pass."""
    lr: float = 1e-6
    """Learning rate of the policy."""
    critic_lr: float = 1e-5
    """Learning rate of the critic."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the run."""
    lr_warmup: int = 0
    """Steps of linear warm-up of both learning rates."""
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    """Added to the root mean square of the policy's gradient in Adam. Well above it, Adam becomes
    gradient descent with momentum, which leaves weights with little gradient where they are: noisy
    rewards then spare what was learned before."""
    clip_grad: float = 1.0
    """Largest global gradient norm."""
    critic_warmup: int = 0
    """First steps in which only the critic is updated."""
    max_nonfinite_updates: int = 3
    """Updates of one model in a row that a non-finite loss or gradient may cost; after that many
    the run stops.
    """
    seed: int = 0
    """Seed of initial states, outcomes, sampling and minibatches."""

    def __post_init__(self) -> None:
        for name in (
            "num_steps",
            "minibatch_size",
            "updates_per_rollout",
            "max_tokens_per_microbatch",
            "max_nonfinite_updates",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, not {getattr(self, name)}; set {flag_of(name)}"
                )
        for name in ("lr", "critic_lr", "clip_grad", "adam_eps"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} must be positive, not {getattr(self, name)}; set {flag_of(name)}"
                )


@dataclass(frozen=True)
class WarmStartConfig:
    """Behaviour cloning of a scripted player, before reinforcement learning."""

    warm_start_first_turn_steps: int = 300
    """Optimizer steps of behaviour cloning on first turns of scripted play (only without --load).
    """
    warm_start_steps: int = 300
    """Further steps on whole scripted trajectories."""
    warm_start_batch: int = 16
    """Trajectories per step; of first turns twice as many."""
    warm_start_trajectories: int = 2000
    """Scripted trajectories, and four times as many first turns; the steps take as many passes as
    they need.
    """
    warm_start_lr: float = 4e-3
    """Peak learning rate of the warm start."""
    warm_start_critic_steps: int = 0
    """Steps of regression of the critic to the returns of the whole scripted trajectories (only
    with a critic).
    """
    warm_start_critic_lr: float = 1e-3
    """Peak learning rate of that."""
    warm_start_temperature: float = 1.0
    """Temperature at which the scripted play is imitated. Above 1 the policy starts surer of what
    is certain there, and as open where the play is random: reinforcement learning then shifts
    choices without loosening facts."""
    warm_start_skill: float = 0.0
    """Probability that the scripted player acts optimally instead of uniformly at random."""

    def __post_init__(self) -> None:
        for name in ("warm_start_lr", "warm_start_critic_lr", "warm_start_temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} must be positive, not {getattr(self, name)}; set {flag_of(name)}"
                )
        for name in ("warm_start_batch", "warm_start_trajectories"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, not {getattr(self, name)}; set {flag_of(name)}"
                )
        for name in ("warm_start_first_turn_steps", "warm_start_steps", "warm_start_critic_steps"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 0, not {getattr(self, name)}; set {flag_of(name)}"
                )
        if not 0 <= self.warm_start_skill <= 1:
            raise ValueError(
                f"warm_start_skill must be a probability, not {self.warm_start_skill}; set it from"
                " 0 to 1"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """When and on what the policy is evaluated."""

    eval_interval: int = 20
    """Steps between evaluations (0: only at the end)."""
    eval_prompts: int = 256
    """Held-out initial states per evaluation."""
    eval_samples: int = 8
    """Episodes from each of them in the last evaluation; evaluations on the way play one."""
    eval_temperature: float = 0.5
    """Sampling temperature of evaluation."""
    boards: str | None = None
    """Boards file to evaluate on instead of the packaged one."""

    def __post_init__(self) -> None:
        for name in ("eval_prompts", "eval_samples"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be positive, not {getattr(self, name)}; set {flag_of(name)} to at"
                    " least 1"
                )
        if self.eval_interval < 0:
            raise ValueError(
                f"eval_interval must be at least 0, not {self.eval_interval}; set --eval-interval 0"
                " to evaluate only at the end"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run writes what it can be resumed from, and what of it is kept."""

    save_interval: int = 10
    """Steps between checkpoints (0: only after the last step and on SIGTERM)."""
    keep_last: int = 2
    """Newest checkpoints that are kept (0: all)."""
    keep_best: bool = False
    """Write a checkpoint whenever an evaluation is the best so far, and keep that one too."""
    keep_rollouts: int | None = None
    """Newest rollouts that stay on the disk (0: all; default: those since the oldest checkpoint
    that is kept).
    """
    resume: bool = False
    """Go on from the newest intact checkpoint of the run of this name; begin it if there is none.
    """

    def __post_init__(self) -> None:
        for name in ("save_interval", "keep_last", "keep_rollouts"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(
                    f"{name} must be at least 0, not {getattr(self, name)}; set {flag_of(name)}"
                )


@dataclass(frozen=True)
class LoggingConfig:
    """Where a run writes."""

    name: str | None = None
    """Name of the run; its files go to <output>/<name> (default: environment, estimator and seed).
    """
    output: str = "runs"
    """Directory of all runs."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    overwrite: bool = False
    """Delete an earlier run of the same name."""


@dataclass(frozen=True)
class StarPOConfig:
    """Train a language-model agent by StarPO (arXiv:2504.20073) on megatron-core.

    --recipe NAME puts the flags of ragen_mega/config/recipes/NAME.flags before those of the command
    line, which win; NAME none takes no recipe.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        for section in self.to_dict().values():
            for name, value in section.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"{name} must be a finite number, not {value}")
        if self.checkpoint.resume and self.logging.overwrite:
            raise ValueError(
                "resume continues a run and overwrite deletes it; drop --resume or --overwrite"
            )
        if self.checkpoint.keep_best and self.evaluation.eval_interval == 0:
            raise ValueError(
                "keep_best compares evaluations during training; drop it or set --eval-interval"
            )
        total = sum(self.environment.shares.values())
        if self.rollout.num_groups % total:
            raise ValueError(
                f"num_groups ({self.rollout.num_groups}) must be a multiple of the sum of"
                f" environment shares ({total}); set --num-groups"
                f" {total * max(1, self.rollout.num_groups // total)}"
            )
        if self.rollout.group_size == 1 and not self.advantage.uses_critic:
            raise ValueError(
                f"{self.advantage.advantage_estimator} compares trajectories of a group, but"
                " group_size is 1; raise --group-size"
            )
        if self.rollout.group_size == 1 and self.filter.filter_strategy != "none":
            raise ValueError(
                "the filter ranks groups by the spread of their returns, but group_size is 1; "
                "raise --group-size or set --filter-strategy none"
            )
        if not self.advantage.uses_critic and self.parallel.offload == "turns":
            raise ValueError(
                "offload turns is for actor and critic, and advantage_estimator"
                f" {self.advantage.advantage_estimator} has no critic; set --offload rollout"
            )
        if not self.advantage.uses_critic and self.train.critic_warmup:
            raise ValueError(
                "critic_warmup does nothing: advantage_estimator"
                f" {self.advantage.advantage_estimator} has no critic; drop it"
            )
        if not self.advantage.uses_critic and self.model.critic_load:
            raise ValueError(
                "critic_load does nothing: advantage_estimator"
                f" {self.advantage.advantage_estimator} has no critic; drop it"
            )
        if (
            self.warm_start.warm_start_critic_steps
            and self.advantage.reward_normalization != "identity"
        ):
            raise ValueError(
                "warm_start_critic_steps teaches the critic whole returns, but"
                f" reward_normalization {self.advantage.reward_normalization} subtracts the group's"
                " mean; drop one of them"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy takes part."""
        return self.loss.kl_kind != "none" or self.advantage.kl_in_reward != "none"

    @property
    def run_directory(self) -> Path:
        name = (
            self.logging.name
            or "-".join(
                (
                    self.environment.environments.replace(":", "").replace(",", "+"),
                    self.advantage.advantage_estimator,
                )
            )
            + f"-seed{self.train.seed}"
        )
        return Path(self.logging.output) / name

    def to_dict(self) -> dict[str, Any]:
        """Section name -> field name -> value, as JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StarPOConfig:
        """Inverse of `to_dict`; unknown keys raise ValueError."""
        sections = {item.name: item.default_factory for item in dataclasses.fields(cls)}
        for section, entries in values.items():
            known = (
                {item.name for item in dataclasses.fields(sections[section])}
                if section in sections
                else set()
            )
            if unknown := set(entries) - known:
                raise ValueError(
                    f"config has unknown keys {sorted(unknown)} in {section!r}; load it with the"
                    " version that wrote it"
                )
        return cls(**{section: sections[section](**entries) for section, entries in values.items()})


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} must be a JSON object, not {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, not {text!r}")
    return value


def flag_of(name: str) -> str:
    """How a field is set on the command line."""
    return "--" + name.replace("_", "-")
