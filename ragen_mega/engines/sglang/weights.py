"""Weights for an SGLang server, in buckets, from each rank that shares it to the server's rank of
the same number.

The server reads them with `weight_loader` and verifies by checksums that it holds what was sent.
"""

import base64
import errno
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from transformers import PretrainedConfig

from ragen_mega.data.checksums import check_names, checksum
from ragen_mega.engines.sglang.fp8_blocks import quantize_stream
from ragen_mega.engines.sglang.http_json import JSONClient, RequestRefused
from ragen_mega.engines.sglang.weight_loader import (
    ALIGNMENT,
    LOADER,
    Contents,
    Extent,
    bytes_of,
    map_bytes,
    report_of,
)
from ragen_mega.models.layout import expected_tensors
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks.waits import here
from ragen_mega.rollout.engine import EngineError, EngineShard

BUCKET_BYTES = 128 * 2**20
"""A multiple of what the checksum takes at a time; the memory plan counts it."""
_SHARED_MEMORY = Path("/dev/shm")


class BucketMessage(NamedTuple):
    """One rank's part of a bucket, as SGLang takes it."""

    file: Path
    """Path of the file that `weight_loader` reads; its report is written beside it."""
    payload: str
    """The file's name and a tensor, serialized."""
    is_last: bool


@dataclass(slots=True)
class FileBucket:
    """Weights packed side by side, and the file that describes them."""

    file: Path
    memory: Tensor  # [bytes] uint8
    places: list[tuple[str, Extent]] = field(default_factory=list)
    num_bytes: int = 0
    """Number of bytes in use."""

    @property
    def is_full(self) -> bool:
        return self.num_bytes == len(self.memory)

    def add(self, name: str, flat: Tensor, start: int, expected: Tensor) -> int:
        """Copy as many elements of a weight, from `start` on, as there is room for. Returns where
        the next bucket goes on.
        """
        dtype = expected.dtype
        count = min(len(flat) - start, (len(self.memory) - self.num_bytes) // dtype.itemsize)
        shape, kind = [*expected.shape], str(dtype).removeprefix("torch.")
        place = Extent(self.num_bytes, kind, shape, start, count)
        place.fill(self.memory, flat[start : start + count])
        self.places.append((name, place))
        self.num_bytes = _aligned(place.end)
        return start + count

    def write(self, all_names: list[str] | None) -> None:
        """Write the file that describes it, once the device has filled it."""
        used = self.memory[: self.num_bytes]
        Contents(self.places, self.num_bytes, checksum(used), all_names).write(self.file)


class WeightTransfer(ABC):
    """Hands the weights of one rank of a server over, in buckets.

    Ranks that share a server, each with its own transfer, form `group`; their methods are then
    collective.
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

        Raises ValueError where the model cannot be cut that way.
        """
        self.directory = _agree_on_directory(group)
        """The same for all ranks of the server; it exists from the first stream to `close`."""
        self._shard = shard
        self._group = group
        self._sent: list[list[BucketMessage]] = []  # the last complete stream
        self._prepare = partial(quantize_stream, hf=model_config) if fp8 else iter
        sizes = expected_tensors(ModelShape.of(model_config))
        with torch.device("meta"):  # without memory
            full = ((name, torch.empty(size, dtype=dtype)) for name, size in sizes.items())
            cut = cut_stream(full, model_config, *shard)
            self._expected = dict(self._prepare(cut))
        self.num_bytes = sum(_aligned(tensor.nbytes) for tensor in self._expected.values())
        self._memory_bytes = _aligned(min(bucket_bytes, self.num_bytes))  # of any bucket

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[BucketMessage]]:
        """Stream of (SGLang's name, shard) -> for each bucket, the messages of all ranks of the
        server; at the end an empty list.

        The server takes a bucket while the next one is filled: it must have copied the one before
        the last when another is asked for, and the last when the stream is to end. All ranks of the
        group go through the whole stream. Raises, with `weights` consumed to its end, ValueError
        unless exactly the expected names and shapes arrive, and EngineError, on all ranks of the
        group, if one finds no room.
        """
        self._sent, sent = [], list[list[BucketMessage]]()
        weights = iter(weights)
        try:
            for own_message in self._messages(weights):
                gathered = [own_message] * self._shard.size
                if self._group is not None:
                    dist.all_gather_object(gathered, own_message, group=self._group)
                for message in gathered:
                    if isinstance(message, EngineError):
                        raise message
                sent.append([each for each in gathered if isinstance(each, BucketMessage)])
                yield sent[-1]
                self.wait_for_all_ranks()
        except (EngineError, ValueError):
            for _ in weights:
                continue
            raise
        yield []
        self.wait_for_all_ranks()
        self._sent = sent

    def again(self) -> list[list[BucketMessage]] | None:
        """Return the messages of the last complete stream, for another server; None where what they
        name is not kept.
        """
        return self._sent

    def deliver(
        self, client: JSONClient, buckets: Iterable[list[BucketMessage]], version: int
    ) -> None:
        """Have a server take buckets of `receive` or `again`. Raises as `send` does."""
        send(client, buckets, version)

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks of the server."""
        if self._group is not None:
            with here.waiting("ranks", "the ranks of a server"):
                dist.barrier(group=self._group)

    def close(self) -> None:
        """Give the memory of all ranks back, for good. Safe to call again."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _messages(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[BucketMessage | EngineError]:
        """Fill buckets; yields for each the message of this rank, or why there is none."""
        try:
            for bucket, is_last in self._fill(weights):
                bucket.write([*self._expected] if is_last else None)
                payload = base64.b64encode(self._pickle(bucket)).decode()
                yield BucketMessage(bucket.file, payload, is_last)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # Not as OSError, which would be taken for a full disk of the run's output.
            where = self.directory.parent
            yield EngineError(
                f"{where} has no room for the weights of the rollout servers: it must hold"
                f" {self.num_bytes} bytes for each of their ranks and has"
                f" {shutil.disk_usage(where).total}; enlarge it (docker run --shm-size), or set"
                " --weight-transfer ipc"
            )

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[FileBucket, bool]]:
        """Copy the stream; yields each full bucket and whether it is the last."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        own = self.directory / str(self._shard.rank)
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        files = (own / f"{index:05d}.json" for index in itertools.count())
        bucket, missing = self._open(next(files)), dict(self._expected)
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
            flat, start = tensor.detach().reshape(-1), 0
            while start < len(flat):
                if bucket.is_full:
                    yield bucket, False
                    bucket = self._open(next(files))
                start = bucket.add(name, flat, start, expected)
        check_names(self._expected.keys() - missing.keys(), self._expected)
        yield bucket, True

    @abstractmethod
    def _open(self, file: Path) -> FileBucket:
        """Return an empty bucket."""

    @abstractmethod
    def _pickle(self, bucket: FileBucket) -> bytes:
        """Pickle the message to SGLang: [(file, memory, or an empty tensor where the file is
        enough)].
        """


class FileTransfer(WeightTransfer):
    """Through files in shared memory, as large as the shard: works between any two environments and
    devices.

    They stay, so that a server that has died can be given all of them again without the trainer.
    """

    def _open(self, file: Path) -> FileBucket:
        with bytes_of(file).open("wb") as opened:
            # At once, because writing to shared memory that is not backed would kill this process.
            os.posix_fallocate(opened.fileno(), 0, self._memory_bytes)
        return FileBucket(file, map_bytes(file))

    def _pickle(self, bucket: FileBucket) -> bytes:
        os.truncate(bytes_of(bucket.file), bucket.num_bytes)
        # Empty, because SGLang moves it to its device before the loader sees it.
        return pickle.dumps([(str(bucket.file), torch.empty(0))])


class IpcTransfer(WeightTransfer):
    """Through two buffers on the device that both processes map (CUDA IPC), filled in turns: a
    device copy.

    Nothing is kept: for a server that is lost the trainer has to send all again. Between processes
    on a CPU the buffers are shared memory, in torch's "file_system" manner.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Start a transfer without buffers."""
        super().__init__(*arguments, **options)
        self._buffers: list[Tensor] = []  # the one in use last

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[BucketMessage]]:
        """Receive the weights as every transfer does, and free the device memory of the buffers at
        the end.
        """
        yield from super().receive(weights)
        self._buffers.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # frees what the server has closed
            torch.cuda.empty_cache()

    def again(self) -> None:
        """Return None."""

    def _open(self, file: Path) -> FileBucket:
        if len(self._buffers) < 2:
            self._buffers.append(self._allocate())
        else:
            self._buffers.reverse()
        return FileBucket(file, self._buffers[-1])

    def _allocate(self) -> Tensor:
        if torch.cuda.is_available():
            return torch.empty(self._memory_bytes, dtype=torch.uint8, device="cuda")
        # A name that the server can open, not a descriptor.
        multiprocessing.set_sharing_strategy("file_system")
        return torch.empty(self._memory_bytes, dtype=torch.uint8).share_memory_()

    def _pickle(self, bucket: FileBucket) -> bytes:
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump([(str(bucket.file), bucket.memory)])  # the memory as a handle
        return pickled.getvalue()


TRANSFERS = {"file": FileTransfer, "ipc": IpcTransfer}


def send(client: JSONClient, buckets: Iterable[list[BucketMessage]], version: int) -> None:
    """Have a server take one full set of weights, each bucket while the next one is made.

    Raises RequestRefused when it does not take a bucket, or holds other bits than were sent.
    """

    def take(messages: list[BucketMessage]) -> None:
        for message in messages:
            report_of(message.file).unlink(missing_ok=True)
        body = {
            "serialized_named_tensors": [message.payload for message in messages],
            "load_format": LOADER,
            "flush_cache": True,
            "torch_empty_cache": messages[0].is_last,  # the loader's temporaries
            # Requests of callers that were cancelled may still run; nobody waits for them.
            "abort_all_requests": True,
        }
        post(client, "/update_weights_from_tensor", body)
        for rank, message in enumerate(messages):
            _check_report(message.file, rank)

    with update_of(client, version), ThreadPoolExecutor(1) as thread:
        taken = thread.submit(lambda: None)
        for messages in buckets:
            taken.result()
            if messages:
                taken = thread.submit(take, messages)
        taken.result()


@contextmanager
def update_of(client: JSONClient, version: int) -> Iterator[None]:
    """Have a server take weights in the block, in the way its SGLang version takes them, and label
    what it samples from then on.
    """
    # SGLang 0.5.21 and later take weights between two requests only, which earlier ones lack.
    has_session = "/begin_weight_update" in client.call("GET", "/openapi.json")["paths"]
    if has_session:
        post(client, "/begin_weight_update", {})
    try:
        yield
    finally:  # an aborted set can be followed by another
        if has_session:
            post(client, "/end_weight_update", {})
    label = {"new_version": str(version), "abort_all_requests": False}
    post(client, "/update_weight_version", label)


def post(client: JSONClient, path: str, body: dict[str, object]) -> None:
    """Raise RequestRefused where the server says, in its answer, that it did not do it."""
    answer = client.call("POST", path, body)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RequestRefused(f"{path}: {answer.get('error_message') or answer.get('message')}")


def _check_report(file: Path, rank: int) -> None:
    if not report_of(file).exists():
        raise RequestRefused(f"rank {rank} of the SGLang server did not read its weights in {file}")
    if error := json.loads(report_of(file).read_text())["error"]:
        raise RequestRefused(
            f"rank {rank} of the SGLang server did not take the weights in {file}: {error}"
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _agree_on_directory(group: dist.ProcessGroup | None) -> Path:
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    holder = [base / f"ragen-weights-{secrets.token_hex(8)}"]
    if group is not None:
        dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]
