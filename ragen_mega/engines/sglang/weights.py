"""Weights for an SGLang server, in buckets, from every rank that shares it to the server's rank of
the same number.

The server reads them by `weight_loader`, and says by checksums whether it holds what was sent.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, multiprocessing
from transformers import AutoModelForCausalLM, PretrainedConfig

from ragen_mega.engines.sglang.fp8_blocks import quantize_stream
from ragen_mega.engines.sglang.http_json import JSONClient, RequestRefused
from ragen_mega.engines.sglang.weight_checks import check_names, checksums
from ragen_mega.engines.sglang.weight_loader import (
    ALL_NAMES,
    ENTRIES,
    JSON,
    SAFETENSORS,
    SUMS,
    report_of,
)
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.rollout.engine import EngineShard

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 512 * 2**20
_ALIGNMENT = 16  # bytes, of a tensor in a bucket


class Message(NamedTuple):
    """One rank's part of a bucket, as SGLang takes it."""

    file: Path
    """What `weight_loader` reads; its report is written beside it."""
    payload: str
    """The file's name and a tensor, serialized."""


class WeightTransfer(ABC):
    """Hands the weights of one rank of a server over, in buckets.

    Ranks that share a server, each with a transfer of its own, form `group`; what they do is
    collective then.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        shard: EngineShard,
        dtype: torch.dtype,
        *,
        fp8: bool = False,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Linear weights of the layers travel in blocks of FP8 if `fp8`, all others in `dtype`.

        Raises ValueError where the model cannot be cut so.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        self.directory = _agree_on_directory(group)
        """The same for all ranks of the server; there from the first stream to `close`."""
        self._shard = shard
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._prepare = quantize_stream if fp8 else iter
        with torch.device("meta"):
            full = AutoModelForCausalLM.from_config(model_config, dtype=dtype).state_dict()
            self._expected = dict(
                self._prepare(cut_stream(full.items(), model_config, *shard))
            )  # without memory

    @abstractmethod
    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[Message]]:
        """Stream of (SGLang's name, shard) -> of each bucket, the messages of all ranks of the
        server, on its first rank.

        All ranks of the group go through all of it. Raises ValueError unless exactly the expected
        names and shapes arrive.
        """

    @abstractmethod
    def again(self) -> list[list[Message]] | None:
        """The weights that were received last, for another server; None where they are not kept."""

    def close(self) -> None:
        """Give the memory of all ranks back, for good. Safe to call again."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _clear(self) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(self.directory / str(self._shard.rank), ignore_errors=True)
        (self.directory / str(self._shard.rank)).mkdir()

    def _buckets(
        self, weights: Iterable[tuple[str, Tensor]], put: Callable[[str, Tensor, int], None]
    ) -> Iterator[bool]:
        """Have every weight `put` at its offset in bytes; yields when a bucket is full, and whether
        it is the last.
        """
        num_bytes, names, seen = 0, set[str](), list[str]()
        for name, tensor in self._prepare(weights):
            expected = self._expected.get(name)
            if expected is None or name in names or tensor.shape != expected.shape:
                wanted = None if expected is None else list(expected.shape)
                raise ValueError(
                    f"weight {name!r} came with shape {list(tensor.shape)}, and the engine takes"
                    f" each of its {len(self._expected)} weights once, this one with {wanted};"
                    " check that the weights belong to the model config"
                )
            size = _aligned(expected.nbytes)
            if names and num_bytes + size > self._bucket_bytes:
                yield False
                num_bytes, names = 0, set()
            put(name, tensor.detach(), num_bytes)
            num_bytes += size
            names.add(name)
            seen.append(name)
        check_names(seen, self._expected)
        yield True

    def _metadata(self, tensors: Mapping[str, Tensor], is_last: bool) -> dict[str, str]:
        metadata = {SUMS: json.dumps(checksums(tensors.items()))}
        if is_last:
            metadata[ALL_NAMES] = json.dumps([*self._expected])
        return metadata

    def _file(self, index: int, rank: int, suffix: str) -> Path:
        return self.directory / str(rank) / f"{index:05d}{suffix}"


class FileTransfer(WeightTransfer):
    """Through files in shared memory, as large as the shard: works between any two environments and
    devices.

    They stay, so that a server that has died can be given all of them again without the trainer.
    """

    _num_buckets = 0  # of the current weights, the same on every rank of the server

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[Message]]:
        """The messages come when the stream has ended on all ranks."""
        self._num_buckets, num_written = 0, 0
        self._clear()
        pending: dict[str, Tensor] = {}

        def put(name: str, tensor: Tensor, offset: int) -> None:
            # A copy, because the stream may use its buffer again.
            pending[name] = tensor.to(
                device="cpu", dtype=self._expected[name].dtype, copy=True
            ).contiguous()

        for is_last in self._buckets(weights, put):
            metadata = {"format": "pt", **self._metadata(pending, is_last)}
            save_file(
                pending, self._file(num_written, self._shard.rank, SAFETENSORS), metadata=metadata
            )
            pending.clear()
            num_written += 1
        if self._group is not None:
            dist.barrier(group=self._group)
        self._num_buckets = num_written
        yield from self.again()

    def again(self) -> list[list[Message]]:
        """The files of the last complete stream; none before."""
        files = [
            [self._file(index, rank, SAFETENSORS) for rank in range(self._shard.size)]
            for index in range(self._num_buckets)
        ]
        # An empty tensor, pickled as it is: SGLang moves it to its device before the loader sees
        # it.
        return [
            [
                Message(file, _serialize(pickle.dumps([(str(file), torch.empty(0))])))
                for file in bucket
            ]
            for bucket in files
        ]


class IpcTransfer(WeightTransfer):
    """Through one buffer on the device that both processes map (CUDA IPC), filled again for every
    bucket: a device copy.

    Nothing is kept: for a server that is lost the trainer has to send all again. Between processes
    on a CPU the buffer is shared memory, in torch's "file_system" manner.
    """

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[Message]]:
        """A bucket is written again when all ranks have come back for the next, so the server must
        have copied it then.
        """
        self._clear()
        sizes = [_aligned(tensor.nbytes) for tensor in self._expected.values()]
        buffer = _shared_buffer(max(*sizes, min(self._bucket_bytes, sum(sizes))))
        views: dict[str, Tensor] = {}

        def put(name: str, tensor: Tensor, offset: int) -> None:
            expected = self._expected[name]
            part = buffer[offset : offset + expected.nbytes]
            views[name] = part.view(expected.dtype).view(expected.shape).copy_(tensor)

        for index, is_last in enumerate(self._buckets(weights, put)):
            file = self._file(index, self._shard.rank, JSON)
            entries = {
                name: (view.data_ptr() - buffer.data_ptr(), str(view.dtype), list(view.shape))
                for name, view in views.items()
            }
            file.write_text(json.dumps(self._metadata(views, is_last) | {ENTRIES: entries}))
            if buffer.is_cuda:
                torch.cuda.synchronize()
            yield self._gather(Message(file, _serialize(_pickle_shared([(str(file), buffer)]))))
            if self._group is not None:
                dist.barrier(group=self._group)
            views.clear()

    def again(self) -> None:
        """None."""

    def _gather(self, message: Message) -> list[Message]:
        if self._group is None:
            return [message]
        messages: list[Any] = [None] * self._shard.size
        dist.all_gather_object(messages, message, group=self._group)
        return messages


TRANSFERS = {"file": FileTransfer, "ipc": IpcTransfer}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _agree_on_directory(group: dist.ProcessGroup | None) -> Path:
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    holder = [base / f"ragen-weights-{secrets.token_hex(8)}"]
    if group is not None:
        dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]


def _shared_buffer(num_bytes: int) -> Tensor:
    if torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    multiprocessing.set_sharing_strategy(
        "file_system"
    )  # a name that the server can open, not a descriptor
    return torch.empty(num_bytes, dtype=torch.uint8).share_memory_()


def _pickle_shared(value: Any) -> bytes:
    """With shared tensors as handles."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def _serialize(pickled: bytes) -> str:
    return base64.b64encode(pickled).decode()


class WeightSender:
    """Tells a server to take buckets, in the manner of its generation."""

    def __init__(self, client: JSONClient, loader: str, *, timeout: float) -> None:
        """`loader` is the server's name for `weight_loader.load`."""
        self._client = client
        self._loader = loader
        self._timeout = timeout
        paths = client.call("GET", "/openapi.json", timeout=timeout)["paths"]
        self.has_update_session = {"/begin_weight_update", "/end_weight_update"} <= paths.keys()
        """SGLang 0.5.21 and later take weights between these two requests only; earlier ones have
        neither.
        """

    def send(self, buckets: Iterable[list[Message]], version: int) -> None:
        """One full set of weights: of each bucket, the messages of all ranks of the server.

        Raises RequestRefused when the server does not take a bucket, or holds other bits than were
        sent.
        """
        if self.has_update_session:
            self._post("/begin_weight_update", {})
        for messages in buckets:
            for message in messages:
                report_of(message.file).unlink(missing_ok=True)
            body = {
                "serialized_named_tensors": [message.payload for message in messages],
                "load_format": self._loader,
                "flush_cache": True,
                # Requests of callers that were cancelled may still run; nobody waits for them.
                "abort_all_requests": True,
            }
            self._post("/update_weights_from_tensor", body)
            for rank, message in enumerate(messages):
                _check_report(message.file, rank)
        if self.has_update_session:
            self._post("/end_weight_update", {})
        self._post(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    def _post(self, path: str, body: dict[str, object]) -> None:
        answer = self._client.call("POST", path, body, timeout=self._timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestRefused(f"{path}: {answer.get('message')}")


def _check_report(file: Path, rank: int) -> None:
    if not report_of(file).exists():
        raise RequestRefused(f"rank {rank} of the SGLang server did not read its weights in {file}")
    if error := json.loads(report_of(file).read_text())["error"]:
        raise RequestRefused(
            f"rank {rank} of the SGLang server did not take the weights in {file}: {error}"
        )
