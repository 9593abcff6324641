"""The engine of a rank that shares the SGLang server of another: it writes its part of the weights, and samples nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.engines.sglang_weights import BUCKET_BYTES, WeightStore
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.types import Completion, SamplingParams


class SGLangFollower:
    """Goes along with the `SGLangEngine` of the first rank of `group`."""

    def __init__(
        self,
        model_config: PretrainedConfig,
        shard: EngineShard,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.weight_version = 0
        self.shard = shard
        self._store = WeightStore(model_config, shard, dtype, group=group, bucket_bytes=bucket_bytes)

    def awake(self) -> AbstractContextManager[None]:
        """Nothing to do: the first rank wakes the server."""
        return nullcontext()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write this rank's shards. Raises ValueError unless exactly the expected names and shapes arrive."""
        self._store.receive(weights)
        self.weight_version += 1

    async def generate(self, tokens: list[int], sampling: SamplingParams, *, session: int) -> Completion:
        """Raises RuntimeError: the first rank samples."""
        raise RuntimeError(f"rank {self.shard.rank} of an engine samples nothing; give its tasks to the first rank")

    def release(self, session: int) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do: the first rank stops the server and gives back the memory of all shards."""
