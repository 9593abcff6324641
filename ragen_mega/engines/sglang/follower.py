"""The engine of a rank that shares the SGLang server of another: it hands its part of the weights
over, and samples nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.sglang.weights import BUCKET_BYTES, TRANSFERS
from ragen_mega.rollout.engine import EngineCounts, EngineShard


class SGLangFollower:
    """Goes along with the `SGLangEngine` of the first rank of `group`."""

    def __init__(
        self,
        model_config: PretrainedConfig,
        shard: EngineShard,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        transfer: Literal["file", "ipc"] = "file",
        fp8: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.weight_version = 0
        self.shard = shard
        self.counts = EngineCounts()
        self._transfer = TRANSFERS[transfer](
            model_config, shard, dtype, fp8=fp8, group=group, bucket_bytes=bucket_bytes
        )

    def awake(self) -> AbstractContextManager[None]:
        """Nothing to do: the first rank wakes the server."""
        return nullcontext()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Hand this rank's shards over. Raises ValueError unless exactly the expected names and
        shapes arrive.
        """
        for _ in self._transfer.receive(weights):
            continue
        self.weight_version += not again

    def start(self) -> None:
        """Nothing to do: the first rank starts the server."""

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        """Raises RuntimeError: the first rank samples."""
        raise RuntimeError(
            f"rank {self.shard.rank} of an engine samples nothing; give its tasks to the first rank"
        )

    def release(self, session: int) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do: the first rank stops the server and frees the memory of all shards."""
