"""A model written tensor by tensor, in Hugging Face's format or in Megatron's; what is in memory is
one tensor at a time.

Both writers are told all types and shapes first and write the header of every file from them, so
that no file has to be in memory to be written. Source of the file format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega import __version__
from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.checkpoint import BACKEND
from ragen_mega.megatron.checkpoint import VERSION as BACKEND_VERSION
from ragen_mega.models.layout import StoredSlot, shard, stored_slots
from ragen_mega.models.shape import trainer_vocab_size
from ragen_mega.storage.integrity import describe_file, manifest_sha256
from ragen_mega.storage.model_readers import FORMAT, MANIFEST, ROLE, VERSION
from ragen_mega.storage.shard_files import DTYPES, HEADER, file_name

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BYTES_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that a file is going to hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file that is written front to back."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path, self._entries, self._next = path, entries, 0
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for entry in entries:
            start, end = end, end + entry.num_bytes
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (start, end),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: Tensor) -> None:
        """Write the next entry, in its type; rows that `tensor` has fewer than the entry are zero."""
        entry = self._entries[self._next]
        self._next += 1
        assert tensor.shape[1:] == entry.shape[1:] and len(tensor) <= entry.shape[0], (
            entry,
            tensor.shape,
        )
        rows = max(1, _BYTES_AT_ONCE * len(tensor) // max(1, tensor.nbytes))
        for part in tensor.split(rows):
            self._file.write(_bytes(part.to(entry.dtype).contiguous()))
        if missing := entry.num_bytes - math.prod(tensor.shape) * entry.dtype.itemsize:
            self._file.write(bytes(missing))

    def close(self) -> None:
        """Wait until the disk has the whole file."""
        assert self._next == len(self._entries), f"{self._path} is not complete"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class HuggingFaceWriter:
    """`model.safetensors`, or shards of at most `max_shard_size` bytes (but of one tensor at least)
    and their index.
    """

    def __init__(self, directory: Path, entries: Sequence[Entry], max_shard_size: int) -> None:
        self._directory = directory
        shards: list[list[Entry]] = [[]]
        for entry in entries:
            if (
                shards[-1]
                and sum(other.num_bytes for other in shards[-1]) + entry.num_bytes > max_shard_size
            ):
                shards.append([])
            shards[-1].append(entry)
        count = len(shards)
        names = [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
        self._shards = dict(zip(names if count > 1 else ["model.safetensors"], shards))
        self._file: TensorFile | None = None
        self._ahead = iter(
            [
                (path, index == 0)
                for path, shard in self._shards.items()
                for index in range(len(shard))
            ]
        )

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Write the next tensors, in the order of `entries`."""
        for tensor in tensors:
            path, is_first = next(self._ahead)
            if is_first:
                if self._file:
                    self._file.close()
                self._file = TensorFile(
                    self._directory / path, self._shards[path], {"format": "pt"}
                )
            self._file.append(tensor)

    def close(self) -> None:
        """Finish the last shard and write the index."""
        self._file.close()
        if len(self._shards) > 1:
            total = sum(entry.num_bytes for shard in self._shards.values() for entry in shard)
            files = {entry.name: path for path, shard in self._shards.items() for entry in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            (self._directory / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2) + "\n"
            )


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of a parameter, without the dimension of the layers, and the rank that holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class MegatronWriter:
    """The pieces that the ranks of a layout would write of an actor, with megatron-core's keys, and
    a manifest.
    """

    def __init__(
        self,
        directory: Path,
        hf: PretrainedConfig,
        dtypes: Mapping[str, torch.dtype],
        parallel: ParallelConfig,
    ) -> None:
        self._directory, self._hf, self._parallel = directory, hf, parallel
        self._slots = list(stored_slots(hf))
        num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        entries: list[list[Entry]] = [[] for _ in range(num_ranks)]
        headers: list[dict[str, dict]] = [{} for _ in range(num_ranks)]
        for stored in self._slots:
            if len(kinds := {dtypes[name] for name in stored.slot.names}) > 1:
                raise ValueError(
                    f"{', '.join(stored.slot.names)} are one tensor in megatron format and must"
                    f" have one type, not {', '.join(sorted(map(str, kinds)))}; add --dtype"
                )
            lead, stack = (
                ((), ()) if stored.layer is None else ((stored.layer,), (hf.num_hidden_layers,))
            )
            for cut in self._cuts(stored):
                name = f"{len(entries[cut.rank]):05d}"
                entries[cut.rank].append(
                    Entry(name, kinds.copy().pop(), (1,) * len(lead) + cut.shape)
                )
                headers[cut.rank][name] = {
                    "key": ROLE + stored.key,
                    "offset": lead + cut.offset,
                    "global_shape": stack + self._padded(stored),
                }
        self._files = {
            file_name(rank): TensorFile(
                directory / file_name(rank), entries[rank], {HEADER: json.dumps(headers[rank])}
            )
            for rank in range(num_ranks)
        }
        self._ahead = iter(self._slots)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Write the next slot from its Hugging Face tensors."""
        stored = next(self._ahead)
        whole = shard(stored.slot, tensors, self._hf, 0, 1)
        for cut in self._cuts(stored):
            box = whole[
                tuple(slice(start, start + size) for start, size in zip(cut.offset, cut.shape))
            ]
            self._files[file_name(cut.rank)].append(box if stored.layer is None else box[None])

    def close(self) -> None:
        """Finish the files and write the manifest over all files that are in the directory then."""
        for file in self._files.values():
            file.close()
        # What makes it a checkpoint to megatron-core's dist_checkpointing too.
        save_config(CheckpointingConfig(BACKEND, BACKEND_VERSION), str(self._directory))
        torch.save({}, self._directory / "common.pt")
        files = {path.name: describe_file(path) for path in sorted(self._directory.iterdir())}
        libraries = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "layout": {
                key: value
                for key, value in asdict(self._parallel).items()
                if key.endswith("model_parallel_size")
            },
            "versions": libraries | {"ragen_mega": __version__},
            "files": files,
        }
        text = json.dumps(manifest | {"sha256": manifest_sha256(manifest)}, indent=2)
        (self._directory / MANIFEST).write_text(text + "\n")

    def _padded(self, stored: StoredSlot) -> tuple[int, ...]:
        """Shape under the key, without the dimension of the layers."""
        shape = stored.shape(self._hf)
        if stored.slot.layout == "vocab":
            return (
                trainer_vocab_size(self._hf.vocab_size, self._parallel.tensor_model_parallel_size),
                *shape[1:],
            )
        return shape

    def _cuts(self, stored: StoredSlot) -> Iterator[Cut]:
        """How the ranks of the layout share a parameter; ranks count through tensor-parallel ranks
        first.
        """
        shape, num_parts = self._padded(stored), self._parallel.tensor_model_parallel_size
        num_stages = self._parallel.pipeline_model_parallel_size
        stage = 0 if stored.key.startswith("embedding.") else num_stages - 1
        if stored.layer is not None:
            stage = stored.layer * num_stages // self._hf.num_hidden_layers
        first = stage * num_parts
        if stored.slot.layout == "replicated":
            yield Cut(first, (0,) * len(shape), shape)
            return
        axis, num_blocks = (
            int(stored.slot.layout == "row"),
            2 if stored.slot.layout == "gate_up" else 1,
        )
        size = shape[axis] // (num_blocks * num_parts)
        for block in range(num_blocks):
            for part in range(num_parts):
                offset, local = [0] * len(shape), list(shape)
                offset[axis], local[axis] = (block * num_parts + part) * size, size
                yield Cut(first + part, tuple(offset), tuple(local))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
