"""Rollouts on the disk: one sealed file per step, from which its groups come back exactly as they
were sampled.

    <run>/rollouts/step_00000012.safetensors

The recorded fields of tokens (`data.fields`; log-probabilities in float64, as Python had them),
rewards and seeds are tensors; the infos of turns and the origin of the rollout are JSON, a tensor
of bytes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragen_mega.data.compact import Outlines, outlined, outlines_of
from ragen_mega.data.fields import recorded_fields
from ragen_mega.data.types import Packed, TrajectoryGroup
from ragen_mega.storage.sealed_files import read_sealed, seal, unseal, write_sealed

ROLLOUTS = "rollouts"
FORMAT = 2
_OUTLINES = tuple(f"outline.{name}" for name in Outlines._fields[1:])
_NAME = re.compile(r"step_(\d{8})\.safetensors")
_TUPLE = "tuple"
"""Key under which a tuple is kept: JSON knows lists only. A dictionary with this key alone is kept
under it too.
"""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """The groups of a step and the origin that they were written with."""

    groups: list[TrajectoryGroup]
    origin: dict[str, Any]


class RolloutStore:
    """The rollout files of a run. Not collective: one rank writes, any may read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(
        self, step: int, groups: Sequence[TrajectoryGroup], origin: Mapping[str, Any]
    ) -> None:
        """Write a step's groups to disk. `origin` is what they depend on, as JSON values. Raises
        OSError.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        tensors, turns = _pack(groups)
        facts = {"format": FORMAT, "step": step, "origin": origin, "turns": turns}
        write_sealed(self._path(step), tensors, facts)

    def read(self, step: int) -> StoredRollout:
        """Read the rollout of a step. Raises ValueError if the file is damaged and
        FileNotFoundError if there is none.
        """
        path = self._path(step)
        tensors, facts = read_sealed(path)
        if (facts["format"], facts["step"]) != (FORMAT, step):
            raise ValueError(
                f"{path.name} has format {facts['format']} and step {facts['step']}, not {FORMAT}"
                f" and {step}"
            )
        return StoredRollout(_unpack(tensors, facts["turns"]), facts["origin"])

    def recall(
        self, step: int, origin: Mapping[str, Any], report: Callable[[str], None]
    ) -> list[TrajectoryGroup] | None:
        """Return the groups of a step if they are there and were sampled from the same `origin`;
        `report` says why not.
        """
        try:
            stored = self.read(step)
        except FileNotFoundError:
            return None
        except ValueError as error:
            report(f"step {step}: rollout file is skipped and the step sampled again: {error}")
            return None
        expected = json.loads(json.dumps(origin))
        if stored.origin != expected:
            differing = sorted(
                key
                for key in expected | stored.origin
                if expected.get(key) != stored.origin.get(key)
            )
            report(
                f"step {step}: the stored rollout has another {', '.join(differing)}; the step is"
                " sampled again"
            )
            return None
        return stored.groups

    def prune(self, oldest: int) -> None:
        """Delete the rollouts of steps before `oldest`, and what a killed process left
        unfinished.
        """
        for path in self.directory.glob(".step_*.part"):
            path.unlink()
        for step in self.steps():
            if step < oldest:
                self._path(step).unlink()

    def steps(self) -> list[int]:
        """Return the steps that have a file, ascending."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(int(found[1]) for path in paths if (found := _NAME.fullmatch(path.name)))

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.safetensors"


def sealed_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    """Return groups as a file without a step and an origin would hold them."""
    tensors, turns = _pack(groups)
    return seal(tensors, {"turns": turns})


def groups_of(data: bytes) -> list[TrajectoryGroup]:
    """Return the groups that `sealed_groups` was given. Raises ValueError if bytes have changed."""
    tensors, facts = unseal(data, "a rollout")
    return _unpack(tensors, facts["turns"])


def oldest_kept(step: int, keep: int | None, checkpoints: Iterable[int]) -> int:
    """Return the first step whose rollout stays once the rollout of `step` is there: of the newest
    `keep` (0: of all; None: of the rollouts that a resume from the oldest of the checkpoints
    repeats).
    """
    if keep is None:
        return min(checkpoints, default=0)
    return step + 1 - keep if keep else 0


def _pack(groups: Sequence[TrajectoryGroup]) -> tuple[dict[str, Tensor], list[Any]]:
    """S trajectories of L_s tokens as tensors, and their environments and the infos of turns."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    environments, *arrays = outlines_of(trajectories)
    tensors = dict(zip(_OUTLINES, map(torch.from_numpy, arrays), strict=True))
    sizes = [(group.group_id, len(group.trajectories)) for group in groups]
    tensors["groups"] = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)  # [P, 2]
    for name, row in recorded_fields().items():  # [sum L, ...]; no field is called as an outline
        parts = (row.array(t.token_fields[name]) for t in trajectories)
        tensors[name] = torch.from_numpy(np.concatenate([row.defaults(0), *parts]))
    infos = [[_to_json(dict(turn.info)) for turn in t.turns] for t in trajectories]
    return tensors, [environments, infos]


def _unpack(tensors: Mapping[str, Tensor], facts: Sequence[Any]) -> list[TrajectoryGroup]:
    environments, infos = facts
    arrays = (tensors[name].numpy() for name in _OUTLINES)
    trajectories, rows = outlined(Outlines(environments, *arrays)), recorded_fields()
    spans = list(pairwise(accumulate(map(len, trajectories), initial=0)))
    columns = []
    for name, row in rows.items():
        # a file from before a field was registered gives its defaults
        column = tensors[name].numpy() if name in tensors else row.defaults(spans[-1][1])
        columns.append([Packed(column[start:end]) for start, end in spans])
    for trajectory, facts_of_turns, *recorded in zip(trajectories, infos, *columns, strict=True):
        trajectory.token_fields = dict(zip(rows, recorded, strict=True))
        for turn, info in zip(trajectory.turns, facts_of_turns, strict=True):
            turn.info = _from_json(info)
    rest = iter(trajectories)
    return [
        TrajectoryGroup(group_id, list(islice(rest, size)))
        for group_id, size in tensors["groups"].tolist()
    ]


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _to_json(item) for key, item in value.items()}
        return {_TUPLE: items} if items.keys() == {_TUPLE} else items
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item) for item in value]}
    return [_to_json(item) for item in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            value = value[_TUPLE]
        if isinstance(value, list):
            return tuple(map(_from_json, value))
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
