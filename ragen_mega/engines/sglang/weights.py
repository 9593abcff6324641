"""Weights for an SGLang server, in buckets, from every rank that shares it to the server's rank of
the same number.

The server reads them by `weight_loader`, and says by checksums whether it holds what was sent.
"""

import base64
import io
import itertools
import json
import os
import pickle
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from transformers import AutoModelForCausalLM, PretrainedConfig

from ragen_mega.data.checksums import check_names, checksums
from ragen_mega.engines.sglang.fp8_blocks import quantize_stream
from ragen_mega.engines.sglang.http_json import JSONClient, RequestRefused
from ragen_mega.engines.sglang.weight_loader import (
    LOADER,
    Contents,
    Place,
    bytes_of,
    map_bytes,
    report_of,
)
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.rollout.engine import EngineShard

BUCKET_BYTES = 512 * 2**20
_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 16  # bytes, of a tensor in a bucket


class Message(NamedTuple):
    """One rank's part of a bucket, as SGLang takes it."""

    file: Path
    """What `weight_loader` reads; its report is written beside it."""
    payload: str
    """The file's name and a tensor, serialized."""


@dataclass(slots=True)
class Bucket:
    """Weights side by side, and the file that describes them."""

    file: Path
    memory: Tensor  # [bytes] uint8
    places: dict[str, Place] = field(default_factory=dict)
    num_bytes: int = 0
    """In use."""

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Copy a weight, as `dtype`."""
        place = Place(self.num_bytes, str(dtype).removeprefix("torch."), list(tensor.shape))
        place.view(self.memory).copy_(tensor.detach())
        self.places[name] = place
        self.num_bytes += _aligned(tensor.numel() * dtype.itemsize)


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
        self.directory = _agree_on_directory(group)
        """The same for all ranks of the server; there from the first stream to `close`."""
        self._shard = shard
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._sent: list[list[Message]] = []  # the last complete stream
        self._prepare = quantize_stream if fp8 else iter
        with torch.device("meta"):  # without memory
            full = AutoModelForCausalLM.from_config(model_config, dtype=dtype).state_dict()
            cut = cut_stream(full.items(), model_config, *shard)
            self._expected = dict(self._prepare(cut))
        sizes = [_aligned(tensor.nbytes) for tensor in self._expected.values()]
        self._memory_bytes = max(*sizes, min(bucket_bytes, sum(sizes)))  # of any bucket

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[Message]]:
        """Stream of (SGLang's name, shard) -> of each bucket, the messages of all ranks of the
        server, which must have copied it when the next one is asked for.

        All ranks of the group go through all of it. Raises ValueError unless exactly the expected
        names and shapes arrive.
        """
        self._sent, sent = [], list[list[Message]]()
        for bucket, is_last in self._fill(weights):
            memory, places = bucket.memory, bucket.places
            sums = checksums((name, place.view(memory)) for name, place in places.items())
            Contents(places, sums, [*self._expected] if is_last else None).write(bucket.file)
            if memory.is_cuda:
                torch.cuda.synchronize()
            payload = base64.b64encode(self._pickle(bucket)).decode()
            messages = [Message(bucket.file, payload)] * self._shard.size
            if self._group is not None:
                dist.all_gather_object(messages, messages[0], group=self._group)
            yield messages
            if self._group is not None:
                dist.barrier(group=self._group)
            sent.append(messages)
        self._sent = sent

    def again(self) -> list[list[Message]] | None:
        """The messages of the last complete stream, for another server; None where what they name
        is not kept.
        """
        return self._sent

    def close(self) -> None:
        """Give the memory of all ranks back, for good. Safe to call again."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Bucket, bool]]:
        """Copy the stream; of each bucket that is full, whether it is the last."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        own = self.directory / str(self._shard.rank)
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        files = (own / f"{index:05d}.json" for index in itertools.count())
        bucket, missing = self._open(next(files), None), dict(self._expected)
        for name, tensor in self._prepare(weights):
            expected = missing.pop(name, None)
            if expected is None or tensor.shape != expected.shape:
                wanted = self._expected.get(name)
                raise ValueError(
                    f"weight {name!r} came with shape {list(tensor.shape)}, and the engine takes"
                    f" each of its {len(self._expected)} weights once, this one with"
                    f" {wanted if wanted is None else list(wanted.shape)}; check that the weights"
                    " belong to the model config"
                )
            if bucket.places and bucket.num_bytes + expected.nbytes > self._bucket_bytes:
                yield bucket, False
                bucket = self._open(next(files), bucket.memory)
            bucket.add(name, tensor, expected.dtype)
        check_names(self._expected.keys() - missing.keys(), self._expected)
        yield bucket, True

    @abstractmethod
    def _open(self, file: Path, memory: Tensor | None) -> Bucket:
        """An empty bucket; `memory` is that of the one before."""

    @abstractmethod
    def _pickle(self, bucket: Bucket) -> bytes:
        """What SGLang is sent: [(file, memory, or an empty tensor where the file is enough)]."""


class FileTransfer(WeightTransfer):
    """Through files in shared memory, as large as the shard: works between any two environments and
    devices.

    They stay, so that a server that has died can be given all of them again without the trainer.
    """

    def _open(self, file: Path, memory: Tensor | None) -> Bucket:
        with bytes_of(file).open("wb") as opened:
            # At once, because a write to memory that is not there would kill this process.
            os.posix_fallocate(opened.fileno(), 0, self._memory_bytes)
        return Bucket(file, map_bytes(file))

    def _pickle(self, bucket: Bucket) -> bytes:
        os.truncate(bytes_of(bucket.file), bucket.num_bytes)
        # Empty, because SGLang moves it to its device before the loader sees it.
        return pickle.dumps([(str(bucket.file), torch.empty(0))])


class IpcTransfer(WeightTransfer):
    """Through one buffer on the device that both processes map (CUDA IPC), filled again for every
    bucket: a device copy.

    Nothing is kept: for a server that is lost the trainer has to send all again. Between processes
    on a CPU the buffer is shared memory, in torch's "file_system" manner.
    """

    def again(self) -> None:
        """None."""

    def _open(self, file: Path, memory: Tensor | None) -> Bucket:
        if memory is None and torch.cuda.is_available():
            memory = torch.empty(self._memory_bytes, dtype=torch.uint8, device="cuda")
        elif memory is None:
            # A name that the server can open, not a descriptor.
            multiprocessing.set_sharing_strategy("file_system")
            memory = torch.empty(self._memory_bytes, dtype=torch.uint8).share_memory_()
        return Bucket(file, memory)

    def _pickle(self, bucket: Bucket) -> bytes:
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump([(str(bucket.file), bucket.memory)])  # the memory as a handle
        return pickled.getvalue()


TRANSFERS = {"file": FileTransfer, "ipc": IpcTransfer}


def send(client: JSONClient, buckets: Iterable[list[Message]], version: int) -> None:
    """Have a server take one full set of weights, in the manner of its generation.

    Raises RequestRefused when it does not take a bucket, or holds other bits than were sent.
    """

    def post(path: str, body: dict[str, object]) -> None:
        answer = client.call("POST", path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestRefused(f"{path}: {answer.get('message')}")

    # SGLang 0.5.21 and later take weights between two requests only, which earlier ones lack.
    has_session = "/begin_weight_update" in client.call("GET", "/openapi.json")["paths"]
    if has_session:
        post("/begin_weight_update", {})
    try:
        for messages in buckets:
            for message in messages:
                report_of(message.file).unlink(missing_ok=True)
            body = {
                "serialized_named_tensors": [message.payload for message in messages],
                "load_format": LOADER,
                "flush_cache": True,
                # Requests of callers that were cancelled may still run; nobody waits for them.
                "abort_all_requests": True,
            }
            post("/update_weights_from_tensor", body)
            for rank, message in enumerate(messages):
                _check_report(message.file, rank)
    finally:  # a set that broke off can be followed by another
        if has_session:
            post("/end_weight_update", {})
    post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


def _check_report(file: Path, rank: int) -> None:
    if not report_of(file).exists():
        raise RequestRefused(f"rank {rank} of the SGLang server did not read its weights in {file}")
    if error := json.loads(report_of(file).read_text())["error"]:
        raise RequestRefused(
            f"rank {rank} of the SGLang server did not take the weights in {file}: {error}"
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _agree_on_directory(group: dist.ProcessGroup | None) -> Path:
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    holder = [base / f"ragen-weights-{secrets.token_hex(8)}"]
    if group is not None:
        dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]
