"""Tensors of a model by Hugging Face name, from either format in which a directory may hold it.

reader.names()         of all tensors
reader.describe(name)  type and shape, without reading the tensor
reader(name)           the tensor, None if there is none of that name; it may be a view of a mapped file
reader.release()       unmap what was read, so that a caller who goes tensor by tensor stays small
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from ragen_mega.models.layout import StoredSlot, stored_slots, unshard
from ragen_mega.storage.integrity import describe_file, manifest_sha256
from ragen_mega.storage.shard_files import DTYPES, PATTERN, PieceReader

ROLE = "actor."
MANIFEST = "manifest.json"
FORMAT = "ragen_mega megatron model"
VERSION = 1
_BYTES_AT_ONCE = 2**22


class ModelReader(Protocol):
    """What both formats offer; see the module."""

    def names(self) -> list[str]:
        """Names of all tensors."""
        ...

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor that is there."""
        ...

    def __call__(self, name: str) -> Tensor | None: ...

    def release(self) -> None:
        """Unmap the files; tensors that were returned and are still in use keep theirs."""
        ...


class HuggingFaceReader:
    """A Hugging Face checkpoint directory: `model.safetensors`, or shards and their index."""

    def __init__(self, directory: Path) -> None:
        self._handles: dict[Path, safe_open] = {}
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.exists():
            try:
                self._files = {
                    name: directory / file
                    for name, file in json.loads(index.read_text())["weight_map"].items()
                }
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"cannot read {index} ({type(error).__name__}); the file is damaged, copy it"
                    " again"
                ) from None
        elif single.exists():
            self._files = dict.fromkeys(self._open(single).keys(), single)
        else:
            raise ValueError(
                f"no model.safetensors or model.safetensors.index.json in {directory}; give a"
                " Hugging Face checkpoint directory or one that tools/convert_checkpoint.py wrote"
            )

    @staticmethod
    def is_for(directory: Path) -> bool:
        """Whether the directory holds weights in this format."""
        return any(
            (directory / name).exists()
            for name in ("model.safetensors", "model.safetensors.index.json")
        )

    def names(self) -> list[str]:
        return list(self._files)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        path = self._files[name]
        try:
            stored = self._open(path).get_slice(name)
        except SafetensorError as error:
            raise _damaged(path, error) from None
        if stored.get_dtype() not in DTYPES:
            raise ValueError(
                f"{name} is {stored.get_dtype()} in {path}; only {', '.join(DTYPES)} can be read"
            )
        return DTYPES[stored.get_dtype()], tuple(stored.get_shape())

    def __call__(self, name: str) -> Tensor | None:
        path = self._files.get(name)
        if path is None:
            return None
        try:
            return self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise _damaged(path, error) from None

    def release(self) -> None:
        self._handles.clear()

    def _open(self, path: Path) -> safe_open:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise _damaged(path, error) from None
        return self._handles[path]


class MegatronReader:
    """The actor in pieces: a checkpoint of a run, or a directory that tools/convert_checkpoint.py
    wrote.
    """

    def __init__(self, directory: Path, hf: PretrainedConfig) -> None:
        self._directory, self._hf = directory, hf
        self._pieces = PieceReader(directory)
        self._where: dict[str, tuple[StoredSlot, int]] = {}
        for stored in stored_slots(hf):
            if (found := self._pieces.global_shapes.get(ROLE + stored.key)) is not None:
                self._check_shape(stored, found)
                self._where |= {
                    name: (stored, index) for index, name in enumerate(stored.slot.names)
                }
        self._last: tuple[StoredSlot, list[Tensor]] | None = (
            None  # q, k and v are asked for one after the other
        )

    def _check_shape(self, stored: StoredSlot, found: tuple[int, ...]) -> None:
        expected = _stacked(stored, self._hf)
        is_padded = stored.slot.layout == "vocab" and found[0] >= expected[0]
        if found != expected and not (is_padded and found[1:] == expected[1:]):
            raise ValueError(
                f"{stored.key} has shape {list(found)} in {self._directory} and config.json asks"
                f" for {list(expected)}; is config.json of another model?"
            )

    @classmethod
    def open(cls, directory: Path, *, verify: bool) -> Self:
        """A self-contained directory in megatron format. `verify`: compare the checksums of all
        files first.
        """
        if verify:
            verify_manifest(directory)
        return cls(directory, AutoConfig.from_pretrained(directory))

    @staticmethod
    def is_for(directory: Path) -> bool:
        """Whether the directory is a self-contained model in this format (a checkpoint of a run has
        no model's config).
        """
        return (directory / "config.json").exists() and any(directory.glob(PATTERN))

    def unknown_keys(self) -> list[str]:
        """Parameters of the actor that the model described by config.json does not have."""
        known = {ROLE + stored.key for stored in stored_slots(self._hf)}
        return [
            key
            for key in self._pieces.global_shapes
            if key.startswith(ROLE) and not key.startswith(f"{ROLE}optimizer.") and key not in known
        ]

    def names(self) -> list[str]:
        return list(self._where)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        stored, index = self._where[name]
        return self._pieces.dtype(ROLE + stored.key), stored.huggingface_shapes(self._hf)[index]

    def __call__(self, name: str) -> Tensor | None:
        if name not in self._where:
            return None
        stored, index = self._where[name]
        if self._last is None or self._last[0] != stored:
            self._last = None  # before the next one is read
            whole = self._read(stored)
            is_fused = len(stored.slot.names) > 1
            self._last = (stored, unshard(stored.slot, [whole], self._hf) if is_fused else [whole])
        return self._last[1][index]

    def release(self) -> None:
        self._last = None
        self._pieces.release()

    def _read(self, stored: StoredSlot) -> Tensor:
        """One parameter in Megatron's layout, a few rows at a time: the pieces are mapped files and
        count as memory.
        """
        key, shape = ROLE + stored.key, stored.shape(self._hf)
        lead = () if stored.layer is None else (stored.layer,)
        whole = torch.empty(shape, dtype=self._pieces.dtype(key))
        rows = max(1, _BYTES_AT_ONCE * shape[0] // whole.nbytes)
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            box = self._pieces.read(
                key,
                (*lead, start, *(0 for _ in shape[1:])),
                (*(1 for _ in lead), count, *shape[1:]),
                dtype=whole.dtype,
                global_shape=_stacked(stored, self._hf),
                allow_padding=stored.slot.layout == "vocab",
            )
            whole[start : start + count] = box.reshape(count, *shape[1:])
            self._pieces.release()
        return whole


def _stacked(stored: StoredSlot, hf: PretrainedConfig) -> tuple[int, ...]:
    """Shape of what is under the key, without padding."""
    return (() if stored.layer is None else (hf.num_hidden_layers,)) + stored.shape(hf)


def verify_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a directory in megatron format. Raises ValueError if a file is not as it was
    written.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        own = manifest.pop("sha256")
        files = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"cannot read {directory / MANIFEST} ({type(error).__name__}); copy the directory again"
        ) from None
    if own != manifest_sha256(manifest):
        raise ValueError(
            f"{directory / MANIFEST} does not have the SHA-256 that it states; copy the directory"
            " again"
        )
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{directory} is no {FORMAT!r} of version {VERSION}; convert it with the program that"
            " wrote it"
        )
    for name, (size, expected) in files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(
                f"{path} is missing or does not have {size} bytes; copy the directory again"
            )
        if describe_file(path)["sha256"] != expected:
            raise ValueError(
                f"{path} does not have the SHA-256 in {MANIFEST}; it is damaged, copy the directory"
                " again"
            )
    if added := sorted({path.name for path in directory.glob(PATTERN)} - files.keys()):
        raise ValueError(f"{directory / added[0]} is not in {MANIFEST}; copy the directory again")
    return manifest


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot read {path}: {error}; the file is missing or damaged, copy it again")
