"""Messages between ranks that train and ranks that only sample, and their form on the connection:
JSON, behind it weights as safetensors or a rollout as a sealed file has it. Nothing is executed
where they are read.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ragen_mega.algorithm.tables import PlugInError
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.rollout.engine import EngineError, Interrupted
from ragen_mega.run.idleness import Usage
from ragen_mega.storage.rollouts import groups_of, sealed_groups

PORTABLE = (FloatingPointError, PlugInError, EngineError, OSError, ValueError)
"""Kinds of errors that one part of the job reports to the other."""
_LENGTH = struct.Struct("<q")
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
    weights: bytes | None
    """Weights as safetensors; None stands for the weights of the last order."""
    rollbacks: int = 0
    """Number of times that the trainers had gone back to earlier weights in this process. Orders
    with a smaller number are void.
    """


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


def encode(message: Begin | Order | Delivery | End | Exception) -> bytes:
    """Return a message as bytes. An error becomes the first of its kinds that `decode` knows."""
    data: bytes | None = None
    about: dict[str, Any]
    if isinstance(message, Exception):
        kind = next(name for name, kind in _ERRORS.items() if isinstance(message, kind))
        about = {"text": str(message)}
    else:
        kind = type(message).__name__
        about = {each.name: getattr(message, each.name) for each in fields(message)}
    if isinstance(message, Order):
        data = about.pop("weights")
    elif isinstance(message, Delivery):
        data = sealed_groups(about.pop("groups"))
    head = json.dumps([kind, about, data is not None]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, data or b""))


def decode(frame: bytes) -> Any:
    """Return the message that `encode` was given: each part of the job knows which kinds the other
    sends. Raises ValueError if the bytes are none.
    """
    try:
        (length,) = _LENGTH.unpack_from(frame)
        start = _LENGTH.size + length
        kind, about, has_data = json.loads(frame[_LENGTH.size : start])  # ValueError
        data = frame[start:] if has_data else None
        if kind in _ERRORS:
            return _ERRORS[kind](about["text"])
        if kind == "Order":
            return Order(weights=data, **about)
        if kind == "Delivery":
            about["usage"] = tuple(Usage(*each) for each in about["usage"])
            about["notes"] = tuple(about["notes"])
            return Delivery(groups=groups_of(data or b""), **about)
        return {"Begin": Begin, "End": End}[kind](**about)
    except (TypeError, KeyError, AttributeError, struct.error) as error:
        raise ValueError(f"a message between the parts of the job is damaged: {error}") from None
