"""The configuration: one frozen dataclass per concern, validated where it is built, flat
Megatron-style flags.

Field docstrings are the text of `--help`. A value that cannot work, or that would do nothing, is a
ValueError that names the rule, the values and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from ragen_mega.algorithm.tables import (
    Estimator,
    check_estimator,
    check_filter,
    check_metric,
    find_estimator,
    find_filter,
    parse_reward,
)
from ragen_mega.environments.pool import briefly
from ragen_mega.environments.protocol import Budget
from ragen_mega.environments.registry import held_out_options, make

OffloadMode = Literal["none", "rollout", "turns"]


@dataclass(frozen=True)
class Bounds:
    """Where a number must lie, in the words of the error and in numbers."""

    words: str
    low: float
    high: float = math.inf
    is_open: bool = False
    """Whether `low` itself is excluded."""

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high


Count = Annotated[int, Bounds("at least 1", 1)]
Natural = Annotated[int, Bounds("at least 0", 0)]
Positive = Annotated[float, Bounds("positive", 0, is_open=True)]
NonNegative = Annotated[float, Bounds("at least 0", 0)]
Share = Annotated[float, Bounds("from 0 to 1", 0, 1)]
BelowOne = Annotated[float, Bounds("at least 0, below 1", 0, 1 - 2**-24)]
Probability = Annotated[float, Bounds("a probability, from 0 to 1", 0, 1)]


class Section:
    """A section of the configuration, checked against its bounds and rules when it is built."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is not finite or out of bounds, or a broken rule."""
        bounds = _bounds(type(self))
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value}")
            if name in bounds and value is not None and value not in bounds[name]:
                raise ValueError(
                    f"{name} must be {bounds[name].words}, not {value}; set {flag_of(name)}"
                )
        for is_broken, message in self.rules():
            if is_broken:
                raise ValueError(message)

    def rules(self) -> Sequence[tuple[bool, str]]:
        """Conditions that must not hold, each with the text of its error. May raise ValueError
        itself.
        """
        return ()


@cache
def _bounds(section: type[Section]) -> dict[str, Bounds]:
    """Field -> its bounds, of an annotation `Annotated[number, bounds]` or one `| None`."""
    hints = get_type_hints(section, include_extras=True)
    return {
        name: item
        for name, hint in hints.items()
        for annotation in (hint, *get_args(hint))
        for item in getattr(annotation, "__metadata__", ())
        if isinstance(item, Bounds)
    }


@dataclass(frozen=True)
class ModelConfig(Section):
    """Which model is trained."""

    load: str | None = None
    """Hugging Face model name or directory to start from. Without it a small Qwen2 is built and
    warm-started.
    """
    critic_load: str | None = None
    """Hugging Face model name or directory that the critic starts from (default: what the policy
    starts from).
    """
    hidden_size: Count = 96
    """Width of the small model (only without --load)."""
    num_layers: Count = 2
    """Depth of the small model (only without --load)."""
    num_attention_heads: Count = 4
    """Attention heads of the small model (only without --load)."""
    num_query_groups: Count = 2
    """Key-value heads of the small model (only without --load)."""
    ffn_hidden_size: Count = 256
    """Width of the small model's SwiGLU (only without --load)."""

    def rules(self) -> Sequence[tuple[bool, str]]:
        heads, groups = self.num_attention_heads, self.num_query_groups
        return (
            (
                self.hidden_size % (2 * heads) != 0,
                f"hidden_size ({self.hidden_size}) must be a multiple of twice num_attention_heads"
                f" ({heads}); set --hidden-size"
                f" {2 * heads * max(1, self.hidden_size // (2 * heads))}",
            ),
            (
                heads % groups != 0,
                f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups});"
                " set --num-query-groups to a divisor",
            ),
        )


@dataclass(frozen=True)
class ParallelConfig(Section):
    """How model and optimizer are laid out over the ranks, and which layers compute in which
    precision.
    """

    tensor_model_parallel_size: Count = 1
    """Ranks that share every matrix (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline stages (PP)."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions over the sequence (needs TP > 1)."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: the feed-forward part of each layer, which holds
    most of them, or whole layers. (Attention is fused and never keeps its scores.)
    """
    bf16: bool = False
    """Parameters and activations in bfloat16; their originals, gradient sums and Adam's moments in
    float32.
    """
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers: Transformer Engine's (CUDA and --bf16), or megatron-core's local ones. `auto` takes
    the former where they can compute and have fused attention for packed trajectories: from compute
    capability 9.0 on, elsewhere with flash-attn.
    """
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Matrix products of the layers in FP8 (Transformer Engine): `e4m3` throughout, `hybrid` with
    e5m2 for gradients. The LM head, the critic's head and attention stay in higher precision.
    """
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """Scales of FP8 tensors: from earlier passes, from the tensor itself (default), or one per
    block of 128 or 32 values. Those of earlier passes (delayed) are no part of a checkpoint: such a
    run resumes, but not exactly.
    """
    placement: Literal["colocated", "separate"] = "colocated"
    """Who has the devices: engines and trainer share them, in turns; or (separate) the last ranks
    of the job only sample, while the others train on what was sampled before.
    """
    rollout_ranks: Natural = 0
    """Ranks that only sample (placement separate): as many that both sides take about as long for
    a step. Evaluations are played by those that train.
    """
    sampler_timeout: Positive = 1800.0
    """Seconds without a finished turn after which ranks that only sample count as lost (placement
    separate).
    """
    offload: OffloadMode = "none"
    """What is moved to host memory: nothing; parameters, gradients and optimizer state during
    rollouts; or, besides, actor and critic in turns, each while the other one computes.
    """

    def rules(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                (self.placement == "separate") != (self.rollout_ranks > 0),
                f"placement {self.placement} and rollout_ranks {self.rollout_ranks} do not go"
                " together; set --placement separate --rollout-ranks 1 or more, or none of them",
            ),
            (
                self.placement != "separate" and self.sampler_timeout != 1800.0,
                "sampler_timeout does nothing with placement colocated; drop --sampler-timeout",
            ),
            (
                self.sequence_parallel and self.tensor_model_parallel_size == 1,
                "sequence_parallel shards over tensor-parallel ranks and does nothing at"
                " tensor_model_parallel_size 1; drop --sequence-parallel or raise"
                " --tensor-model-parallel-size",
            ),
            (
                self.transformer_impl == "transformer_engine" and not self.bf16,
                "transformer_impl transformer_engine has no fused attention in float32; add --bf16"
                " or drop --transformer-impl",
            ),
            (
                self.fp8 == "none" and self.fp8_recipe is not None,
                f"fp8_recipe {self.fp8_recipe} does nothing with fp8 none; drop it or add --fp8"
                " hybrid",
            ),
            (
                self.fp8 != "none" and self.transformer_impl == "local",
                f"fp8 {self.fp8} needs Transformer Engine's layers; drop --transformer-impl local"
                " or --fp8",
            ),
            (
                self.fp8 != "none" and not self.bf16,
                f"fp8 {self.fp8} works beside bfloat16 parameters; add --bf16 or drop --fp8",
            ),
        )

    @property
    def recipe(self) -> str:
        """How FP8 tensors are scaled. With `tensorwise` a log-probability depends on the weights
        and its own microbatch alone, not on what was computed before.
        """
        return self.fp8_recipe or "tensorwise"

    def num_trainers(self, world_size: int) -> int:
        """Ranks of a job that train. Raises ValueError unless the others are as many as asked for,
        and the layout fits those that train.
        """
        trainers = world_size - self.rollout_ranks
        if trainers < 1:
            raise ValueError(
                f"rollout_ranks ({self.rollout_ranks}) must leave a rank that trains, and the job"
                f" has {world_size}; lower --rollout-ranks or start more ranks"
                f" (NPROC_PER_NODE={self.rollout_ranks + 1})"
            )
        self.check_world(trainers)
        return trainers

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless the layout fits `world_size` ranks that train."""
        model_parallel = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % model_parallel:
            raise ValueError(
                f"tensor_model_parallel_size ({self.tensor_model_parallel_size}) x"
                f" pipeline_model_parallel_size ({self.pipeline_model_parallel_size}) must divide"
                f" the world size ({world_size}); start torchrun with --nproc-per-node"
                f" {model_parallel + self.rollout_ranks} or"
                f" {'more of them' if self.rollout_ranks else 'a multiple'}, or lower the parallel"
                " sizes"
            )


_NAME_AND_SHARE = re.compile(r"(?s)(.+?://(?:\[.*?\]|[^:/]*)(?::\d+)?(?:/.*?)?|.*?)(?::(\d+))?")
"""A number after a colon is the share, but after the host of a URL it is the port."""


def parse_shares(environments: str) -> dict[str, int]:
    """`sokoban:4,my_module:Mine` -> {"sokoban": 4, "my_module:Mine": 1}. Raises ValueError for
    anything else than distinct names with positive shares.
    """
    shares: dict[str, int] = {}
    for part in environments.split(","):
        name, share = _NAME_AND_SHARE.fullmatch(part.strip()).groups("1")
        if int(share) == 0 or not name or name in shares:
            raise ValueError(
                "environments must be distinct names with positive shares, not"
                f" {environments!r}; write e.g. sokoban:4,frozen_lake:4"
            )
        shares[name] = int(share)
    return shares


@dataclass(frozen=True)
class EnvironmentConfig(Section):
    """What is played, and within which limits."""

    environments: str = "frozen_lake"
    """Environments and their shares of the groups of a step, e.g. `frozen_lake`,
    `sokoban:4,frozen_lake:4` or, of a file my_module.py, `my_module:MyEnvironment`. For questions
    with reference answers `--tasks FILE [--score my_module:score]` stands for `tasks:FILE`.
    """
    eval_environments: str = ""
    """Further environments, separated by commas, that are evaluated beside those that are trained,
    e.g. `sokoban_large,frozen_lake`.
    """
    environment_options: str = "{}"
    """JSON object of options per environment, e.g. '{"sokoban": {"observation": "grid_coord"}}'."""
    curriculum: str = "{}"
    """JSON object: step -> options per environment that training adds to environment_options from
    that step on. Evaluation never uses them. E.g. '{"0": {"sokoban": {"max_shortest": 5}}, "30":
    {}}'.
    """
    max_turns: Count | None = None
    """Turns per trajectory, K (default: the environment's, else 5)."""
    max_actions_per_turn: Count | None = None
    """Actions executed per turn; more are dropped (default: the environment's, else 5)."""
    max_actions: Count | None = None
    """Actions per trajectory (default: the environment's, else 10; without limit where it sets its
    own turns or takes text).
    """
    max_response_length: Count | None = None
    """Tokens that may be sampled in one turn (default: the environment's, else 400)."""
    format_penalty: Annotated[float, Bounds("at most 0", -math.inf, 0)] | None = None
    """Reward of a turn whose answer cannot be parsed or holds an unknown action, added to what it
    earned (default: the environment's, else -0.1).
    """
    think: bool = True
    """Force a `<think>` at the start of every turn."""
    prompt_style: Literal["full", "system", "brief", "compact"] = "full"
    """Where the task, the budget and the format are told: `full` in the first user message and
    every turn, `system` in the system message and every turn, `brief` in the system message alone,
    `compact` nowhere (small models).
    """
    system_prompt: str | None = None
    """A text with which the system message of every prompt begins; an empty text leaves out that of
    --prompt-style full (default: "You're a helpful assistant." there, nothing in other styles and
    before an environment's own messages).
    """
    environment_timeout: NonNegative = 60.0
    """Seconds an environment may take for a turn before its trajectory is closed as truncated (0:
    no limit).
    """

    environment_processes: Natural = 0
    """Processes of each rank in which environments live that hold the interpreter while they
    compute (0: none, they live in threads).
    """

    def rules(self) -> Sequence[tuple[bool, str]]:
        base = json_object("environment_options", self.environment_options)
        self._check_options("environment_options", base, {})
        for step, options in json_object("curriculum", self.curriculum).items():
            if not step.isdigit():
                raise ValueError(
                    f"curriculum maps steps to options, but {step!r} is no step; write e.g. "
                    '\'{"0": {"sokoban": {"max_shortest": 5}}}\''
                )
            self._check_options("curriculum", options, base)
        return ()

    def _check_options(self, flag: str, options: Any, base: dict[str, Any]) -> None:
        if not isinstance(options, dict) or not all(
            isinstance(value, dict) for value in options.values()
        ):
            raise ValueError(
                f"{flag} must map environment names to objects, not {options!r}; "
                'write e.g. \'{"sokoban": {"observation": "grid"}}\''
            )
        if unknown := set(options) - set(self.evaluated):
            raise ValueError(
                f"{flag} names {', '.join(sorted(unknown))}, which is not trained"
                f" ({', '.join(self.shares)}); drop it or add it to --environments"
            )
        for name in self.evaluated:
            build = partial(make, name, **base.get(name, {}) | options.get(name, {}))
            with briefly(name, build, self.environment_timeout):
                pass

    @property
    def expected_turns(self) -> int:
        """Turns of a trajectory at most, as far as flags say it."""
        return self.max_turns or Budget().max_turns

    @property
    def expected_response_length(self) -> int:
        """Tokens of a turn at most, as far as flags say it."""
        return self.max_response_length or Budget().max_response_length

    @property
    def shares(self) -> dict[str, int]:
        """Environment name -> share of the groups."""
        return parse_shares(self.environments)

    @property
    def evaluated(self) -> list[str]:
        """Names of the environments that are trained, then of those that are only evaluated."""
        others = [name for part in self.eval_environments.split(",") if (name := part.strip())]
        if len({*self.shares, *others}) < len(self.shares) + len(others):
            raise ValueError(
                f"eval_environments must be distinct and not among {', '.join(self.shares)}, which"
                f" are evaluated anyway; they are {self.eval_environments!r}"
            )
        return [*self.shares, *others]

    def options(self, name: str) -> dict[str, Any]:
        """Options of one environment's constructor."""
        return json.loads(self.environment_options).get(name, {})

    def evaluation_options(self, name: str) -> dict[str, Any]:
        """The options under which it is evaluated: on tasks that are not trained on, where it tells
        them apart and `options` do not say otherwise.
        """
        return held_out_options(name) | self.options(name)

    def training_options(self, name: str, step: int) -> dict[str, Any]:
        """The options under which a training step plays: those of `options` and of the curriculum's
        latest entry.
        """
        entries = json.loads(self.curriculum)
        latest = max((key for key in entries if int(key) <= step), key=int, default=None)
        return self.options(name) | entries.get(latest, {}).get(name, {})

    @property
    def curriculum_steps(self) -> set[int]:
        """Steps from which on other tasks are played."""
        return set(map(int, json.loads(self.curriculum)))


@dataclass(frozen=True)
class RolloutConfig(Section):
    """How many trajectories a step samples, and how."""

    num_groups: Count = 8
    """Initial states per step (P)."""
    group_size: Count = 16
    """Trajectories per initial state (N)."""
    max_sampling_rounds: Count = 1
    """Rollouts of a step at most. With more than 1, each followed by another of fresh initial
    states until as many groups have trajectories that earned differently as the filter keeps of
    num_groups (dynamic sampling of DAPO, arXiv:2503.14476).
    """
    max_context_length: Count = 3600
    """Tokens of a trajectory; one that would grow longer is closed as truncated."""
    fit_context: bool = False
    """Lower --max-context-length to what all turns of scripted play need, with answers of twice its
    length.
    """
    context_window: Natural = 0
    """Turns that the policy sees: the present one and those before it, behind the task. Every turn
    whose prompt does not go on from the last one is then a sample of its own (0: the whole
    trajectory). --max-context-length bounds each of them.
    """
    temperature: Positive = 1.0
    """Sampling temperature; the trainer divides its logits by the same. A greedy policy (0) would
    explore nothing.
    """
    rollout_engine: Literal["embedded", "sglang"] = "embedded"
    """Who samples: `embedded` decodes in this process with a key-value cache per trajectory;
    `sglang` is a server of this rank or of several, kept between rollouts.
    """
    sglang_python: str | None = None
    """Python of an environment that has SGLang, e.g. .venv-sglang/bin/python; it need not be the
    trainer's (default: it is).
    """
    sglang_arguments: str | None = None
    """Further arguments of SGLang's servers, as on their command line, after an equals sign:
    --sglang-arguments='--mem-fraction-static 0.85'; their own parser checks them before training.
    """
    sglang_start_timeout: Positive | None = None
    """Seconds in which a server must be ready (default: 300, and 1800 for FP8 rollouts, whose
    kernels are compiled at the first start).
    """
    kv_cache_tokens: int | None = None
    """Tokens in SGLang's key-value cache (default: every trajectory of the server at full length).
    """
    rollout_tensor_parallel_size: Count = 1
    """Consecutive ranks that share one SGLang server, each with a part of its layers. As large as
    --tensor-model-parallel-size, and weights pass to the servers without any traffic between
    tensor-parallel ranks.
    """
    rollout_fp8: bool = False
    """SGLang computes the linear layers in FP8, with a scale per block of 128 x 128 weights. Its
    samples then differ from the trainer's policy: correct for it with --importance-cap.
    """
    rollout_deterministic: bool = False
    """SGLang's samples depend on their seeds alone, not on the batch that they are drawn in;
    slower, and on GPUs only.
    """
    max_staleness: Natural = 0
    """Steps by which the weights that sample a rollout may be behind those that train on it
    (placement separate): rollout t is sampled under the weights after t - k steps. With 1 sampling
    and training overlap whole; more evens out steps of unequal length and keeps as many weights in
    host memory; with 0 each side waits for the other.
    """
    carry_over: BelowOne = 0.0
    """Share of a rollout's trajectories that may be unfinished when its ranks go on to the next
    one: they go on beside it, from their next turn on under its weights (partial rollouts; with
    --max-staleness 2 or more, so that the trainers do not wait for them). Keeps the engines full
    where some trajectories are much longer than others. Resumes, but not to the bit.
    """
    carry_over_cache: Literal["recompute", "keep"] = "recompute"
    """What the key-value caches of those trajectories then hold: their context, computed again
    under the new weights, or (keep) what the old ones have computed.
    """
    weight_transfer: Literal["auto", "file", "ipc"] = "auto"
    """How weights reach SGLang's servers: `ipc` copies on the device and keeps no copy, so that a
    server that died is replaced when all ranks have played their parts and can send theirs again;
    `file` goes through files in host memory, from which it is replaced at once. `auto` is `ipc` on
    GPUs and `file` on a CPU.
    """

    def num_engines(self, world_size: int, ranks_per_node: int) -> int:
        """Number of engines of a job. Raises ValueError unless each has its ranks on one node."""
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

    @property
    def sglang_command_line(self) -> list[str]:
        """`sglang_arguments`, one by one. Raises ValueError for a quotation without an end."""
        try:
            return shlex.split(self.sglang_arguments or "")
        except ValueError as error:
            raise ValueError(
                f"sglang_arguments must be as on a command line, not {self.sglang_arguments!r}:"
                f" {error}; quote them"
            ) from error

    def rules(self) -> Sequence[tuple[bool, str]]:
        of_the_server = {
            "sglang_python": None,
            "sglang_arguments": None,
            "sglang_start_timeout": None,
            "kv_cache_tokens": None,
            "weight_transfer": "auto",
            "rollout_fp8": False,
            "rollout_deterministic": False,
            "rollout_tensor_parallel_size": 1,
        }
        return [
            (
                self.rollout_engine == "embedded" and getattr(self, name) != default,
                f"{name} does nothing with rollout_engine embedded; drop it or set"
                " --rollout-engine sglang",
            )
            for name, default in of_the_server.items()
        ]


@dataclass(frozen=True)
class FilterConfig(Section):
    """Which initial states a step trains on."""

    filter_strategy: str = "top_fraction"
    """How groups are kept, by the standard deviation of their returns (after --reward):
    top_fraction (StarPO-S), top_p_linear, top_p_softmax, top_k, min_p, percentile_range (a part of
    the ranking), within_group (the most different trajectories of every group) or none; or a filter
    of your own, my_module:my_filter.
    """
    filter_value: float | None = None
    """Fraction, probability mass or count of the strategy (default of top_fraction: 0.25)."""
    filter_start: Share = 0.0
    """Share of the ranking, largest standard deviation first, at which percentile_range begins; it
    ends at the filter value.
    """
    filter_keep_zero: bool = False
    """Keep groups whose trajectories all earned the same."""
    soft_reweighting: bool = False
    """Scale each kept group's advantages by its share of the largest standard deviation."""

    def rules(self) -> Sequence[tuple[bool, str]]:
        name, declared = self.filter_strategy, find_filter(self.filter_strategy)
        check_filter(name)
        return (
            (
                declared.value == "none" and self.filter_value is not None,
                f"filter_value {self.filter_value} does nothing with filter_strategy {name}; drop"
                " --filter-value or name another strategy",
            ),
            (
                declared.value != "range" and self.filter_start > 0,
                f"filter_start {self.filter_start} does nothing with filter_strategy {name}; drop"
                " --filter-start or set --filter-strategy percentile_range",
            ),
            (
                self.filter_keep_zero and not declared.drops_constant,
                f"filter_keep_zero does nothing with filter_strategy {name}, which keeps such"
                " groups; drop the flag",
            ),
        )

    def num_kept(self, num_groups: int) -> int | None:
        """Groups that are kept if none is constant, None where it depends on the returns."""
        if self.filter_strategy == "top_fraction":
            return max(1, math.floor(self.value * num_groups + 1e-9))
        if self.filter_strategy == "percentile_range":
            first, last = (math.floor(share * num_groups + 1e-9) for share in self.value)
            return last - first
        if self.filter_strategy == "top_k":
            return int(self.value)
        return num_groups if self.filter_strategy == "none" else None

    @property
    def value(self) -> float | tuple[float, float | None] | None:
        """The value of the filter: as set, else the default that the filter declares; for a range
        both of its ends.
        """
        declared = find_filter(self.filter_strategy)
        value = declared.default if self.filter_value is None else self.filter_value
        return (self.filter_start, value) if declared.value == "range" else value


@dataclass(frozen=True)
class AdvantageConfig(Section):
    """How rewards become advantages."""

    reward: str = "environment"
    """What a trajectory earns: a weighted sum of environment, success, format, response_length,
    overlong, repetition, action_effectiveness, grounded_thought, turn_discounted, group_relative,
    judges by their URLs and rewards of your own, e.g. "environment + 0.1*format +
    my_module:my_reward".
    """
    advantage_estimator: str = "gae"
    """gae and bilevel_gae train a critic (PPO); grpo, dr_grpo, rloo and reinforce_plus_plus compare
    trajectories of a group or batch; or an estimator of your own, my_module:my_estimator.
    """
    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 1.0
    """GAE lambda per token."""
    turn_gamma: Share | None = None
    """Discount per turn (bilevel_gae only; default 0.95)."""
    turn_lam: Share | None = None
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
    """Coefficient of the KL in the rewards."""

    def rules(self) -> Sequence[tuple[bool, str]]:
        parse_reward(self.reward)
        name, declared = self.advantage_estimator, self.estimator
        check_estimator(name)
        return (
            *(
                (
                    getattr(self, option) is not None and option not in declared.options,
                    f"{option} does nothing with advantage_estimator {name}; drop it or set"
                    " --advantage-estimator bilevel_gae",
                )
                for option in ("turn_gamma", "turn_lam")
            ),
            (
                declared.level == "turn" and self.reward_placement != "turn",
                f"{name} discounts turn rewards; add --reward-placement turn",
            ),
            (
                declared.level == "trajectory" and self.reward_placement == "turn",
                f"{name} compares whole returns, so reward_placement turn does nothing; drop"
                " --reward-placement",
            ),
            (
                self.reward_normalization != "identity" and self.reward_placement == "turn",
                "reward_normalization acts on whole returns; drop it or --reward-placement turn",
            ),
            (
                self.reward_normalization == "identity"
                and self.reward_normalization_scope != "group",
                "reward_normalization_scope does nothing with identity; add"
                " --reward-normalization mean",
            ),
            (
                (self.kl_in_reward == "none") != (self.kl_reward_coef == 0.0),
                f"kl_in_reward ({self.kl_in_reward}) and kl_reward_coef ({self.kl_reward_coef})"
                " need each other; set both or none",
            ),
            (
                self.kl_in_reward != "none" and declared.level == "trajectory",
                f"{name} uses whole returns, so a per-token KL reward does nothing; use --kl-kind"
                " instead",
            ),
        )

    @property
    def estimator(self) -> Estimator:
        """What the estimator declares."""
        return find_estimator(self.advantage_estimator)

    @property
    def reward_terms(self) -> dict[str, float]:
        """Name of a reward -> its weight."""
        return parse_reward(self.reward)

    @property
    def uses_critic(self) -> bool:
        return self.estimator.uses_critic

    @property
    def whitens(self) -> bool:
        return self.uses_critic if self.whiten_advantages is None else self.whiten_advantages


_IMPORTANCE_OPTIONS = {
    "importance_floor": None,
    "importance_mode": "truncate",
    "importance_level": "token",
}
"""Fields that do nothing without importance_cap, and their defaults."""


@dataclass(frozen=True)
class LossConfig(Section):
    """The policy loss and the critic's."""

    policy_loss: Literal["clip", "cispo", "gspo"] = "clip"
    """PPO's clipped surrogate; CISPO (arXiv:2506.13585), whose clipped ratio only weighs the
    gradient, so that no token loses it; or GSPO (arXiv:2507.18071): one ratio for a whole
    trajectory, the geometric mean of those of its tokens.
    """
    clip_ratio_low: Share = 0.2
    """Lower clip bound of the ratio, 1 - this."""
    clip_ratio_high: NonNegative = 0.28
    """Upper clip bound of the ratio, 1 + this (StarPO-S: clip-higher)."""
    dual_clip: Annotated[float, Bounds("above 1", 1, is_open=True)] | None = None
    """Bound of the loss where the advantage is negative (arXiv:1912.09729), e.g. 3."""
    kl_kind: Literal["none", "k1", "k2", "k3"] = "none"
    """KL to the reference policy as a loss term."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL in the loss."""
    entropy_coef: float = 0.001
    """Coefficient of the entropy bonus."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = (
        "token-mean"
    )
    """Mean over tokens of the minibatch, or over trajectories of their token mean or token sum."""
    loss_mask: Literal["sampled", "legacy"] = "sampled"
    """Tokens that are trained on: those that the policy sampled, or (legacy) everything behind the
    first message, states and rewards included, as in the runs published as arXiv:2504.20073.
    """
    old_logprobs: Literal["auto", "recompute", "engine"] = "auto"
    """What the ratio divides by: log-probabilities that the policy computes for all trajectories
    before the update; those that the engine sampled with, which saves that pass, so that the ratio
    also holds what engine and trainer compute differently (watch mismatch/...); or (auto) those of
    the update's own forward pass where a step takes one optimizer step and nothing else needs them
    (the ratio is 1), else the engine's where the embedded one computes what the trainer does
    (float32, the same weights), and else a pass of their own.
    """
    importance_cap: Positive | None = None
    """Importance correction of the loss by w = pi_old / pi_rollout, at most this, between the
    trainer's policy and the one that sampled (decoupled PPO, arXiv:2110.00641).
    """
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """Where w is beyond its cap: it is the cap, or the tokens are left out of the policy loss."""
    importance_floor: Positive | None = None
    """Tokens whose w is below this are left out too (mask only; IcePop, arXiv:2510.18855: 0.5, with
    --importance-cap 5).
    """
    importance_level: Literal["token", "sequence"] = "token"
    """w of each token, or the product over its trajectory, which corrects without bias but varies
    more.
    """
    min_entropy: NonNegative = 0.0
    """Leave tokens out of the policy loss where the policy is surer than this many nats: choices
    are trained on, not what it knows to say (forking tokens, arXiv:2506.01939), e.g. 0.3.
    """
    value_clip: Positive | None = 0.5
    """Clip range of the critic's values around the old ones."""

    def rules(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                (self.kl_kind == "none") != (self.kl_coef == 0.0),
                f"kl_kind ({self.kl_kind}) and kl_coef ({self.kl_coef}) need each other; set both"
                " or none",
            ),
            (
                self.old_logprobs == "engine" and self.loss_mask == "legacy",
                "loss_mask legacy trains on tokens that no engine sampled; drop --old-logprobs"
                " engine",
            ),
            (
                self.old_logprobs == "engine" and self.importance_cap is not None,
                "importance_cap compares old_logprobs with the engine's, which they are with"
                " old_logprobs engine; drop --importance-cap or --old-logprobs",
            ),
            (
                self.dual_clip is not None and self.policy_loss != "clip",
                f"dual_clip bounds the clipped surrogate, and policy_loss is {self.policy_loss};"
                " drop --dual-clip",
            ),
            (
                self.clip_ratio_low == 1.0 and self.policy_loss != "cispo",
                "clip_ratio_low 1 leaves the ratio unbounded from below, which only policy_loss"
                " cispo does; set --clip-ratio-low 0.2",
            ),
            *(
                (
                    self.importance_cap is None and getattr(self, name) != default,
                    f"{name} does nothing without importance_cap; add --importance-cap 2 or drop"
                    f" {flag_of(name)}",
                )
                for name, default in _IMPORTANCE_OPTIONS.items()
            ),
            (
                None not in (self.importance_floor, self.importance_cap)
                and (
                    self.importance_mode != "mask" or self.importance_floor >= self.importance_cap
                ),
                f"importance_floor ({self.importance_floor}) must be below importance_cap"
                f" ({self.importance_cap}) and needs importance_mode mask; set --importance-mode"
                " mask --importance-floor 0.5 --importance-cap 5",
            ),
            (
                self.policy_loss == "gspo" and self.loss_aggregation != "seq-mean-token-mean",
                f"policy_loss gspo is a mean over trajectories, and loss_aggregation is"
                f" {self.loss_aggregation}; set --loss-aggregation seq-mean-token-mean",
            ),
        )


@dataclass(frozen=True)
class TrainConfig(Section):
    """Optimizer steps and their schedule."""

    num_steps: Count = 200
    """StarPO steps: one rollout and its updates."""
    minibatch_size: Count = 32
    """Trajectories per optimizer step (E); it divides those that the filter keeps, or is larger
    and one step takes them all. Where constant groups leave fewer, the steps are as equal as can
    be.
    """
    updates_per_rollout: Count = 1
    """Passes over the kept trajectories of a rollout (Online-k)."""
    max_tokens_per_microbatch: Count = 16384
    """Token positions that one forward pass computes, at most."""
    shared_prefixes: Literal["auto", "on", "off"] = "auto"
    """Compute once what trajectories of a microbatch share from their beginning: `on` wherever
    any do, `auto` where it saves at least 3% of the positions, and never with --fp8, which rounds
    by what else is in a tensor.
    """
    lr: Positive = 1e-6
    """Learning rate of the policy."""
    decoupled_lr: Positive | None = None
    """Learning rate of the policy's embedding and LM head (default: that of its layers), as in
    Megatron-LM. There a policy learns which words it prefers while its layers keep what they know.
    """
    critic_lr: Positive = 1e-5
    """Learning rate of the critic."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the run."""
    lr_warmup: Natural = 0
    """Steps of linear warm-up of both learning rates."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, as in AdamW."""
    adam_beta1: BelowOne = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: BelowOne = 0.999
    """Decay of Adam's mean of squared gradients."""
    adam_eps: Positive = 1e-8
    """Added to the root mean square of the policy's gradient in Adam. Well above it, Adam becomes
    gradient descent with momentum, which leaves weights with little gradient where they are: noisy
    rewards then spare what was learned before.
    """
    clip_grad: Positive = 1.0
    """Largest global gradient norm."""
    critic_warmup: Natural = 0
    """First steps in which only the critic is updated."""
    max_nonfinite_updates: Count = 3
    """Updates of one model in a row that may be skipped for a non-finite loss or gradient; after
    that many the run stops.
    """
    max_empty_steps: Natural = 10
    """Steps in a row of which the filter may keep nothing; after that many the run stops and says
    why (0: it goes on).
    """
    seed: Natural = 0
    """Seed of initial states, outcomes, sampling and minibatches."""

    def schedule(self, step: int) -> float:
        """The share of both learning rates with which a step is trained."""
        if step < self.lr_warmup:
            return step / self.lr_warmup
        decaying = max(self.num_steps - self.lr_warmup, 1)
        done = min((step - self.lr_warmup) / decaying, 1.0)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[self.lr_decay]

    def trains_actor(self, step: int) -> bool:
        """Whether a step updates the policy too."""
        return step >= self.critic_warmup


@dataclass(frozen=True)
class WarmStartConfig(Section):
    """Behaviour cloning of a scripted player, before reinforcement learning."""

    warm_start_first_turn_steps: Natural = 300
    """Optimizer steps of behaviour cloning on first turns of scripted play (only without --load).
    """
    warm_start_first_turns: Count = 1
    """How many turns of an episode are its first ones: as many as it takes to meet every kind of
    state.
    """
    warm_start_steps: Natural = 300
    """Further steps on whole scripted trajectories."""
    warm_start_batch: Count = 16
    """Trajectories per step; of first turns twice as many."""
    warm_start_trajectories: Count = 2000
    """Scripted trajectories, and four times as many first turns; the steps take as many passes as
    they need.
    """
    warm_start_until_flat: bool = False
    """End both stages as soon as their loss is flat, and let the learning rate fall then; the steps
    above are their most.
    """
    warm_start_optimizer: Literal["adam", "muon"] = "adam"
    """Who imitates: muon takes 40% of adam's steps to the same likelihood, at twice the learning
    rate. A critic is always taught by adam.
    """
    warm_start_lr: Positive = 4e-3
    """Peak learning rate of the warm start."""
    warm_start_critic_steps: Natural = 0
    """Steps of regression of the critic to the returns of the whole scripted trajectories (only
    with a critic).
    """
    warm_start_critic_lr: Positive = 1e-3
    """Peak learning rate of that regression."""
    warm_start_temperature: Positive = 1.0
    """Temperature at which the scripted play is imitated. Above 1 the policy starts surer of what
    is certain there, and as open where the play is random: reinforcement learning then shifts
    choices without loosening facts.
    """
    warm_start_skill: Probability = 0.0
    """Probability that the scripted player acts optimally instead of uniformly at random."""
    warm_start_seed: Natural | None = None
    """Seed of the small model's first weights and of the minibatches that it is taught with
    (default: that of --seed), so that runs of several seeds can begin alike.
    """
    warm_start_from: str | None = None
    """Directory of a run whose warm start is taken instead of making one (only without --load), so
    that runs differ by reinforcement learning alone. Its model and worlds must be the same.
    """


@dataclass(frozen=True)
class EvaluationConfig(Section):
    """When and on what the policy is evaluated."""

    eval_interval: Natural = 20
    """Steps between evaluations (0: only at the end)."""
    eval_prompts: Count = 256
    """Held-out initial states per evaluation."""
    eval_samples: Count = 8
    """Episodes from each of them in the last evaluation; evaluations on the way play one."""
    eval_temperature: NonNegative = 0.5
    """Sampling temperature of evaluation."""
    boards: str | None = None
    """Boards file to evaluate on instead of the packaged one."""


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When a run writes what it can be resumed from, and what of it is kept."""

    save_interval: Natural = 10
    """Steps between checkpoints (0: only after the last step and on SIGTERM)."""
    keep_last: Natural = 2
    """Newest checkpoints that are kept (0: all)."""
    keep_best: bool = False
    """Write a checkpoint whenever an evaluation is the best so far, and keep that one too."""
    keep_rollouts: Natural | None = None
    """Newest rollouts that stay on the disk (0: all; default: those since the oldest checkpoint
    that is kept, the one that the guard may go back to left aside; with placement separate never
    fewer than those).
    """
    resume: bool = False
    """Go on from the newest intact checkpoint of the run of this name; begin it if there is none.
    --resume RUN_DIR goes on with that run under the flags that it has recorded, and those given
    now.
    """


@dataclass(frozen=True)
class GuardConfig(Section):
    """What a run does when its success collapses, as in the Echo Trap."""

    guard: Literal["off", "warn", "react"] = "off"
    """Nothing; say so (warn); or also go back to the checkpoint with the best success and continue
    from there on a lower learning rate and with a stronger filter (react).
    """
    guard_rollbacks: Count = 3
    """How often a run may go back."""
    guard_lr: Annotated[float, Bounds("above 0, at most 1", 0, 1, is_open=True)] = 0.5
    """Factor of both learning rates at every rollback."""
    guard_filter: Annotated[float, Bounds("above 0, at most 1", 0, 1, is_open=True)] = 0.5
    """Share of the groups that the filter keeps, those whose returns vary most, which is trained on
    after a rollback; again of these at every further one.
    """

    def rules(self) -> Sequence[tuple[bool, str]]:
        return [
            (
                self.guard != "react" and getattr(self, item.name) != item.default,
                f"{item.name} does nothing with guard {self.guard}; drop it or set --guard react",
            )
            for item in dataclasses.fields(self)
            if item.name != "guard"
        ]


@dataclass(frozen=True)
class LoggingConfig(Section):
    """Where a run writes, and what it logs besides the usual numbers."""

    name: str | None = None
    """Name of the run; its files go to <output>/<name> (default: environment, estimator and seed).
    """
    output: str = "runs"
    """Directory of all runs."""
    recipe: str = "none"
    """The recipe that the flags began with, for the record."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    overwrite: bool = False
    """Delete an earlier run of the same name."""
    metrics: str = ""
    """Further metrics of rollouts, separated by commas: distinct_responses, or metrics of your own,
    my_module:my_metric. They are logged as custom/...
    """
    diagnose_interval: Natural = 10
    """Steps between estimates of how much reasoning depends on its input (collapse/...; 0: never).
    One costs the log-probabilities of up to 256 first turns.
    """
    trace_groups: Natural = 4
    """Groups of every step that are kept for ragen-mega view, token by token, beside eight prompts
    of every evaluation (0: nothing is).
    """
    timeline: bool = False
    """Record when each rank does what in timeline.json, which ui.perfetto.dev opens."""

    def rules(self) -> Sequence[tuple[bool, str]]:
        for name in self.metric_names:
            check_metric(name)
        return (
            (
                self.name is not None and self.name in ("", ".", "..") or "/" in (self.name or ""),
                f"name must be that of one directory, not {self.name!r}; set --output for where it"
                " lies",
            ),
        )

    @property
    def metric_names(self) -> list[str]:
        """The metrics, in order."""
        return [name for part in self.metrics.split(",") if (name := part.strip())]


@dataclass(frozen=True)
class StarPOConfig(Section):
    """Train a language-model agent by StarPO (arXiv:2504.20073) on megatron-core."""

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
    guard: GuardConfig = field(default_factory=GuardConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def seed_of_warm_start(self) -> int:
        """That of the run unless it has its own."""
        own = self.warm_start.warm_start_seed
        return self.train.seed if own is None else own

    @property
    def warm_starts_critic(self) -> bool:
        """Whether the warm start makes a critic too."""
        return self.advantage.uses_critic and self.warm_start.warm_start_critic_steps > 0

    def rules(self) -> Sequence[tuple[bool, str]]:
        advantage, rollout = self.advantage, self.rollout
        name = advantage.advantage_estimator
        kept = find_filter(self.filter.filter_strategy)
        kept.check(self.filter.filter_strategy, self.filter.value, rollout.num_groups)
        shares = sum(self.environment.shares.values())
        num_kept = self.filter.num_kept(rollout.num_groups)
        minibatch, trained = self.train.minibatch_size, int(num_kept or 0) * rollout.group_size
        return (
            (
                minibatch < trained and trained % minibatch != 0,
                f"minibatch_size ({minibatch}) must divide the {trained} trajectories that a step"
                f" trains on ({num_kept} groups of {rollout.num_groups}, group_size"
                f" {rollout.group_size}); set --minibatch-size {_divisor(trained, minibatch)}",
            ),
            (
                (self.environment.max_response_length or 0) >= rollout.max_context_length,
                f"max_response_length ({self.environment.max_response_length}) must be below"
                f" max_context_length ({rollout.max_context_length}), which holds prompts too;"
                " lower --max-response-length or raise --max-context-length",
            ),
            (
                self.train.shared_prefixes == "on" and self.parallel.fp8 != "none",
                f"shared_prefixes on does not go with fp8 {self.parallel.fp8}, which rounds a token"
                " by what else is in its tensor; drop --shared-prefixes or --fp8",
            ),
            (
                self.checkpoint.resume and self.logging.overwrite,
                "resume continues a run and overwrite deletes it; drop --resume or --overwrite",
            ),
            (
                self.warm_start.warm_start_from is not None and self.model.load is not None,
                f"warm_start_from and load ({self.model.load}) both say what to begin with; drop"
                " one",
            ),
            *self._guard_rules(),
            (
                self.checkpoint.keep_best and self.evaluation.eval_interval == 0,
                "keep_best compares evaluations during training; drop it or set --eval-interval",
            ),
            (
                rollout.num_groups % shares != 0,
                f"num_groups ({rollout.num_groups}) must be a multiple of the sum of environment"
                f" shares ({shares}); set --num-groups"
                f" {shares * max(1, rollout.num_groups // shares)}",
            ),
            *self._group_rules(),
            *self._objective_rules(),
            *self._placement_rules(),
            (
                rollout.max_sampling_rounds > 1
                and (num_kept is None or not kept.drops_constant or self.filter.filter_keep_zero),
                "max_sampling_rounds needs a filter that keeps a known number of groups, none of"
                f" them constant, and filter_strategy is {self.filter.filter_strategy}"
                f"{' with filter_keep_zero' if self.filter.filter_keep_zero else ''}; set"
                " --filter-strategy top_fraction and --no-filter-keep-zero, --filter-value 1 for"
                " all of them",
            ),
            (
                rollout.max_sampling_rounds > 1 and self.filter.filter_start > 0,
                "max_sampling_rounds keeps the groups that vary most, and filter_start"
                f" {self.filter.filter_start} passes over them; drop --max-sampling-rounds or"
                " --filter-start",
            ),
            (
                advantage.estimator.level == "turn" and self.loss.loss_mask == "legacy",
                f"{name} works on sampled turns, and loss_mask legacy spreads over states; drop"
                " --loss-mask",
            ),
            *self._critic_rules(),
            (
                self.warm_start.warm_start_critic_steps > 0
                and advantage.reward_normalization != "identity",
                "warm_start_critic_steps teaches the critic whole returns, but"
                f" reward_normalization {advantage.reward_normalization} subtracts the group's"
                " mean; drop one of them",
            ),
        )

    def _group_rules(self) -> Sequence[tuple[bool, str]]:
        """What compares trajectories needs more than one."""
        advantage, rollout, shares = self.advantage, self.rollout, self.environment.shares
        size, scope = rollout.group_size, advantage.reward_normalization_scope
        fewest = {
            "group": size,
            "environment": size * rollout.num_groups * min(shares.values()) // sum(shares.values()),
            "batch": size * rollout.num_groups,
        }[scope]
        return (
            (
                size < advantage.estimator.min_group_size,
                f"{advantage.advantage_estimator} compares trajectories of a group, but group_size"
                f" is {size}; raise --group-size",
            ),
            (
                size == 1 and find_filter(self.filter.filter_strategy).drops_constant,
                "the filter ranks groups by the spread of their returns, but group_size is 1;"
                " raise --group-size or set --filter-strategy none",
            ),
            (
                size == 1 and self.filter.soft_reweighting,
                "soft_reweighting scales by the spread of a group's returns, but group_size is 1;"
                " raise --group-size or drop --soft-reweighting",
            ),
            (
                advantage.reward_normalization != "identity" and fewest < 2,
                f"reward_normalization {advantage.reward_normalization} compares the trajectories"
                f" of {'an' if scope == 'environment' else 'a'} {scope}, which are one; raise"
                " --group-size or drop --reward-normalization",
            ),
        )

    def _objective_rules(self) -> Sequence[tuple[bool, str]]:
        """What objectives over whole trajectories ask of the rest."""
        advantage, window = self.advantage, self.rollout.context_window
        is_gspo = self.loss.policy_loss == "gspo"
        return (
            (
                is_gspo and advantage.estimator.level != "trajectory",
                "policy_loss gspo has one ratio for a trajectory and needs one advantage for it,"
                f" and {advantage.advantage_estimator} gives each token its own; set"
                " --advantage-estimator grpo",
            ),
            (
                window > 0 and (is_gspo or self.loss.importance_level == "sequence"),
                f"context_window {window} cuts a trajectory into samples, and policy_loss gspo and"
                " importance_level sequence need it whole; drop --context-window",
            ),
        )

    def _placement_rules(self) -> Sequence[tuple[bool, str]]:
        rollout, loss, staleness = self.rollout, self.loss, self.rollout.max_staleness
        is_separate = self.parallel.placement == "separate"
        return (
            *(
                (
                    not is_separate and getattr(rollout, name) != getattr(RolloutConfig, name),
                    f"{name} does nothing with placement colocated, where every rollout is sampled"
                    f" under the present weights; drop {flag_of(name)} or set --placement separate"
                    " --rollout-ranks 1",
                )
                for name in ("max_staleness", "carry_over")
            ),
            (
                rollout.carry_over > 0 and staleness < 2,
                f"carry_over {rollout.carry_over} leaves trajectories for the next weights, for"
                f" which the trainers would wait at max_staleness {staleness}; set --max-staleness"
                " 2 or drop --carry-over",
            ),
            (
                rollout.carry_over > 0 and rollout.max_sampling_rounds > 1,
                f"carry_over {rollout.carry_over} does not go with max_sampling_rounds"
                f" {rollout.max_sampling_rounds}, which judges whole rollouts before it goes on;"
                " drop one of them",
            ),
            (
                rollout.carry_over == 0 and rollout.carry_over_cache != "recompute",
                f"carry_over_cache {rollout.carry_over_cache} does nothing without carry_over; add"
                " --carry-over 0.2 or drop --carry-over-cache",
            ),
            (
                rollout.carry_over_cache == "keep" and rollout.rollout_engine == "sglang",
                "carry_over_cache keep needs rollout_engine embedded: SGLang drops its caches when"
                " it takes weights; drop --carry-over-cache or --rollout-engine sglang",
            ),
            (
                staleness >= self.train.num_steps,
                f"max_staleness ({staleness}) must be below num_steps ({self.train.num_steps}), or"
                " every rollout is sampled under the first weights; lower --max-staleness",
            ),
            (
                staleness > 0 and loss.old_logprobs == "auto" and loss.importance_cap is None,
                f"max_staleness {staleness} trains on samples of other weights, and nothing"
                " corrects for that: add --importance-cap 2 (decoupled PPO), or --old-logprobs"
                " engine (the ratio is to those that sampled), or --old-logprobs recompute to go"
                " without",
            ),
            (
                staleness > 0 and self.advantage.estimator.needs_fresh_samples,
                f"{self.advantage.advantage_estimator} needs samples of the present weights, as it"
                f" declares, and max_staleness is {staleness}; set --max-staleness 0 or another"
                " --advantage-estimator",
            ),
        )

    def _critic_rules(self) -> Sequence[tuple[bool, str]]:
        name, has_none = self.advantage.advantage_estimator, not self.advantage.uses_critic
        return (
            (
                has_none and self.parallel.offload == "turns",
                f"offload turns is for actor and critic, and advantage_estimator {name} has no"
                " critic; set --offload rollout",
            ),
            (
                has_none and self.train.critic_warmup > 0,
                f"critic_warmup does nothing: advantage_estimator {name} has no critic; drop it",
            ),
            (
                self.train.critic_warmup >= self.train.num_steps,
                f"critic_warmup ({self.train.critic_warmup}) must be below num_steps"
                f" ({self.train.num_steps}), or the policy is never trained; lower --critic-warmup"
                " or raise --num-steps",
            ),
            (
                has_none and self.model.critic_load is not None,
                f"critic_load does nothing: advantage_estimator {name} has no critic; drop it",
            ),
        )

    def _guard_rules(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                self.guard.guard == "react" and self.checkpoint.save_interval == 0,
                "guard react goes back to a checkpoint, and save_interval 0 writes none; set"
                " --save-interval",
            ),
            (
                self.guard.guard == "react"
                and self.rollout.group_size == 1
                and self.guard.guard_filter < 1,
                "guard_filter ranks groups by the spread of their returns, but group_size is 1;"
                " raise --group-size or set --guard-filter 1",
            ),
        )

    def old_logprobs_from(self, num_updates: int) -> Literal["update", "engine", "pass"]:
        """Where a step with this many optimizer steps of the actor takes its old log-probabilities
        from: the update's first pass, the engine, or a pass of their own.
        """
        if self.loss.loss_mask == "legacy" or self.loss.old_logprobs == "recompute":
            return "pass"
        if self.loss.old_logprobs == "engine":
            return "engine"
        is_needed_before = (
            self.advantage.kl_in_reward != "none" or self.advantage.estimator.reads_logprobs
        )
        if num_updates == 1 and not is_needed_before:
            return "update"
        return "engine" if self._samples_as_trained else "pass"

    @property
    def _samples_as_trained(self) -> bool:
        """Whether the engine's log-probabilities are the trainer's up to rounding in float32."""
        rollout = self.rollout
        is_same_policy = rollout.max_staleness == 0 and self.loss.importance_cap is None
        return rollout.rollout_engine == "embedded" and not self.parallel.bf16 and is_same_policy

    @property
    def reads_all_tokens(self) -> bool:
        """Whether every rank needs the tokens of all trajectories that are trained on."""
        return self.advantage.estimator.reads_tokens or self.loss.loss_mask == "legacy"

    @property
    def shares_prefixes(self) -> bool:
        """Whether trajectories may share what they begin with."""
        return self.train.shared_prefixes != "off" and self.parallel.fp8 == "none"

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy takes part."""
        return self.loss.kl_kind != "none" or self.advantage.kl_in_reward != "none"

    def planned_evaluations(self, num_engines: int) -> dict[int, int]:
        """After so many steps -> episodes that one of `num_engines` engines then plays."""
        plan, num_steps = self.evaluation, self.train.num_steps
        episodes = plan.eval_prompts * len(self.environment.evaluated) // num_engines
        regular = range(plan.eval_interval, num_steps, plan.eval_interval or num_steps)
        return {step: episodes for step in regular if step} | {
            num_steps: episodes * plan.eval_samples
        }

    @property
    def run_directory(self) -> Path:
        # A slash, as of a URL, would make two folders of the name.
        environments = self.environment.environments.translate(
            str.maketrans({":": "", ",": "+", "/": "."})
        )
        estimator = self.advantage.advantage_estimator.replace(":", ".")
        default = f"{environments}-{estimator}-seed{self.train.seed}"
        return Path(self.logging.output) / (self.logging.name or default)

    def to_dict(self) -> dict[str, Any]:
        """Section name -> field name -> value, as JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StarPOConfig:
        """Inverse of `to_dict`; what a config.json says of a run's provenance is left out. Unknown
        keys raise ValueError.
        """
        values = {name: entries for name, entries in values.items() if name != "provenance"}
        sections = {item.name: item.default_factory for item in dataclasses.fields(cls)}
        known = {
            name: {item.name for item in dataclasses.fields(part)}
            for name, part in sections.items()
        }
        for section, entries in values.items():
            if unknown := set(entries) - known.get(section, set()):
                raise ValueError(
                    f"config has unknown keys {sorted(unknown)} in {section!r}; load it with the"
                    " version that wrote it"
                )
        return cls(**{section: sections[section](**entries) for section, entries in values.items()})


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(size for size in range(limit, 0, -1) if number % size == 0)


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The object that the text of a flag is. Raises ValueError if it is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{flag} must be a JSON object, not {text!r} ({error}); write it in single quotes, e.g."
            ' \'{"sokoban": {"observation": "grid"}}\''
        ) from None
    if not isinstance(value, dict):
        raise ValueError(
            f"{flag} must be a JSON object, not {text!r}; write e.g."
            ' \'{"sokoban": {"observation": "grid"}}\''
        )
    return value


def flag_of(name: str) -> str:
    """How a field is set on the command line."""
    return "--" + name.replace("_", "-")
