"""Messages between ranks that train and ranks that only sample, and their form on the connection:
JSON, behind it the bytes of weights or a rollout as a sealed file has it. Nothing is executed where
they are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ragen_mega.algorithm.tables import PlugInError
from ragen_mega.data.checksums import checksum
from ragen_mega.data.parcels import Parcel
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.rollout.engine import EngineError, Interrupted
from ragen_mega.run.idleness import Usage
from ragen_mega.storage.rollouts import groups_of, sealed_groups

PORTABLE = (FloatingPointError, PlugInError, EngineError, OSError, ValueError)
"""Kinds of errors that one part of the job reports to the other."""
_LENGTH = struct.Struct("<q")
_HOST = torch.device("cpu")
_ERRORS = {kind.__name__: kind for kind in (Interrupted, *PORTABLE)}


@dataclass(frozen=True, slots=True)
class Begin:
    """The trainers are ready."""

    base: str
    """The directory of tokenizer and model configuration."""
    name: str | None
    """Name of the run, if the user gave one."""


@dataclass(frozen=True, slots=True)
class Order:
    """The rollout of a step to sample."""

    rollout: int
    version: int
    """The steps that its weights have been trained for."""
    has_weights: bool
    """Whether messages with the weights come next; else they are the weights of the last order."""
    rollbacks: int = 0
    """Number of times that the trainers had gone back to earlier weights in this process. Orders
    with a smaller number are void, and so are their weights.
    """


@dataclass(frozen=True, slots=True)
class Weights(Parcel):
    """A part of weights: tensors of an order, or of a `Fetch`, whose bytes a group brings."""

    checksum: int
    """Checksum of `memory`."""
    is_last: bool
    rollbacks: int = 0
    """Number of the order, if they follow one on the connection."""

    @classmethod
    def of(
        cls,
        tensors: Sequence[tuple[str, Tensor]],
        *,
        is_last: bool,
        rollbacks: int = 0,
        device: torch.device = _HOST,
    ) -> Weights:
        """Copy tensors into a message whose bytes are on `device`."""
        parcel = Parcel.packed(tensors, device)
        assert parcel.memory is not None  # it was packed here
        return cls(
            parcel.names,
            parcel.dtypes,
            parcel.shapes,
            parcel.memory,
            checksum=checksum(parcel.memory),
            is_last=is_last,
            rollbacks=rollbacks,
        )


@dataclass(frozen=True, slots=True)
class Fetch:
    """The ranks that sample want weights through process groups."""

    group: int
    """Number of the groups; another one than the last after a failure, and then formed anew."""
    version: int
    first: int
    """The first round of parts that they lack, one part from each sender."""
    is_base: bool
    """Whether they want the frozen weights beside which adapters stand."""
    rollbacks: int
    """Number of the order that the weights are for."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A rollout that was sampled."""

    rollout: int
    groups: Sequence[TrajectoryGroup] | None
    """The rollout's groups; only the first rank of the trainers has them, others None."""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rollbacks: int = 0
    """Number of its order."""
    usage: tuple[Usage, ...] = ()
    """Usage by each rank that samples, since the delivery before."""


@dataclass(frozen=True, slots=True)
class End:
    """The trainers have ended."""

    exit_code: int


def encode(message: Begin | Order | Weights | Fetch | Delivery | End | Exception) -> bytes:
    """Return a message as bytes. An error becomes the first of its kinds that `decode` knows."""
    data: bytes | None = None
    about: dict[str, Any]
    if isinstance(message, Exception):
        kind = next(name for name, kind in _ERRORS.items() if isinstance(message, kind))
        about = {"text": str(message)}
    else:
        kind = type(message).__name__
        about = {each.name: getattr(message, each.name) for each in fields(message)}
    if isinstance(message, Weights):
        memory: Tensor | None = about.pop("memory")
        data = None if memory is None else memory.numpy().tobytes()
    elif isinstance(message, Delivery):
        data = sealed_groups(about.pop("groups"))
    head = json.dumps([kind, about, data is not None]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, data or b""))


def decode(frame: bytes | bytearray) -> Any:
    """Return the message that `encode` was given: each part of the job knows which kinds the other
    sends. Raises ValueError if the bytes are none.
    """
    try:
        (length,) = _LENGTH.unpack_from(frame)
        start = _LENGTH.size + length
        kind, about, has_data = json.loads(frame[_LENGTH.size : start])  # ValueError
        if kind == "Weights":
            data = memoryview(frame)[start:]
            return _weights(data, about) if has_data else Weights(memory=None, **about)
        content = bytes(frame[start:]) if has_data else b""
        if kind in _ERRORS:
            return _ERRORS[kind](about["text"])
        if kind == "Delivery":
            about["usage"] = tuple(Usage(*each) for each in about["usage"])
            about["notes"] = tuple(about["notes"])
            return Delivery(groups=groups_of(content), **about)
        return {"Begin": Begin, "Order": Order, "Fetch": Fetch, "End": End}[kind](**about)
    except (TypeError, KeyError, AttributeError, struct.error) as error:
        raise ValueError(f"a message between the parts of the job is damaged: {error}") from None


def _weights(data: memoryview, about: dict[str, Any]) -> Weights:
    """Return a part of weights. Raises ValueError unless it is the part that was sent."""
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    weights = Weights(memory=memory, **about)
    if sum(weights.sizes) != len(memory) or checksum(memory) != weights.checksum:
        raise ValueError(
            f"the weights from {weights.names[0]} on, {len(memory)} bytes, have changed on their"
            " way to the ranks that sample; --resume goes on from the last checkpoint"
        )
    return weights
