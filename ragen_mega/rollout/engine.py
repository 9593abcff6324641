"""The protocol of a rollout engine: token ids in, sampled token ids and their log-probabilities
out.

The weight stream is the only coupling between trainer and engine:
`engine.load_weights(policy.export_weights(engine.shard))`.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ragen_mega.data.types import Completion, SamplingParams

T = TypeVar("T")


class Interrupted(Exception):
    """The run was asked to stop, and is at a point where its state can be saved."""


class EngineError(RuntimeError):
    """The engine cannot go on; its state of unfinished trajectories is lost."""


class WeightsLost(EngineError):
    """The engine has lost its weights. After `load_weights(..., again=True)` the requests can be
    repeated.
    """


@dataclass(slots=True)
class EngineCounts:
    """Counts of an engine since it was built or they were last reset."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens found in the cache."""
    reissued: int = 0
    """Number of requests that were repeated because a server was lost."""
    restarts: int = 0
    """Number of servers that replaced a lost one."""
    steps: int = 0
    """Number of passes that decoded a token of every running trajectory; unknown for a server."""


class EngineShard(NamedTuple):
    """The part of an engine's weights that a process has: rank `rank` of the `size` consecutive
    processes that share it.
    """

    rank: int = 0
    size: int = 1
    ep: int = 1
    """Number of the processes that share experts, each with whole ones: 1 (each has a part of every
    expert) or `size`.
    """


class RolloutEngine:
    """Samples completions for many trajectories at once, each at its own pace.

    An engine that extends this class inherits defaults for the methods that it does not need.
    """

    weight_version: int = 0
    """Number of different weights that have been loaded; 0 before the first."""

    shard: EngineShard | None
    """Shards that `load_weights` takes: this rank's, under SGLang's names; None: full tensors, for
    an engine of this process alone. If several processes share an engine, the first one samples.
    """

    counts: EngineCounts

    num_slots: int
    """Number of trajectories that run at a time; others wait. 0 if another process samples."""

    def awake(self) -> AbstractContextManager[None]:
        """Give a context, inside which alone weights and KV cache are on the device. Memory for the
        weights is allocated on entry, memory for the cache by `start`.
        """
        return nullcontext()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Take new weights, as `shard` says. All processes that share the engine call it together.

        `again`: the same weights as last time, because an engine of the job has lost them;
        sessions continue.

        Raises ValueError unless exactly the expected names and shapes arrive (of full tensors,
        `lm_head.weight` of a tied model is optional).
        """

    @property
    def has_base(self) -> bool:
        """Return whether the weights of an earlier `load_weights` are there, for `load_adapter`."""
        return False

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Put an adapter beside the weights, in place of the one before: a stream of (PEFT's name
        without its prefix, full tensor). `again`: these are no new weights. An engine that has none
        refuses.
        """
        raise RuntimeError("this engine was built without adapters; build it with their settings")

    def seal_caches(self) -> None:
        """Stop sharing the present caches, before other weights come while sessions go on. By
        default, `load_weights` drops them.
        """

    def start(self) -> None:
        """Allocate the KV cache: by now the trainer has released its own memory."""

    def pause(self) -> None:
        """Release that memory until the next `start`, in the middle of a rollout. Sessions continue
        afterwards.
        """

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        """Sample the tokens that follow `tokens`, the whole trajectory so far.

        `session` identifies the trajectory: the part of `tokens` that is in its cache is not
        computed again. Any RuntimeError, MemoryError or OSError means that the engine has failed;
        after WeightsLost it can recover. By default, nothing is sampled in this process.
        """
        raise RuntimeError("this engine samples nothing; give its tasks to another process")

    async def meanwhile(self, answer: Awaitable[T]) -> T:
        """Wait for an answer from outside. An engine may decide when it counts."""
        return await answer

    def limit(self, steps: int | None) -> asyncio.Future[None]:
        """Return a future that is done after `steps` more decoding steps; the engine then pauses
        until the next call. None: never done. A server does not pause, and a step counts as 0.01 s.
        """
        loop = asyncio.get_running_loop()
        is_over: asyncio.Future[None] = loop.create_future()
        if steps is not None:
            loop.call_later(
                0.01 * steps, lambda: None if is_over.done() else is_over.set_result(None)
            )
        return is_over

    def release(self, session: int) -> None:
        """Drop the cache of a trajectory, which is over."""

    def shutdown(self) -> None:
        """Release everything that the engine holds, for good."""


class NoEngine(RolloutEngine):
    """Engine where the answers to agents come from elsewhere."""

    shard = None
    num_slots = 1
