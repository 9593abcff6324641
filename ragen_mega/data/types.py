"""The data that flows through a StarPO step: completion -> turn -> trajectory -> group -> token
batch.

Tokens, log-probabilities and mask are recorded when they are sampled and only ever appended to;
nothing here is re-tokenised or re-derived from text. Source of the vocabulary: StarPO,
arXiv:2504.20073, section 3.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.data.fields import TOKEN_FIELDS, recorded_fields
from ragen_mega.data.forest import Forest

VERSION = "weight_version"
"""Key in the info of a turn that was sampled under other weights than the first of its trajectory:
their version.
"""
CALL = "call"
"""Key in the info of an agent's turn: the record of the call and of its answer."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which one completion is drawn. Log-probabilities are reported after
    `temperature`, before `top_p`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Seed of this completion alone, so that the sample does not depend on what else is in the
    batch.
    """
    num_recorded: int = 0
    """Number of first tokens of the prompt for which the caller has the recorded fields."""

    def check(self, tokens: Sequence[int], *, vocab: int) -> None:
        """Raise ValueError if no completion of `tokens` can be drawn like this."""
        for holds, message in (
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (
                0.0 <= self.temperature < math.inf,
                f"temperature must be finite and >= 0 (0: greedy), not {self.temperature}",
            ),
            (
                0.0 < self.top_p <= 1.0,
                f"top_p must lie in (0, 1] (1: the whole distribution), not {self.top_p}",
            ),
            (self.seed >= 0, f"a sampling seed must be a non-negative integer, not {self.seed}"),
            (tokens, "generate needs at least one token to continue; render a prompt first"),
        ):
            if not holds:
                raise ValueError(message)
        for what, ids in (("token ids", tokens), ("stop_token_ids", self.stop_token_ids)):
            if ids and (min(ids) < 0 or max(ids) >= vocab):
                raise ValueError(
                    f"{what} must lie in [0, {vocab}), not in [{min(ids)}, {max(ids)}]; check that"
                    " the tokenizer belongs to the model"
                )


@dataclass(frozen=True, slots=True)
class Completion:
    """One engine answer: A sampled tokens, the stop token included when it was sampled."""

    tokens: list[int]  # [A]
    logprobs: list[float]  # [A] log mu(token) under the rollout policy, after temperature
    finish_reason: Literal["stop", "length", "abort"]
    further_fields: Mapping[str, Any] = field(default_factory=dict)
    """Name of a recorded field (`fields.TOKEN_FIELDS`) -> its values [A, ...]; without values the
    tokens have its default.
    """
    prompt_fields: Mapping[str, Any] = field(default_factory=dict)
    """Name of a recorded field -> its values [n, ...] for the last n tokens of the prompt: those
    behind `SamplingParams.num_recorded`.
    """


@dataclass(slots=True)
class Turn:
    """The span [start, end) of `Trajectory.tokens` that the policy sampled in one turn, and what it
    earned.
    """

    start: int
    end: int
    reward: float = 0.0  # environment reward of the turn, format penalty included
    info: dict[str, Any] = field(default_factory=dict)  # success, is_format_valid, num_actions, ...


@dataclass(frozen=True, slots=True)
class Elsewhere(Sequence[Any]):
    """Stands for values of a trajectory that another rank holds: only their number is known."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self[:]

    def __getitem__(self, index: object) -> Any:
        raise LookupError(
            f"these {self.length} tokens are on another rank; what needs all tokens runs on rank 0"
            " before the filter, or declares reads_tokens"
        )


class Packed(Sequence[Any]):
    """Values in an array, read as from a list: an eighth of its memory, and nothing to build."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray) -> None:
        self.array = array

    def extend(self, values: Any) -> None:
        """Append values [n, ...]."""
        more = np.asarray(values, self.array.dtype).reshape(-1, *self.array.shape[1:])
        self.array = np.concatenate([self.array, more])

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int | slice) -> Any:
        return self.array[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Packed)) and self[:] == other[:]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def __repr__(self) -> str:
        return repr(self[:])


def _no_values() -> dict[str, Sequence[Any]]:
    """Return the further fields of a trajectory without tokens."""
    rows = recorded_fields().items()
    return {name: Packed(row.defaults(0)) for name, row in rows if name not in Trajectory.__slots__}


@dataclass(slots=True)
class Trajectory:
    """One episode as the token sequence that the policy saw and sampled. Append-only.

    Two turns, observation O and action A:

        tokens            O0 O0 O0  A0 A0  O1 O1  A1
        loss_mask          0  0  0   1  1   0  0   1
        rollout_logprobs   0  0  0  -1 -2   0  0  -1
        turns             [Turn(3, 5), Turn(7, 8)]

    Tokens, mask and log-probabilities are lists while the trajectory is played. They are `Packed`
    when they come from another rank or from a file, and `Elsewhere` while another rank holds them.

    If the policy sees only a window of its turns, or if its calls are a tree, the prompt of a turn
    need not continue the previous one. It then starts a new segment, in which earlier answers are
    context like any other.
    """

    group_id: int
    """Number that trajectories from the same initial state share."""
    environment: str = ""
    seed: int = 0
    outcome_seed: int = 0
    weight_version: int = 0
    tokens: list[int] = field(default_factory=list)  # [L]
    loss_mask: list[bool] = field(default_factory=list)  # [L] True where the policy sampled
    rollout_logprobs: list[float] = field(default_factory=list)  # [L] 0.0 where loss_mask is False
    turns: list[Turn] = field(default_factory=list)  # [<= K]
    breaks: list[int] = field(default_factory=list)  # where segments start, besides the first
    terminated: bool = False
    """Whether the task ended: solved, lost, or nothing left to do."""
    truncated: bool = False
    """Whether turns, actions or context ran out before the task ended."""
    is_tree: bool = False
    """Whether segments are branches of a tree of calls, not windows of one conversation."""
    rank: int = field(default=0, compare=False)
    """Rank on which the trajectory was sampled."""
    further_fields: dict[str, Sequence[Any]] = field(default_factory=_no_values)
    """Name -> values [L, ...] of each recorded field (`fields.TOKEN_FIELDS`) that is no attribute.
    """

    @property
    def token_fields(self) -> dict[str, Sequence[Any]]:
        """Name -> values [L, ...] of every recorded field."""
        further = self.further_fields
        return {
            name: further[name] if name in further else getattr(self, name)
            for name in recorded_fields()
        }

    @token_fields.setter
    def token_fields(self, values: Mapping[str, Sequence[Any]]) -> None:
        further = {name for name in values if name not in self.__slots__}
        for name in values.keys() - further:
            setattr(self, name, values[name])
        self.further_fields = {name: values[name] for name in further}

    @property
    def is_held(self) -> bool:
        """Whether this rank has the tokens and what was recorded with them."""
        return not isinstance(self.tokens, Elsewhere)

    @property
    def first_prompt(self) -> tuple[int, ...]:
        """Prompt of the first turn."""
        return self.prompt(self.first_turn)

    @property
    def first_turn(self) -> Turn:
        """The turn that was asked for first. Turns of a tree are in the order of their tokens."""
        return min(self.turns, key=lambda turn: turn.info.get(CALL, {}).get("index", 0))

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Return the tokens of the turn's segment before it."""
        starts = (0, *self.breaks)
        return tuple(self.tokens[starts[bisect_right(starts, turn.start) - 1] : turn.start])

    def release(self, length: int | None = None) -> None:
        """Drop what was recorded with the tokens, `length` of them (None: as many as are held)."""
        absent = Elsewhere(len(self) if length is None else length)
        self.token_fields = dict.fromkeys(recorded_fields(), absent)

    def behind(self, prompt: Sequence[int]) -> Trajectory:
        """Return the same turns behind another first prompt, without further fields. It is held
        where the trajectory is.
        """
        first = self.turns[0].start
        shift = len(prompt) - first
        turns = [replace(t, start=t.start + shift, end=t.end + shift) for t in self.turns]
        moved = replace(self, turns=turns, breaks=[each + shift for each in self.breaks])
        if not self.is_held:
            moved.release(len(self) + shift)
            return moved
        moved.token_fields = {
            name: Packed(row.defaults(len(self) + shift)) for name, row in recorded_fields().items()
        }
        moved.tokens = [*prompt, *self.tokens[first:]]
        return moved

    def append_observation(self, tokens: Sequence[int], *, afresh: bool = False) -> None:
        """Append tokens that the policy did not sample: prompt, observation, chat markers, a forced
        `<think>`. `afresh`: they are the whole prompt of what comes next, and start a segment.
        """
        if afresh and self.tokens:
            self.breaks.append(len(self))
        self._append({"tokens": tokens})

    def append_action(self, completion: Completion) -> Turn:
        """Append one sampled completion as a new turn, and give the prompt its fields. Raises
        ValueError if a token lacks its log-probability, or the value of a further field that is
        given.
        """
        start, size = len(self), len(completion.tokens)
        self._append_completion(
            completion, loss_mask=[True] * size, rollout_logprobs=completion.logprobs
        )
        self.turns.append(Turn(start, start + size))
        return self.turns[-1]

    def append_context(self, completion: Completion) -> None:
        """Append a completion outside the loss mask: an answer that is context, or not trained."""
        self._append_completion(completion)

    def _append_completion(self, completion: Completion, **recorded: Sequence[Any]) -> None:
        recorded |= completion.further_fields
        for name, values in recorded.items():
            found, shape = np.shape(values), (len(completion.tokens), *TOKEN_FIELDS[name].shape)
            if found != shape:
                raise ValueError(
                    "every sampled token needs its log-probability and further fields:"
                    f" {name} must have the shape {list(shape)}, not {list(found)}; check the"
                    " rollout engine"
                )
        for name, values in completion.prompt_fields.items():
            held = self.further_fields[name]
            assert isinstance(held, Packed)  # it is played on this rank
            held.array[len(held) - len(values) :] = values
        self._append({"tokens": completion.tokens, **recorded})

    def _append(self, given: Mapping[str, Sequence[Any]]) -> None:
        """Append tokens with the values of their recorded fields, of others the defaults."""
        for name, values in self.token_fields.items():
            more: Sequence[Any] | NDArray | None = given.get(name)
            if more is None:
                more = TOKEN_FIELDS[name].defaults(len(given["tokens"]))
                more = more if isinstance(values, Packed) else more.tolist()
            assert isinstance(values, (list, Packed))  # it is played on this rank
            values.extend(more)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Spans of `tokens` that the policy saw as one text each, in order."""
        return list(pairwise((0, *self.breaks, len(self))))

    @property
    def total_reward(self) -> float:
        """R(tau): undiscounted sum of turn rewards, the quantity that the StarPO-S filter ranks
        (Eq. 7).
        """
        return sum(turn.reward for turn in self.turns)

    @property
    def versions(self) -> list[int]:
        """Versions [K] of the weights that sampled each turn."""
        return [turn.info.get(VERSION, self.weight_version) for turn in self.turns]

    @property
    def success(self) -> bool:
        return bool(self.turns) and bool(self.turns[-1].info.get("success", False))

    @property
    def num_sampled_tokens(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class TrajectoryGroup:
    """The N trajectories sampled from one initial state."""

    group_id: int
    trajectories: list[Trajectory]

    @property
    def total_rewards(self) -> list[float]:
        return [trajectory.total_reward for trajectory in self.trajectories]


def in_groups(trajectories: Iterable[Trajectory]) -> list[TrajectoryGroup]:
    """Return the groups of the trajectories, in order of the first member."""
    groups: dict[int, TrajectoryGroup] = {}
    for trajectory in trajectories:
        group = groups.setdefault(trajectory.group_id, TrajectoryGroup(trajectory.group_id, []))
        group.trajectories.append(trajectory)
    return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """S trajectories packed into T positions; position t predicts `labels[t]`, every [T] field is
    about `labels[t]`.

    Position t holds `tokens[t]`. The last token of a segment (mostly: of a trajectory, see
    `Trajectory`) is only ever a label, so a segment of L tokens takes L - 1 positions. `cu_seqlens`
    delimits the trajectories; positions behind `cu_seqlens[S]`, if any, are padding.
    """

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64, tokens shifted by one inside each trajectory
    position_ids: Tensor  # [T] int64, restart at 0 with each segment
    cu_seqlens: Tensor  # [S + 1] int32
    loss_mask: Tensor  # [T] bool, True where the policy sampled labels[t]
    turn_ids: Tensor  # [T] int32, turn of labels[t], -1 where it was not sampled
    rewards: Tensor  # [T] float32, nonzero only on the last sampled label of a turn
    group_ids: Tensor  # [S] int64
    cu_segments: Tensor | None = None
    """[G + 1] int32 offsets of the segments; None: every trajectory is one. A token attends to its
    segment alone; rewards, advantages and statistics are the trajectory's.
    """
    here: Tensor | None = None
    """[S] bool, which trajectories this data-parallel rank computes; it lacks tokens, labels and
    engine's log-probabilities of the others. None: every rank has all.
    """
    rollout_logprobs: Tensor  # [T] float32
    old_logprobs: Tensor | None = None  # [T] float32, under the weights at the start of the update
    entropies: Tensor | None = None  # [T] float32, nats, of what labels[t] was drawn from
    ref_logprobs: Tensor | None = None  # [T] float32, under the frozen reference policy
    teacher_log_ratios: Tensor | None = None
    """[T] float32, log-probability of labels[t] under the teacher less that under the weights at
    the start of the update.
    """
    values: Tensor | None = None  # [T] float32, of the state before labels[t]
    advantages: Tensor | None = None  # [T] float32
    returns: Tensor | None = None  # [T] float32, regression target of the critic
    weights: Tensor | None = None
    """[T] float32 share of each token in the loss: mask, aggregation mode and global normaliser
    folded in.
    """
    further_fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> values [T, ...] of each field of `fields.TOKEN_FIELDS` that is no attribute."""

    def __post_init__(self) -> None:
        self._check(dict(self.tensors()))
        if len(self.group_ids) != self.num_trajectories:
            raise ValueError(
                f"{self.num_trajectories} trajectories but {len(self.group_ids)} group ids"
            )
        if self.cu_seqlens.dtype != torch.int32 or (
            not self.cu_seqlens.is_cuda and int(self.cu_seqlens[-1]) > self.num_positions
        ):
            raise ValueError(
                f"cu_seqlens must be int32 offsets into {self.num_positions} positions, not"
                f" {self.cu_seqlens.dtype} ending at {int(self.cu_seqlens[-1])}"
            )

    def _check(self, given: dict[str, Tensor]) -> None:
        """Check shape and dtype of [T] fields and, in host memory, that they are finite under the
        mask: data enters there, and on a device the host would have to wait.
        """
        for name, value in given.items():
            if (row := TOKEN_FIELDS.get(name)) is None:
                continue
            dtype, shape = row.dtype, (self.num_positions, *row.shape)
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(
                    f"TokenBatch.{name} must be {dtype} of shape {list(shape)}, not"
                    f" {value.dtype} of shape {list(value.shape)}"
                )
            if dtype != torch.float32 or value.is_cuda or torch.isfinite(value).all():
                continue
            if not torch.isfinite(value[self.loss_mask]).all():
                raise FloatingPointError(
                    f"TokenBatch.{name} has a non-finite value on a sampled token"
                )

    def _with(self, **changes: Any) -> TokenBatch:
        """Return a copy with other fields, which come from checked ones and are not checked."""
        changed = copy(self)
        own = arguments_of(changes)
        further = {**self.further_fields, **own.pop("further_fields")}
        for name, value in (own | {"further_fields": further}).items():
            object.__setattr__(changed, name, value)
        return changed

    @property
    def num_trajectories(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:  # [S]
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def with_fields(self, **tensors: Tensor) -> TokenBatch:
        """Return a copy with the named [T] fields set; shape, dtype and finiteness are checked."""
        given = {name: value.to(TOKEN_FIELDS[name].dtype) for name, value in tensors.items()}
        changed = self._with(**given)
        # numbers that were hidden may be under a new mask
        changed._check(dict(changed.tensors()) if "loss_mask" in given else given)
        return changed

    def without(self, name: str) -> TokenBatch:
        """Return a copy that lacks a further field."""
        changed = copy(self)
        left = {key: value for key, value in self.further_fields.items() if key != name}
        object.__setattr__(changed, "further_fields", left)
        return changed

    def positions(self, trajectory_ids: Sequence[int]) -> Tensor:
        """Return the positions of the given trajectories, in the given order, as an index."""
        ids = torch.tensor(list(trajectory_ids), dtype=torch.int64)
        return ranges(self.cu_seqlens[ids], self.lengths[ids])

    def select(self, trajectory_ids: Sequence[int]) -> TokenBatch:
        """Return the batch of the given trajectories, in the given order, without padding."""
        positions, ids = self.positions(trajectory_ids), torch.tensor(list(trajectory_ids))
        selected = {
            name: value[positions] for name, value in self.tensors() if name in TOKEN_FIELDS
        }
        if self.cu_segments is not None:
            starts = torch.zeros(self.num_positions + 1, dtype=torch.int32)
            starts[self.cu_segments.long()] = 1
            found = starts[positions].nonzero()[:, 0]
            selected["cu_segments"] = torch.cat([found, found.new_tensor([len(positions)])]).int()
        if self.here is not None:
            selected["here"] = self.here[ids]
        return self._with(
            cu_seqlens=offsets_of(self.lengths[ids]),
            group_ids=self.group_ids[ids],
            **selected,
        )

    def at(self, kept: Tensor) -> TokenBatch:
        """Return the batch of the positions under a mask [T], of the same trajectories, each of
        which is one segment.
        """
        selected = {name: value[kept] for name, value in self.tensors() if name in TOKEN_FIELDS}
        return self._with(cu_seqlens=offsets_of(counts_of(kept, self.cu_seqlens)), **selected)

    def by_segment(self) -> TokenBatch:
        """Return the same positions as a batch of segments, for computations that treat each
        segment by itself.
        """
        if self.cu_segments is None:
            return self
        num_segments = torch.bucketize(self.cu_seqlens, self.cu_segments).diff()
        return self._with(
            cu_seqlens=self.cu_segments,
            cu_segments=None,
            group_ids=self.group_ids.repeat_interleave(num_segments),
            here=None if self.here is None else self.here.repeat_interleave(num_segments),
        )

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on `device`; on the way to CUDA the host does not wait."""
        return self._with(**{name: move(value, device) for name, value in self.tensors()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (field name, tensor) of every field that is set."""
        for item in fields(self):
            if isinstance(value := getattr(self, item.name), Tensor):
                yield item.name, value
        yield from self.further_fields.items()


class Edges(NamedTuple):
    """The E distinct pairs of a node and a label in rows of a microbatch. The LM head computes each
    pair once for all rows that have it.
    """

    nodes: Tensor  # [E] int64
    labels: Tensor  # [E] int64
    repeats: Tensor
    """[E] int64 number of rows that have each pair, in host memory."""
    of_row: Tensor  # [M] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch(TokenBatch):
    """The input of one forward pass, on its device, with the facts that the host must know about
    it, so that the host never has to ask the device.

    The model goes through the N nodes of `forest`: the distinct among the T positions, and padding.
    Further fields of inputs have values [N, ...] of nodes, 0 of padding.
    """

    forest: Forest
    batch_positions: Tensor
    """[T] int64 where the positions are in the batch, in host memory."""
    input_ids: Tensor  # [N] int64
    depths: Tensor  # [N] int64, position ids of the nodes
    sources: Tensor | None
    """[T] int64 node of each position; None: position t is node t."""
    rows: Tensor
    """[M] int64 positions that have a weight (without weights those under the mask), in the order
    of `edges`, else ascending.
    """
    edges: Edges | None
    """None where no position is shared: then each row is one."""

    def __post_init__(self) -> None:
        """Nothing to check: it consists of parts of a batch."""

    def per_position(self, values: Tensor) -> Tensor:
        """Return the values [T] of positions for values [N] of nodes."""
        if self.sources is None:
            return values[: self.num_positions]
        return values.index_select(0, self.sources)

    def per_row(self, values: Tensor) -> Tensor:
        """Return the values [M] of rows for values [E] of edges."""
        return values if self.edges is None else values.index_select(0, self.edges.of_row)


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `TokenBatch` that hold the named values: those that are no attribute
    together as `further_fields`.
    """
    declared = TokenBatch.__slots__
    further = {name: value for name, value in values.items() if name not in declared}
    own = {name: value for name, value in values.items() if name in declared}
    return own | {"further_fields": further}


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. Towards CUDA it goes through pinned memory and the host does
    not wait.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the offsets [S + 1] int32 for lengths [S], as `TokenBatch.cu_seqlens` has them."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return [sum of lengths] int64: from each start [S] on as many integers as its length [S]
    says. They are in host memory, by numpy, which takes a fraction of torch's time for few
    positions.
    """
    ends = np.cumsum(sizes := lengths.numpy())  # in the result
    ahead = np.repeat(starts.numpy() - ends + sizes, sizes)
    return torch.from_numpy(ahead + np.arange(len(ahead)))


def counts_of(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the number [S] int64 of positions of each trajectory under a mask [T]."""
    return torch.nn.functional.pad(mask.cumsum(0), (1, 0))[cu_seqlens.long()].diff()
