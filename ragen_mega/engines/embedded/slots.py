"""The rows of the running batch: tokens, sampling state and cache of every slot, and the two steps
over them.

Everything about a token is addressed by its position in the trajectory, so a step is a handful of
tensor operations over all rows and work per row is only done at the end of a completion.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.embedded import sampling as sampler
from ragen_mega.engines.embedded.decoder import Decoder, Workspace
from ragen_mega.engines.embedded.kv_cache import KVCache, SharedPrefix, shared_length
from ragen_mega.models.shape import ModelShape

_MIN_COPIED = 16
"""A shared beginning has to be this much longer before it is worth waiting for the row that
computes it.
"""
_MAX_PREFILL_PLACES = 1024
"""Padded tokens in one prefill pass; bounds its scores, and longer passes are hardly faster."""


class Prefill(NamedTuple):
    """A request for a slot: the whole trajectory so far, and how to continue it."""

    slot: int
    tokens: NDArray[np.int64]
    sampling: SamplingParams


class _Suffix(NamedTuple):
    """The tokens of a slot whose keys are still to be computed, or the first part of them."""

    slot: int
    start: int
    count: int
    is_whole: bool = True


class _Rows:
    """What is known about every slot; the first index is the slot. Tokens live at their position in
    the trajectory.

    Arrays, not tensors: a step touches a few numbers per row, and small tensor operations cost
    several times as much.
    """

    def __init__(self, num_slots: int, max_context: int, vocab: int, dtype: torch.dtype) -> None:
        places = (num_slots, max_context + 1)  # the last column takes what idle rows sample
        real = np.float64 if dtype == torch.float64 else np.float32
        self.ids = np.zeros(places, dtype=np.int64)
        self.logprobs = np.zeros(places, dtype=real)
        self.uniforms = np.zeros(places)
        # Tokens before the current completion.
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        # Tokens whose keys are cached, and the position of the token that is fed next.
        self.length = np.zeros(num_slots, dtype=np.int64)
        # The completion ends when the trajectory has this many tokens.
        self.limit = np.zeros(num_slots, dtype=np.int64)
        self.running = np.zeros(num_slots, dtype=np.bool_)
        # Its cache is of earlier weights, which no other row may read.
        self.sealed = np.zeros(num_slots, dtype=np.bool_)
        self.inverse_temperature = np.ones(num_slots, dtype=real)
        self.top_p = np.ones(num_slots)
        self.greedy = np.zeros(num_slots, dtype=np.bool_)
        self.stops = np.zeros((num_slots, vocab), dtype=np.bool_)

    def move(self, source: int, target: int) -> None:
        for array in vars(self).values():
            array[target] = array[source]


class SlotTable:
    """Slots [0, n) are in use, whether they run or wait for their environment."""

    @torch.inference_mode()
    def __init__(
        self, shape: ModelShape, *, num_slots: int, max_context: int, dtype: torch.dtype
    ) -> None:
        self._max_context = max_context
        self._rows = _Rows(num_slots, max_context, shape.vocab_size, dtype)
        self._cache = KVCache(shape, num_slots=num_slots, max_context=max_context, dtype=dtype)
        # [slots, V]; in fresh memory every step would fault in all its pages.
        self._logits = torch.empty(num_slots, shape.vocab_size, dtype=dtype)
        self._num_slots = 0
        self.computed_tokens = 0
        """Prompt tokens computed so far; the others were in the cache."""
        self._workspace: Workspace | None = None
        self._prefix: SharedPrefix | None = None
        self._prefix_is_stale = True

    def stop(self, slot: int) -> None:
        """The slot's completion is no longer wanted; its cache stays."""
        self._rows.running[slot] = False

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        """Free a slot; the last slot in use takes its place."""
        self._num_slots -= 1
        last = self._num_slots
        if slot != last:
            self._cache.copy_row(last, slot, int(self._rows.length[last]))
            self._rows.move(last, slot)
        self._rows.length[last] = 0
        self._rows.running[last] = self._rows.sealed[last] = False
        self._prefix_is_stale = True

    def seal(self) -> None:
        """Keep what is cached to the rows that have it: other weights come."""
        self._rows.sealed[: self._num_slots] = True
        self._prefix_is_stale = True

    @torch.inference_mode()
    def decode(self, decoder: Decoder) -> list[tuple[int, Completion]]:
        """Decode one token for every running slot. Returns the completions that end with it."""
        rows, num_rows = self._rows, self._num_slots
        if self._prefix_is_stale:
            length = int(rows.length[:num_rows].min())
            is_sealed = rows.sealed[:num_rows].any()
            self._prefix = None if is_sealed else self._cache.share(rows.ids[:num_rows], length)
            self._prefix_is_stale = False
        index = np.arange(num_rows)
        positions = rows.length[:num_rows].copy()
        attend = self._cache.decode(positions, self._prefix)
        tokens = torch.from_numpy(rows.ids[index, positions])
        if self._workspace is None or self._workspace.num_tokens != num_rows:
            self._workspace = decoder.workspace(num_rows)
        hidden = decoder.forward(
            tokens, torch.from_numpy(positions), attend, workspace=self._workspace
        )
        # Idle rows are computed too, which changes nothing: their token is fed again when their
        # next turn comes.
        rows.length[:num_rows] += rows.running[:num_rows]
        return self._accept(index, decoder.logits(hidden, out=self._logits))

    @torch.inference_mode()
    def prefill(
        self, decoder: Decoder, requests: list[Prefill], *, num_slots: int
    ) -> list[tuple[int, Completion]]:
        """Compute the new tokens of the requests and sample their first. Returns the completions
        that end with it.
        """
        self._prefix_is_stale |= num_slots != self._num_slots
        self._num_slots = num_slots
        finished = []
        while requests:
            suffixes, requests = self._plan(requests)
            for chunk in _chunks(suffixes):
                index = np.array([part.slot for part in chunk])
                starts, counts = (
                    np.array([getattr(part, x) for part in chunk]) for x in ("start", "count")
                )
                row_of_token = np.repeat(index, counts)  # [T]
                positions = np.concatenate(
                    [np.arange(part.start, part.start + part.count) for part in chunk]
                )
                tokens = self._rows.ids[row_of_token, positions]
                self.computed_tokens += len(tokens)
                hidden = decoder.forward(
                    torch.from_numpy(tokens),
                    torch.from_numpy(positions),
                    self._cache.prefill(index, starts, counts),
                    wanted=torch.from_numpy(counts.cumsum() - 1),
                )
                self._rows.length[index] = starts + counts
                if chunk[0].is_whole:
                    finished += self._accept(index, decoder.logits(hidden, out=self._logits))
        return finished

    def _plan(self, requests: list[Prefill]) -> tuple[list[_Suffix], list[Prefill]]:
        """What to compute now, and the requests that wait because another's row will hold their
        prefix.
        """
        suffixes, deferred = [], []
        ids, length, sealed = (
            array[: self._num_slots]
            for array in (self._rows.ids, self._rows.length, self._rows.sealed)
        )
        planned = length.copy()  # cached once the suffixes are computed
        for request in requests:
            source = slot = request.slot
            num_tokens = len(request.tokens)
            cached = int(min(shared_length(ids[slot], request.tokens), length[slot]))
            if cached < length[slot]:  # a changed history: the rest of its cache is nobody's prefix
                length[slot] = planned[slot] = cached
                self._prefix_is_stale = True
            if cached == 0:  # a new trajectory
                shared = shared_length(ids, request.tokens) * ~sealed  # [n]
                reusable = np.minimum(shared, length)
                source = int(reusable.argmax())
                cached = int(reusable[source])
                if np.minimum(shared, planned).max() >= cached + _MIN_COPIED:
                    deferred.append(request)
                    continue
            start = min(cached, num_tokens - 1)  # the last token's logits are always needed
            if source != slot:
                self._cache.copy_row(source, slot, start)
            self._begin(request)
            planned[slot] = num_tokens
            suffixes.append(_Suffix(slot, start, num_tokens - start))
        return suffixes, deferred

    def _begin(self, request: Prefill) -> None:
        """Write the request into its row."""
        rows, (slot, tokens, sampling) = self._rows, request
        limit = min(len(tokens) + sampling.max_tokens, self._max_context)
        rows.ids[slot, : len(tokens)] = tokens
        rows.uniforms[slot, len(tokens) : limit] = sampler.uniforms(
            sampling.seed, limit - len(tokens)
        )
        rows.prompt_length[slot] = len(tokens)
        rows.limit[slot] = limit
        rows.running[slot] = True
        rows.greedy[slot] = sampling.temperature == 0.0
        rows.inverse_temperature[slot] = 1.0 / (sampling.temperature or 1.0)
        rows.top_p[slot] = sampling.top_p
        rows.stops[slot] = False
        rows.stops[slot, list(sampling.stop_token_ids)] = True

    def _accept(self, index: NDArray[np.int64], logits: Tensor) -> list[tuple[int, Completion]]:
        """Sample from logits [m, V] into slots index [m]. Returns the completions that end here."""
        rows = self._rows
        running = rows.running[index]
        positions = np.where(running, rows.length[index], self._max_context)
        sampled, logprobs = sampler.sample(
            logits,
            torch.from_numpy(rows.uniforms[index, positions]),
            inverse_temperature=(
                torch.from_numpy(rows.inverse_temperature[index])
                if (rows.inverse_temperature != 1.0).any()
                else None
            ),
            top_p=torch.from_numpy(rows.top_p[index]) if (rows.top_p < 1.0).any() else None,
            greedy=torch.from_numpy(rows.greedy[index]) if rows.greedy.any() else None,
        )
        tokens = sampled.numpy()
        rows.ids[index, positions] = tokens
        rows.logprobs[index, positions] = logprobs.numpy()
        stopped = rows.stops[index, tokens]
        ended = running & (stopped | (positions + 1 >= rows.limit[index]))
        finished = []
        for place in np.flatnonzero(ended).tolist():
            slot = int(index[place])
            span = slice(rows.prompt_length[slot], rows.length[slot] + 1)
            rows.running[slot] = False
            completion = Completion(
                rows.ids[slot, span].tolist(),
                rows.logprobs[slot, span].tolist(),
                "stop" if stopped[place] else "length",
            )
            finished.append((slot, completion))
        return finished


def _chunks(suffixes: list[_Suffix]) -> Iterator[list[_Suffix]]:
    """Split into passes of similar counts, so that padding to the longest of a pass stays small.

    A suffix too long for one pass is split; its parts come in order, each in a pass of its own.
    """
    chunk: list[_Suffix] = []
    for suffix in sorted(suffixes, key=lambda suffix: suffix.count, reverse=True):
        slot, start, count, _ = suffix
        while count > _MAX_PREFILL_PLACES:
            yield [_Suffix(slot, start, _MAX_PREFILL_PLACES, is_whole=False)]
            start, count = start + _MAX_PREFILL_PLACES, count - _MAX_PREFILL_PLACES
        if chunk and (len(chunk) + 1) * max(chunk[0].count, count) > _MAX_PREFILL_PLACES:
            yield chunk
            chunk = []
        chunk.append(_Suffix(slot, start, count))
    if chunk:
        yield chunk
