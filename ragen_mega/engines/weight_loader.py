"""Runs inside the SGLang server: takes the shards that `sglang_weights` has written, and proves that they arrived.

The server gets a copy of this file and of `weight_checks.py` beside it, so that it needs torch and safetensors alone. SGLang
calls `load` on every tensor-parallel rank, as the custom weight loader of `/update_weights_from_tensor`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .weight_checks import check_checksums, check_names, checksums

SUMS, ALL_NAMES = "sums", "all_names"
"""Metadata of a file: the checksum of each of its tensors; in the last file of a set also the names of all, else absent."""


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the files that `named_tensors` names into the parameters; the tensors themselves are empty.

    Never raises, because an exception ends the server: `report_of` each file says what went wrong, or that nothing did.
    """
    parameters = dict(model.named_parameters())
    for source, _ in named_tensors:
        path, error = Path(source), None
        try:
            _load_file(parameters, path)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        report_of(path).write_text(json.dumps({"error": error}))


def report_of(path: Path) -> Path:
    """Where this rank of the server says what became of a file."""
    return path.with_suffix(".report")


def _load_file(parameters: Mapping[str, nn.Parameter], path: Path) -> None:
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata()
        sums = json.loads(metadata[SUMS])
        if unknown := sums.keys() - parameters.keys():
            raise ValueError(f"SGLang's model has no {min(unknown)}; this version lays out its layers differently")
        with torch.no_grad():
            for name in sums:
                sent, parameter = file.get_tensor(name), parameters[name]
                if sent.shape != parameter.shape or sent.dtype != parameter.dtype:
                    raise ValueError(
                        f"SGLang holds {name} as {list(parameter.shape)} {parameter.dtype} and got {list(sent.shape)} {sent.dtype}"
                    )
                parameter.copy_(sent)
    check_checksums(sums, checksums((name, parameters[name]) for name in sums))
    if ALL_NAMES in metadata:
        check_names(json.loads(metadata[ALL_NAMES]), parameters)
