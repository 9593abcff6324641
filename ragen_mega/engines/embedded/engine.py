"""An in-process rollout engine for the CPU: incremental decoding over a batch that trajectories
join and leave.

Source of the scheduling: iteration-level batching of Orca (Yu et al., OSDI 2022). A turn costs only
its new tokens: the cache of earlier turns stays with the session, and what sessions begin with
alike is computed once.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.config import LoraConfig
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.embedded.decoder import Decoder
from ragen_mega.engines.embedded.slots import Prefill, SlotTable
from ragen_mega.models.shape import ModelShape, check_config
from ragen_mega.rollout.engine import EngineCounts, RolloutEngine

MAX_PATIENCE = 8.0
"""Most seconds without a further answer for which the engine pauses once one of the ordered answers
has come. A later one is taken when it comes.
"""
_PASSES = 8
"""Passes of the event loop in which a caller that was answered has asked again, or is absent."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Absence:
    """A trajectory that waits for an answer from outside."""

    answer: asyncio.Future[Any]
    is_over: asyncio.Future[None]
    is_overdue: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    session: int
    token_ids: NDArray[np.int64]
    sampling: SamplingParams
    future: asyncio.Future[Completion]


class EmbeddedEngine(RolloutEngine):
    """Decodes up to `max_sessions` trajectories of up to `max_context` tokens at once; more
    sessions wait. The cache exists while the engine is awake.
    """

    shard = None

    def __init__(
        self,
        model_config: PretrainedConfig,
        *,
        max_context: int,
        max_sessions: int,
        dtype: torch.dtype = torch.float32,
        records_routes: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """`records_routes`: completions say which experts their tokens went through
        (`fields.ROUTES`). With `lora` the weights are kept, and `load_adapter` puts adapters of
        these settings beside them.
        """
        if max_context < 2 or max_sessions < 1:
            raise ValueError(
                f"max_context must be at least 2 and max_sessions at least 1, not {max_context} and"
                f" {max_sessions}"
            )
        self.counts = EngineCounts()
        check_config(model_config)
        self._shape = ModelShape.of(model_config)
        self._max_context = max_context
        self.num_slots = self._max_sessions = max_sessions
        self._dtype = dtype
        self._records_routes = records_routes
        self._lora = lora
        self._decoder: Decoder | None = None
        self._base: Decoder | None = None  # kept beside adapters
        self._slots: SlotTable | None = None
        self._slot_of: dict[int, int] = {}
        self._session_in: dict[int, int] = {}  # by slot in use
        self._free = list(range(max_sessions))[::-1]  # slots
        self._waiting: dict[int, _Request] = {}  # by session, in order of arrival
        self._running: dict[int, _Request] = {}  # by session
        self._absences: deque[_Absence] = deque()  # in order of their start
        self._patience = MAX_PATIENCE
        self._caller: asyncio.Future[None] | None = None  # done once another caller has come
        self._step = 0
        self._has_news = False  # a caller was answered since the last passes
        self._last_step = math.inf  # before the next `limit`
        self._stands_still: asyncio.Future[None] | None = None
        self._scheduler: asyncio.Task[None] | None = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Hold weights and KV cache for the block; `load_weights` comes first."""
        if self._slots is not None:
            raise RuntimeError(
                "the engine is awake already; leave the first `with engine.awake()` before the next"
            )
        self._slots = SlotTable(
            self._shape,
            num_slots=self._max_sessions,
            max_context=self._max_context,
            dtype=self._dtype,
            records_routes=self._records_routes,
        )
        try:
            yield
        finally:
            self.shutdown()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Copy a full set of weights; with `again` sessions keep their caches.

        Raises ValueError unless exactly the expected names and shapes arrive.
        """
        if self._slots is None:
            raise RuntimeError(
                "the engine is asleep; call load_weights inside `with engine.awake()`"
            )
        if self._slot_of and not again:
            raise RuntimeError(
                f"{len(self._slot_of)} sessions hold a cache of the old weights; release them"
                " before load_weights"
            )
        # The old weights go before the new ones come, and a failed load leaves none.
        self._decoder = self._base = None
        decoder = Decoder(self._shape, weights, max_context=self._max_context, dtype=self._dtype)
        if self._lora is None:
            self._decoder = decoder
        else:
            self._base = decoder  # without an adapter it samples nothing
        self.weight_version += not again

    @property
    def has_base(self) -> bool:
        return self._base is not None

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        if self._lora is None or self._base is None:
            raise RuntimeError("an adapter needs lora settings and its base; call load_weights")
        self._decoder = self._base.with_adapter(dict(tensors), self._lora)
        self.weight_version += not again

    def seal_caches(self) -> None:
        if self._slots is not None:
            self._slots.seal()

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        """Sample what follows `tokens`. A context that fills up gives finish_reason "length", with
        no token if it was full already.
        """
        if self._decoder is None:
            raise RuntimeError(
                "the engine has no weights; call load_weights inside `with engine.awake()` first"
            )
        sampling.check(tokens, vocab=self._shape.vocab_size)
        if session in self._running or session in self._waiting:
            raise ValueError(
                f"session {session} already generates; await one completion before asking for the"
                " next"
            )
        if len(tokens) >= self._max_context:
            return Completion([], [], "length")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(session, np.array(tokens), sampling, future)
        self._waiting[session] = request
        self._has_news = True  # others are about to ask as well
        self._wake_scheduler()
        try:
            return await future
        finally:
            # The caller was cancelled.
            if request in (self._waiting.get(session), self._running.get(session)):
                self._forget(session)

    async def meanwhile(self, answer: Awaitable[T]) -> T:
        """Return the result of `answer`, handed over once nobody is left to decode, whenever it
        really came: the number of steps before the caller goes on does not depend on its speed.

        Other requests are decoded meanwhile. With nothing left to do the engine waits for all
        answers together, so that slow ones overlap. Callers may wait for one another, so it goes on
        with the answers that have come once no further one does.
        """
        absence = _Absence(
            asyncio.ensure_future(answer), asyncio.get_running_loop().create_future()
        )
        self._absences.append(absence)
        self._wake_scheduler()
        try:
            await absence.is_over
            return absence.answer.result()
        finally:
            absence.answer.cancel()
            if absence in self._absences:  # the caller was cancelled
                self._absences.remove(absence)

    def limit(self, steps: int | None) -> asyncio.Future[None]:
        """Return a future that is done after that many more steps; the engine then pauses until the
        next call.
        """
        self._last_step = math.inf if steps is None else self._step + steps
        self._stands_still = asyncio.get_running_loop().create_future()
        if self._waiting or self._running or self._absences:
            self._wake_scheduler()
        return self._stands_still

    def release(self, session: int) -> None:
        """Free the session's slot; a completion in progress is cancelled. Unknown sessions are
        ignored.
        """
        self._forget(session)
        slot = self._slot_of.pop(session, None)
        if slot is None or self._slots is None:
            return
        self._slots.remove(slot)
        del self._session_in[slot]
        self._free.append(slot)
        if self._waiting:
            self._wake_scheduler()

    def shutdown(self) -> None:
        """Drop weights, cache and sessions; completions in progress are cancelled."""
        if self._scheduler is not None and not self._scheduler.done():
            self._scheduler.cancel()
        for session in (*self._waiting, *self._running):
            self._forget(session)
        self._absences.clear()
        self._slot_of.clear()
        self._session_in.clear()
        self._free = list(range(self._max_sessions))[::-1]
        self._last_step = math.inf
        self._scheduler = self._decoder = self._slots = None

    def _forget(self, session: int) -> None:
        """Stop working for the session's request, if there is one."""
        if session in self._running and self._slots is not None:
            self._slots.stop(self._slot_of[session])
        for requests in (self._running, self._waiting):
            if (request := requests.pop(session, None)) is not None:
                request.future.cancel()

    def _wake_scheduler(self) -> None:
        if self._caller is not None and not self._caller.done():
            self._caller.set_result(None)
        is_idle = self._scheduler is None or self._scheduler.done()
        if is_idle and self._step < self._last_step:
            self._scheduler = asyncio.get_running_loop().create_task(self._schedule())
            self._scheduler.add_done_callback(self._scheduler_ended)

    def _scheduler_ended(self, task: asyncio.Task[None]) -> None:
        """Hand the scheduler's failure to everyone who waits for it."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        futures: list[asyncio.Future[Any]] = [
            *(request.future for request in (*self._waiting.values(), *self._running.values())),
            *(absence.is_over for absence in self._absences),
        ]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
        self._running.clear()
        self._absences.clear()

    async def _schedule(self) -> None:
        """Admit, decode one token everywhere, let trajectories react; until nothing can run."""
        while True:
            # Callers that were just answered come back with their next turn before the next step is
            # planned.
            num_passes, self._has_news = _PASSES if self._has_news else 1, False
            for _ in range(num_passes):
                await asyncio.sleep(0)
            if self._step >= self._last_step and self._stands_still is not None:
                self._stands_still.set_result(None)
                return
            self._end_absences(overdue=True)
            admitted = self._admit()
            if self._running:
                assert self._slots is not None and self._decoder is not None  # for `generate`
                self._answer(self._slots.decode(self._decoder))
                self._step += 1
                self.counts.steps += 1
            elif self._absences:
                if await self._until_answered():
                    self._end_absences(overdue=False)
            elif not admitted:
                return

    async def _until_answered(self) -> bool:
        """Wait for an answer, then for those that are not overdue while they keep coming. Each
        pause in vain halves the next one, and each that is not doubles it. Returns False if another
        caller has come meanwhile.
        """
        self._caller = asyncio.get_running_loop().create_future()
        answers = {absence.answer for absence in self._absences}
        left = {a.answer for a in self._absences if not a.is_overdue}
        came, _ = await asyncio.wait({*answers, self._caller}, return_when=asyncio.FIRST_COMPLETED)
        while (left := left - came) and not self._caller.done():
            came, _ = await asyncio.wait(
                {*left, self._caller},
                timeout=self._patience,
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._patience = min(MAX_PATIENCE, self._patience * (2 if came else 0.5))
            if not came:
                return True
        return not self._caller.done()

    def _end_absences(self, *, overdue: bool) -> None:
        """Resume the absences whose answer has come, in order, among the overdue ones or the others
        (`overdue`); the rest become overdue.
        """
        for absence in [absence for absence in self._absences if absence.is_overdue == overdue]:
            absence.is_overdue = True
            if not absence.answer.done():
                continue
            self._absences.remove(absence)
            self._has_news = True
            if not absence.is_over.done():
                absence.is_over.set_result(None)

    def _admit(self) -> bool:
        """Prefill every waiting request that has or finds a slot; shared beginnings are computed
        once, first.
        """
        admitted: list[_Request] = []
        lacking = [session for session in self._waiting if session not in self._slot_of]
        if not self._running and len(lacking) == len(self._waiting):
            # Nothing runs that will free a slot, and those who idle may wait for these requests.
            idle = list(self._slot_of)[: max(0, len(lacking) - len(self._free))]
            for session in idle:
                self.release(session)
        for session, request in list(self._waiting.items()):
            if session not in self._slot_of:
                if not self._free:
                    continue
                slot = self._slot_of[session] = self._free.pop()
                self._session_in[slot] = session
            self._running[session] = self._waiting.pop(session)
            admitted.append(request)
        if not admitted:
            return False
        prefills = [
            Prefill(self._slot_of[request.session], request.token_ids, request.sampling)
            for request in admitted
        ]
        assert self._slots is not None and self._decoder is not None  # for `generate`
        before = self._slots.computed_tokens
        self._answer(self._slots.prefill(self._decoder, prefills))
        num_prompt = sum(len(request.token_ids) for request in admitted)
        self.counts.prompt_tokens += num_prompt
        self.counts.cached_tokens += num_prompt - (self._slots.computed_tokens - before)
        return True

    def _answer(self, finished: list[tuple[int, Completion]]) -> None:
        self._has_news = self._has_news or bool(finished)
        for slot, completion in finished:
            request = self._running.pop(self._session_in[slot])
            if not request.future.done():
                request.future.set_result(completion)
