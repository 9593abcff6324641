"""Flags of sampling: the trajectories of a step, their limits and their engine."""

import os
import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from ragen_mega.config.sections.section import (
    BelowOne,
    Count,
    Natural,
    OnlyWith,
    PathOf,
    Positive,
    Section,
)

_SERVER = OnlyWith("rollout_engine", "--rollout-engine sglang")
_SEPARATE = OnlyWith("placement", "--placement separate --rollout-ranks 1")


@dataclass(frozen=True)
class RolloutConfig(Section):
    """Trajectories that a step samples, their limits and their engine."""

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
    whose prompt does not go on from the last one is then a sample by itself (0: the whole
    trajectory). --max-context-length bounds each sample.
    """
    temperature: Positive = 1.0
    """Sampling temperature; the trainer divides its logits by the same. A greedy policy (0) would
    explore nothing.
    """
    rollout_engine: Literal["embedded", "sglang"] = "embedded"
    """Engine that samples: `embedded` decodes in this process with a key-value cache per
    trajectory; `sglang` is a server of this rank or of several, kept between rollouts.
    """
    sglang_python: Annotated[str | None, _SERVER, PathOf(when=lambda name: os.sep in name)] = None
    """Python of an environment that has SGLang, e.g. .venv-sglang/bin/python; it need not be the
    trainer's (default: it is).
    """
    engine_addresses: Annotated[str | None, _SERVER] = None
    """SGLang servers that you have started, HOST:PORT,HOST:PORT, in place of servers of the ranks
    that sample. Consecutive ranks share one, as many as divide them evenly; the first of them
    broadcasts the weights to it. Run's and servers' sizes, model and version are compared.
    """
    sglang_arguments: Annotated[str | None, _SERVER] = None
    """Further arguments of SGLang's servers, as on their command line, after an equals sign:
    --sglang-arguments='--mem-fraction-static 0.85'; their own parser checks them before training.
    """
    sglang_start_timeout: Annotated[Positive | None, _SERVER] = None
    """Seconds in which a server must be ready (default: 300, and 1800 for FP8 rollouts, whose
    kernels are compiled at the first start).
    """
    kv_cache_tokens: Annotated[int | None, _SERVER] = None
    """Tokens in SGLang's key-value cache (default: every trajectory of the server at full length).
    """
    rollout_tensor_parallel_size: Annotated[Count, _SERVER] = 1
    """Consecutive ranks that share one SGLang server, each with a part of its layers. As large as
    --tensor-model-parallel-size, and weights pass to the servers without any traffic between
    tensor-parallel ranks.
    """
    rollout_expert_parallel_size: Annotated[Count, _SERVER] = 1
    """Ranks of a server that share the experts of a layer: 1, and each rank has a part of every
    expert, or as many as --rollout-tensor-parallel-size, and each has whole experts (GPUs only). As
    large as --expert-model-parallel-size, and no expert moves to another rank.
    """
    rollout_fp8: Annotated[bool, _SERVER] = False
    """SGLang computes the linear layers in FP8, with a scale per block of 128 x 128 weights. Its
    samples then differ from the trainer's policy: correct for it with --importance-cap.
    """
    rollout_deterministic: Annotated[bool, _SERVER] = False
    """SGLang's samples depend on their seeds alone, not on the batch that they are drawn in;
    slower, and on GPUs only.
    """
    max_staleness: Annotated[Natural, _SEPARATE] = 0
    """Steps by which the weights that sample a rollout may be behind those that train on it
    (placement separate): rollout t is sampled under the weights after t - k steps. With 1 sampling
    and training overlap whole; more evens out steps of unequal length; with 0 each side waits for
    the other. k + 1 versions of the weights wait in host memory.
    """
    carry_over: Annotated[BelowOne, _SEPARATE] = 0.0
    """Share of a rollout's trajectories that may be unfinished when its ranks go on to the next
    one: they go on beside it, from their next turn on under its weights (partial rollouts; with
    --max-staleness 2 or more, so that the trainers do not wait for them). Keeps the engines full
    where some trajectories are much longer than others. Resumes, but not to the bit.
    """
    carry_over_cache: Annotated[
        Literal["recompute", "keep"], OnlyWith("carry_over", "--carry-over 0.2")
    ] = "recompute"
    """Contents of the key-value caches of those trajectories then: their context, computed again
    under the new weights (recompute), or what the old weights have computed (keep).
    """
    weight_transfer: Annotated[Literal["auto", "file", "ipc"], _SERVER] = "auto"
    """Way of the weights to SGLang's servers: `ipc` copies on the device and keeps no copy, so that
    a server that died is replaced when all ranks have played their parts and can send theirs again;
    `file` goes through files in host memory, from which it is replaced at once. `auto` is `ipc` on
    GPUs and `file` on a CPU.
    """

    def check(self) -> None:
        ep, tp = self.rollout_expert_parallel_size, self.rollout_tensor_parallel_size
        if ep not in (1, tp):
            raise ValueError(
                f"rollout_expert_parallel_size ({ep}) must be 1 or rollout_tensor_parallel_size"
                f" ({tp}); set --rollout-expert-parallel-size {tp}, or drop it"
            )
        given = self.given_engines
        for address in given:
            if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+):\d{1,5}", address):
                raise ValueError(
                    f"engine_addresses must be HOST:PORT, separated by commas, not {address!r}; set"
                    " --engine-addresses node7:30000,node8:30000"
                )
        if len({*given}) < len(given):
            raise ValueError(
                f"engine_addresses names an engine twice ({self.engine_addresses}), and each gets"
                " its weights from one rank; name it once"
            )
        if given and self.rollout_fp8:
            raise ValueError(
                "rollout_fp8 is for servers of the run: one of engine_addresses takes weights in"
                " their own type; drop --rollout-fp8"
            )

    @property
    def longer_context(self) -> str:
        """Return flags under which a run has twice the context."""
        length = f"--max-context-length {2 * self.max_context_length}"
        return f"--no-fit-context {length}" if self.fit_context else length

    @property
    def given_engines(self) -> tuple[str, ...]:
        """Return the addresses of engines that the user has started."""
        return tuple(self.engine_addresses.split(",")) if self.engine_addresses else ()

    def num_engines(self, world_size: int, ranks_per_node: int) -> int:
        """Return the number of engines of a job. Raises ValueError unless each has its ranks, and a
        server of the job has them on one node.
        """
        if given := self.given_engines:
            if world_size % len(given):
                raise ValueError(
                    f"engine_addresses names {len(given)} engines, which must divide the"
                    f" {world_size} ranks that sample; name fewer, or start more ranks"
                )
            return len(given)
        size = self.rollout_tensor_parallel_size
        if ranks_per_node % size or world_size % size:
            raise ValueError(
                f"rollout_tensor_parallel_size ({size}) must divide the ranks of a node"
                f" ({ranks_per_node}) and of the job ({world_size}); set"
                " --rollout-tensor-parallel-size 1 or another divisor, or start other ranks"
            )
        return world_size // size

    def sessions_per_engine(self, num_engines: int) -> int:
        """Return the trajectories that one of `num_engines` engines plays at a time, at most."""
        return -(-self.num_groups * self.group_size // num_engines)

    def kv_cache_size(self, sessions: int) -> int:
        """Return the tokens of an engine's key-value cache: as set, else room for `sessions` whole
        trajectories and one more.
        """
        return self.kv_cache_tokens or (sessions + 1) * self.max_context_length

    @property
    def sglang_command_line(self) -> list[str]:
        """Split `sglang_arguments` into words. Raises ValueError for a quotation without an end."""
        try:
            return shlex.split(self.sglang_arguments or "")
        except ValueError as error:
            raise ValueError(
                f"sglang_arguments must be as on a command line, not {self.sglang_arguments!r}:"
                f" {error}; quote them"
            ) from error
