"""Models written tensor by tensor in Hugging Face's format, with one tensor in memory at a
time.

All types and shapes are known first, and with them the header of every file, so that no file has to
be built in memory. Source of the file format:
https://github.com/huggingface/safetensors#format
"""

import contextlib
import copy
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.layout import complete, expected_tensors, group_by_size
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.storage.integrity import sync, system_error, write_whole
from ragen_mega.storage.model_readers import check_finite
from ragen_mega.storage.shard_files import DTYPES
from ragen_mega.system.paths import named

MAX_SHARD_SIZE = 5 * 10**9
"""Default size of a file in bytes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BYTES_AT_ONCE = 2**22
_DTYPES = ("dtype", "torch_dtype")
"""Entries of config.json in transformers 5 and before."""
_QUANTISATIONS = ("quantization_config", "compression_config")


Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


def num_bytes(kind: Kind) -> int:
    """Return the bytes of a tensor's elements."""
    dtype, shape = kind
    return math.prod(shape) * dtype.itemsize


class TensorFile:
    """A safetensors file whose tensors are written one by one, in any order. Until it is closed it
    has a temporary name.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Kind], metadata: Mapping[str, str]
    ) -> None:
        self._path, self._unfinished = path, path.with_name(f".{path.name}.tmp")
        self._ahead: dict[str, tuple[Kind, int]] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name, kind in tensors.items():
            start, end = end, end + num_bytes(kind)
            self._ahead[name] = (kind, start)
            header[name] = {
                "dtype": _NAMES[kind[0]],
                "shape": kind[1],
                "data_offsets": (start, end),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        self._file = self._unfinished.open("wb")
        with named(path):
            self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = self._file.tell()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, in the type and shape announced; missing rows are zero. Raises ValueError
        if a number of it is not finite.
        """
        (dtype, shape), start = self._ahead.pop(name)
        assert tensor.shape[1:] == shape[1:] and len(tensor) <= shape[0], (name, tensor.shape)
        rows = max(1, _BYTES_AT_ONCE * len(tensor) // max(1, tensor.nbytes))
        with named(self._path):
            self._file.seek(self._start + start)
            for part in tensor.detach().split(rows):
                check_finite(name, part)
                data = part.to(device="cpu", dtype=dtype).contiguous()
                self._file.write(data.reshape(-1).view(torch.uint8).numpy())
            end = self._start + start + num_bytes((dtype, shape))
            self._file.write(bytes(end - self._file.tell()))

    def close(self) -> None:
        """Give the file its name, once all of it is on disk."""
        assert not self._ahead, f"{self._path} is not complete"
        with named(self._path):
            self._file.close()
        sync(self._unfinished)
        self._unfinished.replace(self._path)

    def discard(self) -> None:
        """Delete the file if it has not got its name."""
        with contextlib.suppress(OSError):  # of what is still to be written
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


class HuggingFaceWriter:
    """`model.safetensors`, or shards of at most `max_shard_size` bytes (but at least one tensor)
    and their index.
    """

    def __init__(
        self, directory: Path, tensors: Mapping[str, Kind], max_shard_size: int = MAX_SHARD_SIZE
    ) -> None:
        parts = group_by_size(tensors.items(), lambda item: num_bytes(item[1]), max_shard_size)
        shards = [dict(part) for part in parts]
        count = len(shards)
        files = [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
        self._index = directory / "model.safetensors.index.json" if count > 1 else None
        self._total = sum(map(num_bytes, tensors.values()))
        self._weight_map: dict[str, str] = {}
        self._files: dict[str, TensorFile] = {}
        for file, shard in zip(files if count > 1 else ["model.safetensors"], shards, strict=True):
            self._weight_map |= dict.fromkeys(shard, file)
            self._files[file] = TensorFile(directory / file, shard, {"format": "pt"})

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors."""
        self._files[self._weight_map[name]].write(name, tensor)

    def close(self) -> None:
        """Finish the shards; the index, without which they are not read, comes last, and the index
        of an earlier export goes first: until the last shard has its name they would be a mixture.
        """
        if self._index:
            self._index.unlink(missing_ok=True)
        for file in self._files.values():
            file.close()
        if self._index:
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": dict(sorted(self._weight_map.items())),
            }
            write_whole(self._index, (json.dumps(index, indent=2) + "\n").encode())

    def discard(self) -> None:
        """Delete the shards that are not finished."""
        for file in self._files.values():
            file.discard()


def of_type(values: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the entries of a config.json for weights of this type, None for several: every entry
    that names a type, of a part of the model too, names this one, and none states a quantisation.
    """
    kept: dict[str, Any] = {
        name: of_type(value, dtype) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in _QUANTISATIONS
    }
    stated = [kept[name] for name in _DTYPES if kept.get(name) is not None]
    if dtype is None and stated:
        dtype = stated[0]
    return kept | {name: dtype for name in _DTYPES if name in kept}


def save_huggingface(
    directory: Path,
    hf: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    weights: Iterable[tuple[str, Tensor]],
    *,
    is_writer: bool,
    is_critic: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write a directory that `transformers` loads; its weights get their names last, when all is
    there. Every rank must call it: `weights` is a collective stream, which is read to its end
    even when the disk is full.

    The generation config comes from the directory from which `hf` was loaded. Raises OSError, and
    ValueError if the weights are not the weights of the model, or differ in type.
    """
    stream = iter(weights)
    try:
        if is_writer:
            _write(directory, hf, tokenizer, stream, is_critic, max_shard_size)
    finally:
        for _ in stream:
            pass


def export(
    directory: Path,
    hf: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    weights: Iterable[tuple[str, Tensor]],
    *,
    is_critic: bool = False,
) -> None:
    """`save_huggingface` by rank 0, whose directory is complete on return. Collective. Raises the
    same errors, on all ranks.
    """
    collectives.on_each(
        lambda: save_huggingface(
            directory,
            hf,
            tokenizer,
            weights,
            is_writer=collectives.is_main(),
            is_critic=is_critic,
        )
    )


def _write(
    directory: Path,
    hf: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    stream: Iterator[tuple[str, Tensor]],
    is_critic: bool,
    max_shard_size: int,
) -> None:
    first = next(stream)
    dtype = first[1].dtype
    shape = ModelShape.of(hf)
    expected = expected_tensors(shape, is_critic=is_critic)
    kinds = {
        name: (torch.float32 if name == VALUE_HEAD else dtype, size)
        for name, size in expected.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf)
    config.architectures, config.dtype = [shape.family.architecture], dtype
    config.save_pretrained(directory)
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        raise system_error(error, directory) or error from None
    _add_older_spellings(directory)
    generation = Path(hf.name_or_path or "", "generation_config.json")
    if hf.name_or_path and generation.is_file():
        shutil.copyfile(generation, directory / generation.name)
    writer = HuggingFaceWriter(directory, kinds, max_shard_size)
    try:
        for name, tensor in complete(chain([first], stream), expected):
            if name != VALUE_HEAD and tensor.dtype != dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype}, and others are {dtype}; export one type"
                )
            writer.write(name, tensor)
        writer.close()
    except (OSError, ValueError):
        writer.discard()  # it would hold the disk that may lack room
        raise


def _add_older_spellings(directory: Path) -> None:
    """Write what transformers 4 reads beside what transformers 5 writes: inference servers are
    built on either, and 4 takes a base of 10,000 where it finds no `rope_theta`, and 128 experts
    where it finds no `num_experts`.
    """
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values = of_type(values, values.get("dtype"))
    rope = values.get("rope_parameters") or {}
    if "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        is_plain = scaling.get("rope_type", "default") == "default"
        values |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if is_plain else scaling,
            "torch_dtype": values.get("dtype"),
        }
    if "num_local_experts" in values:
        values["num_experts"] = values["num_local_experts"]
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    path = directory / "tokenizer_config.json"
    values = json.loads(path.read_text())
    if isinstance(extra := values.get("extra_special_tokens"), list):
        del values["extra_special_tokens"]
        values["additional_special_tokens"] = extra
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
