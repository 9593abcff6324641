"""The protocol of a rollout engine: token ids in, sampled token ids and their log-probabilities
out.

The weight stream is the whole coupling of trainer and engine:
`engine.load_weights(policy.export_weights(engine.shard))`.
"""

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ragen_mega.data.types import Completion, SamplingParams


class Interrupted(Exception):
    """The run was asked to stop and stands where its state can be saved."""


class EngineError(RuntimeError):
    """The engine cannot go on; what it held of unfinished trajectories is lost."""


class WeightsLost(EngineError):
    """The engine has lost its weights. With `load_weights(..., again=True)` what was asked can be
    asked once more.
    """


@dataclass(slots=True)
class EngineCounts:
    """What an engine has done since it was built or its counts were taken."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    completions: int = 0
    reissued: int = 0
    """Requests that were asked again because a server was lost."""
    restarts: int = 0
    """Servers that replaced a lost one."""
    steps: int = 0
    """Passes that decoded a token of every running trajectory; not known of a server."""


class EngineShard(NamedTuple):
    """Which part of an engine's weights a process has: rank `rank` of the `size` consecutive
    processes that share it.
    """

    rank: int = 0
    size: int = 1


class RolloutEngine(Protocol):
    """Samples completions for many trajectories at once, each at its own pace.

    An engine that extends this class inherits methods that do nothing where its own would.
    """

    weight_version: int = 0
    """How many different weights have been loaded; 0 before the first."""

    shard: EngineShard | None
    """What `load_weights` takes here: this rank's shards under the names of SGLang; None: full
    tensors, for an engine of this process alone. Of the processes that share an engine the first
    one samples, for all.
    """

    counts: EngineCounts

    num_slots: int
    """Trajectories that advance at a time; more wait. 0 where another process samples."""

    def awake(self) -> AbstractContextManager[None]:
        """Weights and KV cache are on the device only inside. Memory for weights is taken at once,
        that of the cache by `start`.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Take new weights, as `shard` says. All processes that share the engine call it together.

        `again`: those that were loaded last once more, because an engine of the job has lost them;
        sessions go on.

        Raises ValueError unless exactly the expected names and shapes arrive (of full tensors,
        `lm_head.weight` of a tied model is optional).
        """

    def start(self) -> None:
        """Take the memory of the key-value cache: the trainer has given its own back by now."""

    def pause(self) -> None:
        """Give that memory back until the next `start`, in the middle of a rollout. Sessions go on
        afterwards.
        """

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        """Sample what follows `tokens`, the whole trajectory so far.

        `session` names the trajectory: what its cache already holds of `tokens` is not computed
        again. Any RuntimeError, MemoryError or OSError means that the engine has failed,
        WeightsLost that it can be helped.
        """

    def limit(self, steps: int | None) -> asyncio.Future[None]:
        """Done after so many more decoding steps, after which the engine stands still until the
        next call; None: never. A server goes on, and a step is taken as a hundredth of a second.
        """
        loop = asyncio.get_running_loop()
        is_over: asyncio.Future[None] = loop.create_future()
        if steps is not None:
            loop.call_later(0.01 * steps, lambda: is_over.done() or is_over.set_result(None))
        return is_over

    def release(self, session: int) -> None:
        """The trajectory is over; its cache may go."""

    def shutdown(self) -> None:
        """Give back everything that the engine holds, for good."""
