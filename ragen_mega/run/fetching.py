"""Weights from the first rank that trains to all ranks that sample, through a process group: over
NCCL between devices, elsewhere over gloo.

    ranks that sample, in an engine's stream        first rank that trains, in a thread
    ========================================        ===================================
    Receiver.receive(version)
      Fetch(group, version, first part)  -- link -->  Sender
      _Group, if it is new                <-------->    _Group
      header of a part                    <-- link --    Weights without their bytes
      meet                                <-- gloo -->   meet
      bytes, compared with their checksum <-- NCCL --    bytes
      ... until the last part

Nobody on a device waits for a rank that is not there: all meet over gloo before each part. What
fails, or takes more than `_PATIENCE` seconds, costs the group. The ranks that sample then agree to
ask for the same part through another one, and the stream to the engine goes on.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from ragen_mega.data.checksums import checksum
from ragen_mega.models.layout import group_by_size
from ragen_mega.ranks import collectives, groups
from ragen_mega.ranks.collectives import device
from ragen_mega.ranks.waits import here
from ragen_mega.rollout.engine import EngineError
from ragen_mega.run.link import Link
from ragen_mega.run.messages import Fetch, Weights, decode, encode, is_fetch

PART_BYTES = 64 * 2**20
"""Most bytes of a part of weights on their way, unless one tensor has more."""
_PATIENCE = 60.0
_MOST_FAILURES = 3
"""Groups in a row that may fail."""
_SECONDS_TO_END = 5.0
_POLL_SECONDS = 5e-4


class _Group:
    """The first rank that trains, which is rank 0 here, and all ranks that sample."""

    def __init__(self, store: dist.Store, number: int, rank: int, size: int) -> None:
        """Form it. Collective; raises RuntimeError where not all come."""
        self.number, self._formed = number, list[tuple[dist.ProcessGroup, str]]()
        self._rank, self._size, self._name = rank, size, f"weights-{number}"
        self._store = dist.PrefixStore("weights", _patient(store))
        self._host = self._form("gloo")
        self.device, self._over = torch.device("cpu"), self._host
        if torch.cuda.is_available() and collectives.ranks_per_device() == 1:
            try:
                self.device, self._over = device(), self._form("nccl")
            except RuntimeError:
                self.leave()
                raise

    def _form(self, backend: str) -> dist.ProcessGroup:
        name = f"{self._name}-{backend}"
        group = groups.form(backend, self._store, name, self._rank, self._size, _PATIENCE)
        self._formed.append((group, backend))
        return group

    def meet(self) -> None:
        """Return once all are here. Raises RuntimeError where one does not come."""
        dist.all_reduce(torch.zeros(1), group=self._host)

    def broadcast(self, memory: Tensor) -> None:
        """Fill `memory`, [bytes] uint8, with the bytes of rank 0. Raises RuntimeError."""
        work = dist.broadcast(memory, src=0, group=self._over, async_op=True)
        assert work is not None  # this rank is in the group
        end = time.monotonic() + _PATIENCE
        while not work.is_completed():  # NCCL's own patience would end the process
            if time.monotonic() > end:
                raise RuntimeError(f"{len(memory)} bytes of weights took over {_PATIENCE:.0f} s")
            time.sleep(_POLL_SECONDS)
        work.wait()

    def leave(self) -> None:
        """Leave it, though others may hang."""
        while self._formed:
            groups.leave(*self._formed.pop())


def _patient(store: dist.Store) -> dist.Store:
    """Return a connection to the store whose waits end. A clone connects anew, to a rank that may
    be gone, and the clone of a file has torch's own patience.
    """
    ours = store.clone()  # type: ignore[attr-defined]
    ours.set_timeout(timedelta(seconds=_PATIENCE))
    return ours


class Sender:
    """Sends what is asked for on the link, beside training. On the first rank that trains."""

    def __init__(
        self,
        link: Link,
        store: dist.Store,
        num_samplers: int,
        find: Callable[[Fetch], dict[str, Tensor]],
    ) -> None:
        """`find` returns the whole weights that are asked for. A part that was sent stays there in
        host memory.
        """
        self.seconds = 0.0
        """Seconds that sending took, beside other work, waits for the other ranks included."""
        self._link, self._store, self._find = link, _patient(store), find
        self._size = 1 + num_samplers
        self._group: _Group | None = None
        self._asked: SimpleQueue[Fetch | None] = SimpleQueue()
        self._device = device()  # which a thread does not inherit
        link.divert = self._take
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weights")
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._asked.put(None)
        self._thread.join(_SECONDS_TO_END)

    def _take(self, frame: bytes) -> bool:
        """Take a message from the link, if it asks for weights."""
        is_mine = is_fetch(frame)
        if is_mine:
            self._asked.put(decode(frame))
        return is_mine

    def _serve(self) -> None:
        with ExitStack() as stack:
            if torch.cuda.is_available():  # not on the stream that trains
                torch.cuda.set_device(self._device)
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            while (fetch := self._asked.get()) is not None:
                start = time.monotonic()
                try:
                    self._send(fetch)
                except (RuntimeError, ValueError, OSError) as error:
                    self._leave()
                    said = " ".join(str(error).split())[:200]
                    warnings.warn(f"a group that carries weights was left: {said}", stacklevel=2)
                self.seconds += time.monotonic() - start
            self._leave()

    def _send(self, fetch: Fetch) -> None:
        if self._group is None or self._group.number != fetch.group:
            self._leave()
            self._group = _Group(self._store, fetch.group, 0, self._size)
        held = self._find(fetch)
        parts = [*group_by_size(held, lambda name: held[name].nbytes, PART_BYTES)]
        for names in parts[fetch.first :]:
            part = Weights.of(
                [(name, held[name]) for name in names],
                is_last=names is parts[-1],
                rollbacks=fetch.rollbacks,
                device=self._group.device,
                group=fetch.group,
            )
            self._link.send(encode(replace(part, memory=None)))
            self._group.meet()
            assert part.memory is not None  # it was packed here
            self._group.broadcast(part.memory)
            for name in names:
                held[name] = held[name].to("cpu")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None


class Receiver:
    """Receives weights on every rank that samples. Methods are collective over them."""

    def __init__(
        self,
        store: dist.Store,
        ask: Callable[[Fetch], None],
        header: Callable[[], Weights],
        has_hung_up: Callable[[], bool],
    ) -> None:
        """`ask` sends a message from the first rank; `header` receives the next description of a
        part, on all ranks, and raises what ends the job once nothing more can come. `has_hung_up`
        returns, on all ranks, whether the trainers are gone.
        """
        self._store, self._ask, self._header = _patient(store), ask, header
        self._has_hung_up = has_hung_up
        self._group: _Group | None = None
        self._number = 1
        self._why = ""  # the last failure

    def receive(
        self, version: int, *, is_base: bool, rollbacks: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of all weights of a version, on this rank's device. Raises
        EngineError, on all ranks, where several groups in a row fail, and what `header` raises.
        """
        collectives.barrier()  # an engine may be started anew meanwhile
        first, failures, is_asked = 0, 0, False
        while True:
            if not is_asked:
                self._ask(Fetch(self._number, version, first, is_base, rollbacks))
                is_asked = self._on_all(self._join)
            if is_asked and (found := self._next_part()) is not None:
                part, memory = found
                yield from part.tensors(memory.to(device()))
                if part.is_last:
                    return
                first, failures = first + 1, 0
                continue
            self.leave()
            while self._has_hung_up():  # nobody would come to another group
                self._header()
            self._number, failures, is_asked = self._number + 1, failures + 1, False
            if failures == _MOST_FAILURES:
                raise EngineError(
                    f"the weights of {version} steps did not come through {failures} groups in a"
                    f" row ({self._why or 'another rank failed'}); --resume goes on from the last"
                    " checkpoint"
                )

    def leave(self) -> None:
        """Leave the group. Safe to call again."""
        if self._group is not None:
            self._group.leave()
        self._group = None

    def _join(self) -> None:
        if self._group is None:
            rank, size = collectives.rank() + 1, collectives.world_size() + 1
            self._group = _Group(self._store, self._number, rank, size)

    def _next_part(self) -> tuple[Weights, Tensor] | None:
        """Return the next part and its bytes; None if the group has failed on a rank."""
        group = self._group
        assert group is not None  # `receive` has joined it
        while (part := self._header()).group != self._number:
            continue  # it was for a group that was left
        memory = torch.empty(sum(part.sizes), dtype=torch.uint8, device=group.device)

        def fill() -> None:
            group.meet()
            group.broadcast(memory)
            if checksum(memory) != part.checksum:
                raise ValueError(f"the weights from {part.names[0]} on have changed on their way")

        return (part, memory) if self._on_all(fill) else None

    def _on_all(self, work: Callable[[], None]) -> bool:
        """Return whether `work` has raised on no rank."""
        failed = 0
        try:
            with here.waiting("weights", "weights through a group"):
                work()
        except (RuntimeError, ValueError, OSError) as error:
            failed, self._why = 1, " ".join(str(error).split())[:200]
        return not collectives.max_over_ranks(torch.tensor([failed]))
