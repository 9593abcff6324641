"""The rows of the running batch: tokens, sampling state and cache of every slot, and the two steps
over them.

Everything about a token is addressed by its position in the trajectory, so a step is a handful of
array operations over all rows and work per row is only done at the end of a completion.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.data.fields import routes_of_completion
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.embedded import sampling as sampler
from ragen_mega.engines.embedded.decoder import Decoder, Workspace
from ragen_mega.engines.embedded.kernels import BLOCK
from ragen_mega.engines.embedded.kv_cache import KVCache, shared_length
from ragen_mega.models.shape import ModelShape

_MIN_SHARED = 16
"""The beginning that another row holds has to be this much longer before it is worth taking, or
waiting for.
"""
_MAX_PREFILL_TOKENS = 1024
"""Most tokens of one prefill pass; the limit bounds its memory, and longer passes are hardly
faster.
"""


class Prefill(NamedTuple):
    """A request for a slot: the whole trajectory so far, and how to continue it."""

    slot: int
    tokens: NDArray[np.int64]
    sampling: SamplingParams


class _Suffix(NamedTuple):
    """The tokens of a slot whose keys are still to be computed, or the first of these tokens."""

    slot: int
    start: int
    length: int
    is_whole: bool = True


class _Rows:
    """State of every slot; the first index is the slot. Tokens live at their position in the
    trajectory.

    Arrays, not tensors: a step touches a few numbers per row, and small tensor operations cost
    several times as much.
    """

    def __init__(self, num_slots: int, max_context: int, vocab: int, dtype: torch.dtype) -> None:
        places = (num_slots, max_context)
        self.real: type[np.float32] | type[np.float64] = (
            np.float64 if dtype == torch.float64 else np.float32
        )
        self.ids = np.zeros(places, dtype=np.int64)
        self.logprobs = np.zeros(places, dtype=self.real)
        self.uniforms = np.zeros(places)
        # Tokens before the current completion, and the first of them whose routes the caller has.
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        self.num_recorded = np.zeros(num_slots, dtype=np.int64)
        # Tokens whose keys are cached, and the position of the token that is fed next.
        self.length = np.zeros(num_slots, dtype=np.int64)
        # The completion ends when the trajectory has this many tokens.
        self.limit = np.zeros(num_slots, dtype=np.int64)
        self.running = np.zeros(num_slots, dtype=np.bool_)
        # Its cache is of earlier weights, which no other row may read.
        self.sealed = np.zeros(num_slots, dtype=np.bool_)
        self.inverse_temperature = np.ones(num_slots, dtype=self.real)
        self.top_p = np.ones(num_slots)
        self.greedy = np.zeros(num_slots, dtype=np.bool_)
        self.stops = np.zeros((num_slots, vocab), dtype=np.bool_)


class SlotTable:
    """The slots, of which those in use run or wait for their environment."""

    @torch.inference_mode()
    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        records_routes: bool,
    ) -> None:
        self._max_context = max_context
        self._rows = _Rows(num_slots, max_context, shape.vocab_size, dtype)
        self._cache = KVCache(
            shape,
            num_slots=num_slots,
            max_context=max_context,
            dtype=dtype,
            records_routes=records_routes,
        )
        # [slots, V]; in fresh memory every step would fault in all its pages.
        self._logits = torch.from_numpy(np.empty((num_slots, shape.vocab_size), self._rows.real))
        self.computed_tokens = 0
        """Prompt tokens computed so far; the others were in the cache."""
        self._workspace: Workspace | None = None

    def stop(self, slot: int) -> None:
        """Stop the slot's completion and keep its cache."""
        self._rows.running[slot] = False

    def remove(self, slot: int) -> None:
        """Free a slot."""
        self._cache.cut(slot, 0)
        self._rows.length[slot] = 0
        self._rows.running[slot] = self._rows.sealed[slot] = False

    def seal(self) -> None:
        """Confine cached tokens to the rows that hold them, because other weights come."""
        self._rows.sealed[:] = self._rows.length > 0

    @torch.inference_mode()
    def decode(self, decoder: Decoder) -> list[tuple[int, Completion]]:
        """Decode one token for every running slot. Returns the completions that end with it."""
        rows = self._rows
        slots = np.flatnonzero(rows.running)
        positions = rows.length[slots]
        rows.length[slots] += 1
        self._cache.reserve(slots, rows.length[slots])
        if self._workspace is None or self._workspace.num_tokens != len(slots):
            self._workspace = decoder.workspace(len(slots))
        hidden = decoder.forward(
            rows.ids[slots, positions], slots, positions, self._cache, workspace=self._workspace
        )
        return self._accept(slots, decoder.logits(hidden, out=self._logits))

    @torch.inference_mode()
    def prefill(self, decoder: Decoder, requests: list[Prefill]) -> list[tuple[int, Completion]]:
        """Compute the new tokens of the requests and sample their first. Returns the completions
        that end with it.
        """
        finished = []
        while requests:
            suffixes, requests = self._plan(requests)
            for chunk in _chunks(suffixes):
                slots, starts, counts = (
                    np.array([getattr(part, x) for part in chunk])
                    for x in ("slot", "start", "length")
                )
                ends = starts + counts
                self._cache.reserve(slots, ends)
                row_of_token = np.repeat(slots, counts)  # [T]
                positions = np.concatenate([*map(np.arange, starts, ends)])
                self.computed_tokens += len(positions)
                hidden = decoder.forward(
                    self._rows.ids[row_of_token, positions],
                    row_of_token,
                    positions,
                    self._cache,
                    wanted=counts.cumsum() - 1,
                )
                self._rows.length[slots] = ends
                if chunk[0].is_whole:
                    finished += self._accept(slots, decoder.logits(hidden, out=self._logits))
        return finished

    def _plan(self, requests: list[Prefill]) -> tuple[list[_Suffix], list[Prefill]]:
        """Return the suffixes to compute, and the requests that wait because the row of another
        request will hold their prefix. Trajectories of one prompt that went the same way so far
        compute it once.
        """
        suffixes, deferred = [], []
        ids, length, sealed = self._rows.ids, self._rows.length, self._rows.sealed
        first_block = self._cache.table[:, 0]
        planned = length.copy()  # cached once the suffixes are computed
        for request in requests:
            slot, num_tokens = request.slot, len(request.tokens)
            cached = int(min(shared_length(ids[slot], request.tokens), length[slot]))
            # The rest of a changed history is nobody's prefix.
            self._cache.cut(slot, cached)
            length[slot] = planned[slot] = cached
            last = num_tokens - 1  # whose logits are always needed
            if not sealed[slot]:
                may_hold = (planned > cached) & ~sealed
                if cached >= BLOCK:  # rows of one prompt have its first block in common
                    may_hold &= first_block == first_block[slot]
                others = np.flatnonzero(may_hold)
                shared = shared_length(ids[others, :num_tokens], request.tokens)  # [n]
                reusable = np.minimum(shared, length[others])
                longest = int(reusable.max(initial=0))
                coming = int(np.minimum(shared, planned[others]).max(initial=0))
                if coming >= max(cached, longest) + _MIN_SHARED:
                    deferred.append(request)
                    continue
                if longest >= cached + _MIN_SHARED:
                    cached = longest
                    self._cache.cut(slot, 0)
                    self._cache.share(int(others[reusable.argmax()]), slot, min(cached, last))
            start = min(cached, last)
            self._cache.cut(slot, start)
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
        rows.num_recorded[slot] = sampling.num_recorded
        rows.limit[slot] = limit
        rows.running[slot] = True
        rows.greedy[slot] = sampling.temperature == 0.0
        rows.inverse_temperature[slot] = 1.0 / (sampling.temperature or 1.0)
        rows.top_p[slot] = sampling.top_p
        rows.stops[slot] = False
        rows.stops[slot, list(sampling.stop_token_ids)] = True

    def _accept(self, slots: NDArray[np.int64], logits: Tensor) -> list[tuple[int, Completion]]:
        """Sample from logits [m, V] into slots [m], whose keys are all cached. Returns the
        completions that end here.
        """
        rows = self._rows
        positions = rows.length[slots]
        tokens, logprobs = sampler.sample(
            logits.numpy(),
            rows.uniforms[slots, positions],
            inverse_temperature=rows.inverse_temperature[slots],
            top_p=rows.top_p[slots],
            greedy=rows.greedy[slots],
        )
        rows.ids[slots, positions] = tokens
        rows.logprobs[slots, positions] = logprobs
        stopped = rows.stops[slots, tokens]
        finished = []
        for place in np.flatnonzero(stopped | (positions + 1 >= rows.limit[slots])).tolist():
            slot = int(slots[place])
            span = slice(rows.prompt_length[slot], rows.length[slot] + 1)
            rows.running[slot] = False
            fields: tuple[dict[str, NDArray], ...] = ()
            if self._cache.records_routes:
                routes = self._cache.routes_of(slot, rows.num_recorded[slot], rows.length[slot])
                fields = routes_of_completion(routes, span.stop - span.start)
            completion = Completion(
                rows.ids[slot, span].tolist(),
                rows.logprobs[slot, span].tolist(),
                "stop" if stopped[place] else "length",
                *fields,
            )
            finished.append((slot, completion))
        return finished


def _chunks(suffixes: list[_Suffix]) -> Iterator[list[_Suffix]]:
    """Split into passes. A suffix too long for one pass is split; its parts come in order, each in
    its own pass.
    """
    chunk: list[_Suffix] = []
    room = _MAX_PREFILL_TOKENS
    for slot, start, count, _ in suffixes:
        while count > _MAX_PREFILL_TOKENS:
            yield [_Suffix(slot, start, _MAX_PREFILL_TOKENS, is_whole=False)]
            start, count = start + _MAX_PREFILL_TOKENS, count - _MAX_PREFILL_TOKENS
        if count > room:
            yield chunk
            chunk, room = [], _MAX_PREFILL_TOKENS
        chunk.append(_Suffix(slot, start, count))
        room -= count
    if chunk:
        yield chunk
