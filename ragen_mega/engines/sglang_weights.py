"""Weights for an SGLang server, in buckets through shared memory: the one way that works between any two environments.

Every rank that shares the server writes its own shard, as files that the server's rank of the same number reads by itself.
They stay, so that a server that has died can be given all of them again without the trainer.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from ragen_mega.engines.engine_shards import cut_stream
from ragen_mega.engines.http_json import JSONClient, RequestRefused
from ragen_mega.engines.weight_checks import check_names, checksums
from ragen_mega.engines.weight_loader import ALL_NAMES, SUMS, report_of
from ragen_mega.rollout.engine import EngineShard

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 512 * 2**20


class WeightStore:
    """The current weights of one rank of a server as files in memory: as large as its shard, and private to this user.

    Ranks that share a server, each with a store, form `group`; what they do is collective then.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        shard: EngineShard,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Raises ValueError where the model cannot be cut so."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        self.directory = _agree_on_directory(group)
        """The same for all ranks of the server; there from the first stream to `close`."""
        self._shard = shard
        self._num_buckets = 0  # of the current weights, the same on every rank of the server
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        with torch.device("meta"):
            full = AutoModelForCausalLM.from_config(model_config).state_dict()
            self._shapes = {name: tuple(part.shape) for name, part in cut_stream(full.items(), model_config, *shard)}

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a stream of (SGLang's name, shard), bucket after bucket; it is the current weights when all ranks have theirs.

        Raises ValueError unless exactly the expected names and shapes arrive.
        """
        self._num_buckets = 0
        self.directory.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(self._file(0, self._shard.rank).parent, ignore_errors=True)
        self._file(0, self._shard.rank).parent.mkdir()
        pending: dict[str, Tensor] = {}
        num_written = num_bytes = 0
        seen: list[str] = []
        for name, tensor in weights:
            size = tensor.numel() * self._dtype.itemsize
            if pending and num_bytes + size > self._bucket_bytes:
                self._write(num_written, pending)
                pending, num_bytes, num_written = {}, 0, num_written + 1
            if name in pending or tuple(tensor.shape) != self._shapes.get(name, tensor.shape):
                raise ValueError(
                    f"weight {name!r} must arrive once, with shape {self._shapes.get(name)}, and came with "
                    f"{tuple(tensor.shape)}; check that the weights belong to the model config"
                )
            # A copy, because the stream may use its buffer again.
            pending[name] = tensor.detach().to(device="cpu", dtype=self._dtype, copy=True).contiguous()
            num_bytes += size
            seen.append(name)
        check_names(seen, self._shapes)
        self._write(num_written, pending, is_last=True)
        if self._group is not None:
            dist.barrier(group=self._group)
        self._num_buckets = num_written + 1

    def buckets(self) -> list[list[Path]]:
        """Of each bucket of the current weights, the files of all ranks of the server; empty before the first stream."""
        return [[self._file(index, rank) for rank in range(self._shard.size)] for index in range(self._num_buckets)]

    def close(self) -> None:
        """Give the memory of all ranks back, for good. Safe to call again."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self, index: int, tensors: dict[str, Tensor], *, is_last: bool = False) -> None:
        metadata = {"format": "pt", SUMS: json.dumps(checksums(tensors.items()))}
        if is_last:
            metadata[ALL_NAMES] = json.dumps(list(self._shapes))
        save_file(tensors, self._file(index, self._shard.rank), metadata=metadata)

    def _file(self, index: int, rank: int) -> Path:
        return self.directory / str(rank) / f"{index:05d}.safetensors"


def _agree_on_directory(group: dist.ProcessGroup | None) -> Path:
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    holder = [base / f"ragen-weights-{secrets.token_hex(8)}"]
    if group is not None:
        dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]


class WeightSender:
    """Tells a server to take buckets, in the manner of its generation."""

    def __init__(self, client: JSONClient, loader: str, *, timeout: float) -> None:
        """`loader` is the server's name for `weight_loader.load`."""
        self._client = client
        self._loader = loader
        self._timeout = timeout
        paths = client.call("GET", "/openapi.json", timeout=timeout)["paths"]
        self.has_update_session = {"/begin_weight_update", "/end_weight_update"} <= paths.keys()
        """SGLang 0.5.21 and later take weights between these two requests only; earlier ones have neither."""

    def send(self, buckets: Iterable[list[Path]], version: int) -> None:
        """One full set of weights: of each bucket, the files of all ranks of the server.

        Raises RequestRefused when the server does not take a bucket, or holds other bits than were sent.
        """
        if self.has_update_session:
            self._post("/begin_weight_update", {})
        for files in buckets:
            for file in files:
                report_of(file).unlink(missing_ok=True)
            body = {
                "serialized_named_tensors": [_name_only(file) for file in files],
                "load_format": self._loader,
                "flush_cache": True,
                # Requests of callers that were cancelled may still run; nobody waits for them.
                "abort_all_requests": True,
            }
            self._post("/update_weights_from_tensor", body)
            for rank, file in enumerate(files):
                _check_report(file, rank)
        if self.has_update_session:
            self._post("/end_weight_update", {})
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _post(self, path: str, body: dict[str, object]) -> None:
        answer = self._client.call("POST", path, body, timeout=self._timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestRefused(f"{path}: {answer.get('message')}")


def _name_only(file: Path) -> str:
    """The file's name as SGLang takes named tensors; the tensor is empty."""
    return base64.b64encode(pickle.dumps([(str(file), torch.empty(0))])).decode()


def _check_report(file: Path, rank: int) -> None:
    if not report_of(file).exists():
        raise RequestRefused(f"rank {rank} of the SGLang server did not read its weights in {file}")
    if error := json.loads(report_of(file).read_text())["error"]:
        raise RequestRefused(f"rank {rank} of the SGLang server did not take the weights in {file}: {error}")
