"""Pieces of large tensors in safetensors files, one file per rank: any region can be read,
however the tensor was cut when written.

A file says in its header which piece of which tensor each entry is, so that it holds everything a
reader needs, and reading executes nothing (PyTorch's own distributed format keeps that information
in a pickle).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ragen_mega.storage.integrity import sync, system_error

PATTERN = "rank_*.safetensors"
HEADER = "pieces"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of safetensors -> the types that weights have."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the tensor `key`: `data` starts at `offset` in `global_shape`; all three have
    the same number of dimensions.
    """

    key: str
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def file_name(rank: int) -> str:
    """Name of the file that `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write the pieces, host tensors that share no memory, to `path` and wait until they are
    on disk.
    """
    named = {f"{index:05d}": piece for index, piece in enumerate(pieces)}
    tensors = {name: piece.data for name, piece in named.items()}
    header = {
        name: {"key": piece.key, "offset": piece.offset, "global_shape": piece.global_shape}
        for name, piece in named.items()
    }
    try:
        save_file(tensors, path, metadata={HEADER: json.dumps(header)})
    except SafetensorError as error:  # raised on a full disk
        other = OSError(f"cannot write {path}: {error}")
        raise system_error(error, path) or other from None
    sync(path)


class MappedFiles(dict[Path, safe_open]):
    """Safetensors files by their paths, mapped on first use. Raises ValueError if
    one cannot be read.
    """

    def __missing__(self, path: Path) -> safe_open:
        try:
            self[path] = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"cannot read {path}: {error}; the file is missing or damaged, copy it again or use"
                " another checkpoint"
            ) from None
        return self[path]


class PieceReader:
    """Random access to the tensors whose pieces lie in the files of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.global_shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Stored]] = {}
        self._files = MappedFiles()
        for path in sorted(directory.glob(PATTERN)):
            file = self._files[path]
            try:
                header = json.loads(file.metadata()[HEADER])
                for name, piece in header.items():
                    shape = tuple(file.get_slice(name).get_shape())
                    stored = _Stored(path, name, tuple(piece["offset"]), shape)
                    self._pieces.setdefault(piece["key"], []).append(stored)
                    self.global_shapes[piece["key"]] = tuple(piece["global_shape"])
            except (SafetensorError, TypeError, KeyError, ValueError) as error:
                raise ValueError(
                    f"cannot read {path} ({error}); the checkpoint is damaged, use an earlier one"
                ) from None

    def release(self) -> None:
        """Unmap the files; what is read next maps them again."""
        self._files.clear()

    def dtype(self, key: str) -> torch.dtype:
        """Return the type in which `key` is stored."""
        stored = self._pieces[key][0]
        nothing = (slice(0, 0),) * len(stored.shape)
        return self._files[stored.path].get_slice(stored.name)[nothing].dtype

    def read(
        self,
        key: str,
        offset: Sequence[int],
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        global_shape: Sequence[int],
        allow_padding: bool = False,
    ) -> Tensor:
        """Return the box of `key` that starts at `offset` and has `shape`. With `allow_padding`
        what lies outside is zero.

        Raises ValueError if the tensor is missing, incomplete, or of another global shape or type
        than asked for.
        """
        if key not in self._pieces:
            raise ValueError(
                f"the checkpoint {self.directory} lacks {key}; resume with the model, estimator and"
                " precision it was written with"
            )
        stored_shape = self.global_shapes[key]
        if stored_shape != tuple(global_shape) and not allow_padding:
            raise ValueError(
                f"{key} has shape {list(stored_shape)} in the checkpoint {self.directory} and"
                f" {list(global_shape)} here; resume with the model it was written with"
            )
        result = torch.zeros(tuple(shape), dtype=dtype)
        end = [start + size for start, size in zip(offset, shape)]
        num_read = 0
        for piece in self._pieces[key]:
            low = [max(a, b) for a, b in zip(offset, piece.offset)]
            high = [min(a, b + size) for a, b, size in zip(end, piece.offset, piece.shape)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            source = tuple(
                slice(a - start, b - start) for a, b, start in zip(low, high, piece.offset)
            )
            target = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, offset))
            data = self._files[piece.path].get_slice(piece.name)[source]
            if data.dtype != dtype:
                raise ValueError(
                    f"{key} is {data.dtype} in the checkpoint {self.directory} and {dtype} here; "
                    "resume with the precision it was written with"
                )
            result[target] = data
            num_read += data.numel()
        expected = math.prod(
            max(0, min(a, size) - start) for a, size, start in zip(end, stored_shape, offset)
        )
        if num_read != expected:
            raise ValueError(
                f"the checkpoint {self.directory} holds {num_read} of {expected} elements asked for"
                f" of {key}; it is incomplete, use an earlier one"
            )
        return result
