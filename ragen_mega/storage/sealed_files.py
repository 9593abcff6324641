"""Safetensors files that carry their own checksum: there whole or not at all, private, read without
executing anything.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ragen_mega.storage.integrity import sync, write_whole

_FIELD = b'"sha256":"'  # first field of the header
_FACTS = "facts"
"""The tensor with the facts as JSON in UTF-8: a header of more than 100 MB would be refused."""
_BLANK = b"0" * 64


def seal(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Return tensors, none of them named "facts", and facts (JSON values) as bytes. The SHA-256 in
    the header is the digest of the bytes with 64 zeros in the digest's place.
    """
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    blank = save(contiguous | {_FACTS: text}, {"sha256": _BLANK.decode()})
    digest = hashlib.sha256(blank).hexdigest().encode()
    return blank.replace(_FIELD + _BLANK, _FIELD + digest, 1)


def write_sealed(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write what `seal` returns to `path`; on return it is on disk. Raises OSError, and then leaves
    no new file.
    """
    write_whole(path, seal(tensors, facts))
    sync(path.parent)


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts of a file. Raises ValueError if the file has changed,
    FileNotFoundError if it is not there.
    """
    return unseal(path.read_bytes(), path.name)


def unseal(data: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts that `seal` was given. Raises ValueError, which calls them
    `name`, if they have changed or are of a version that kept facts elsewhere.
    """
    start = data.find(_FIELD) + len(_FIELD)
    digest = data[start : start + len(_BLANK)]
    blank = data[:start] + _BLANK + data[start + len(_BLANK) :]
    if start < len(_FIELD) or hashlib.sha256(blank).hexdigest().encode() != digest:
        raise ValueError(f"{name} does not have the SHA-256 that it states")
    tensors = load(data)
    if _FACTS not in tensors:
        raise ValueError(f"{name} holds no facts: another version of ragen_mega wrote it")
    return tensors, json.loads(tensors.pop(_FACTS).numpy().tobytes())
