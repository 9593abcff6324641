"""Runs inside the SGLang server: takes the shards that `sglang_weights` has written, and proves
that they arrived.

The server gets a copy of this file and of `weight_checks.py` beside it, so that it needs torch and
safetensors alone. SGLang calls `load` on every tensor-parallel rank, as the custom weight loader of
`/update_weights_from_tensor`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .weight_checks import check_checksums, check_names, checksums

SAFETENSORS, JSON = ".safetensors", ".json"
"""Suffixes: a file that holds the tensors, or one that says where they stand in a buffer that comes
along.
"""
SUMS, ALL_NAMES, ENTRIES = "sums", "all_names", "entries"
"""Metadata: the checksum of each tensor; in the last file of a set the names of all; of a buffer's
tensors, offset in bytes, dtype and shape."""


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the tensors of files, or of buffers that files describe, into the parameters: (file,
    buffer or empty tensor).

    Never raises, because an exception ends the server: `report_of` each file says what went wrong,
    or that nothing did.
    """
    parameters = dict(model.named_parameters())
    for source, buffer in named_tensors:
        path, error = Path(source), None
        try:
            metadata, tensors = _read(path, buffer)
            _copy(metadata, tensors, parameters)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        report_of(path).write_text(json.dumps({"error": error}))


def report_of(path: Path) -> Path:
    """Where this rank of the server says what became of a file."""
    return path.with_suffix(".report")


def _read(path: Path, buffer: Tensor) -> tuple[dict[str, str], dict[str, Tensor]]:
    if path.suffix == SAFETENSORS:
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    metadata, tensors = json.loads(path.read_text()), {}
    for name, (offset, dtype, shape) in metadata.pop(ENTRIES).items():
        dtype = getattr(torch, dtype.removeprefix("torch."))
        part = buffer[offset : offset + math.prod(shape) * dtype.itemsize]
        tensors[name] = part.view(dtype).view(shape)
    return metadata, tensors


def _copy(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    if unknown := tensors.keys() - parameters.keys():
        raise ValueError(
            f"SGLang's model has no {min(unknown)}; this version lays out its layers differently"
        )
    with torch.no_grad():
        for name, sent in tensors.items():
            parameter = parameters[name]
            if sent.shape != parameter.shape or sent.dtype != parameter.dtype:
                raise ValueError(
                    f"SGLang holds {name} as {list(parameter.shape)} {parameter.dtype} and got"
                    f" {list(sent.shape)} {sent.dtype}"
                )
            parameter.copy_(sent)
    # The sums wait for the device: when the server answers, the buffer has been read.
    check_checksums(
        json.loads(metadata[SUMS]), checksums((name, parameters[name]) for name in tensors)
    )
    if ALL_NAMES in metadata:
        check_names(json.loads(metadata[ALL_NAMES]), parameters)
