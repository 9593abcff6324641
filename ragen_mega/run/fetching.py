"""Weights from ranks that train to all ranks that sample, through process groups: over NCCL between
devices, elsewhere over gloo. Several ranks may send, each a share of the tensors through a group of
its own (`StarPOConfig.senders`).

    ranks that sample, in an engine's stream        each rank that sends, in a thread
    ========================================        =================================
    Receiver.receive(version)
      Fetch(groups, version, first round) -- store -->  Sender
      a _Group for each sender, if new    <--------->   _Group, if it is new
      a round: a part from each sender
        header of a part                  <-- gloo --     Weights without their bytes
        meet                              <-- gloo -->    meet
        bytes, compared with a checksum   <-- NCCL --     bytes
      ... until each sender has sent its last part

Nobody on a device waits for a rank that is not there: all meet over gloo before each part. What
fails, or takes more than `_PATIENCE` seconds, costs the groups. The ranks that sample then agree to
ask for the same round through others, and the stream to the engine goes on.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ragen_mega.data.checksums import checksum
from ragen_mega.models.layout import group_by_size
from ragen_mega.ranks import collectives, groups, watch
from ragen_mega.ranks.collectives import device
from ragen_mega.ranks.waits import here
from ragen_mega.rollout.engine import EngineError
from ragen_mega.run.messages import Fetch, Weights, decode, encode

PART_BYTES = 64 * 2**20
"""Most bytes of a part of weights on their way, unless one tensor has more."""
_PATIENCE = 60.0
_MOST_FAILURES = 3
"""Rounds in a row that may fail."""
_SECONDS_TO_END = 5.0
_POLL_SECONDS = 5e-4
_SECONDS_BETWEEN_LOOKS = 0.02
"""Seconds after which a sender looks again whether it was asked."""


class _Group:
    """A rank that sends, which is rank 0 here, and all ranks that sample."""

    def __init__(self, store: dist.Store, number: int, sender: int, rank: int, size: int) -> None:
        """Form it: group `number` of the sender of that index. Collective; raises RuntimeError
        where not all come.
        """
        self.number, self._formed = number, list[tuple[dist.ProcessGroup, str]]()
        self._rank, self._size, self._name = rank, size, f"weights-{number}-{sender}"
        self._store = dist.PrefixStore("weights", _patient(store))
        self._host = self._form("gloo")
        self.device, self._over = torch.device("cpu"), self._host
        has_own = torch.tensor([torch.cuda.is_available() and collectives.ranks_per_device() == 1])
        try:
            dist.all_reduce(has_own, dist.ReduceOp.MIN, group=self._host)  # nodes may differ
            if has_own:
                self.device, self._over = device(), self._form("nccl")
                self.broadcast(torch.zeros(1, device=self.device))()  # connects
        except RuntimeError:
            self.leave()
            raise

    def _form(self, backend: str) -> dist.ProcessGroup:
        name = f"{self._name}-{backend}"
        group = groups.form(backend, self._store, name, self._rank, self._size, _PATIENCE)
        self._formed.append((group, backend))
        return group

    def tell(self, message: bytes) -> None:
        """Send a message from rank 0 to all others, which `hear` it. Raises RuntimeError."""
        dist.broadcast(torch.tensor([len(message)]), src=0, group=self._host)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._host)

    def hear(self) -> bytes:
        """Return the message that rank 0 sends. Raises RuntimeError where none comes."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._host)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._host)
        return data.numpy().tobytes()

    def meet(self) -> None:
        """Return once all are here. Raises RuntimeError where one does not come."""
        dist.all_reduce(torch.zeros(1), group=self._host)

    def broadcast(self, memory: Tensor) -> Callable[[], None]:
        """Begin to fill `memory` as on rank 0; returns the call that waits for it. Both raise
        RuntimeError.
        """
        work = dist.broadcast(memory, src=0, group=self._over, async_op=True)
        assert work is not None  # this rank is in the group

        def wait() -> None:
            end = time.monotonic() + _PATIENCE
            while not work.is_completed():  # NCCL's own patience would end the process
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{memory.nbytes} bytes of weights took over {_PATIENCE:.0f} s"
                    )
                time.sleep(_POLL_SECONDS)
            work.wait()

        return wait

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
    """Sends what is asked for, beside training. On each rank that sends."""

    def __init__(
        self,
        store: dist.Store,
        index: int,
        num_samplers: int,
        find: Callable[[Fetch], dict[str, Tensor]],
    ) -> None:
        """Sender `index` of the job. `find` returns its share of the weights that are asked for. A
        part that was sent stays there in host memory.
        """
        self.seconds = 0.0
        """Seconds that sending took, beside other work, waits for the other ranks included."""
        self._store, self._index, self._find = _patient(store), index, find
        self._size = 1 + num_samplers
        self._group: _Group | None = None
        self._num_asked = 0
        self._is_closed = threading.Event()
        self._device = device()  # which a thread does not inherit
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weights")
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._is_closed.set()
        self._thread.join(_SECONDS_TO_END)

    def _serve(self) -> None:
        with ExitStack() as stack:
            if torch.cuda.is_available():  # not on the stream that trains
                torch.cuda.set_device(self._device)
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            while not self._is_closed.wait(_SECONDS_BETWEEN_LOOKS):
                start = time.monotonic()
                try:
                    if (frame := self._newest()) is None:
                        continue
                    self._send(decode(frame))
                except (RuntimeError, ValueError, KeyError, OSError) as error:
                    self._leave()
                    said = " ".join(repr(error).split())[:200]
                    warnings.warn(f"a group that carries weights was left: {said}", stacklevel=2)
                self.seconds += time.monotonic() - start
            self._leave()

    def _newest(self) -> bytes | None:
        """Return the newest request, which voids those before it; None if there is no new one."""
        frame = None
        while self._store.check([_request(self._num_asked)]):
            frame = self._store.get(_request(self._num_asked))
            self._num_asked += 1
        return frame

    def _send(self, fetch: Fetch) -> None:
        if self._group is None or self._group.number != fetch.group:
            self._leave()
            self._group = _Group(self._store, fetch.group, self._index, 0, self._size)
        held = self._find(fetch)
        parts = [*group_by_size(held, lambda name: held[name].nbytes, PART_BYTES)]
        for names in parts[fetch.first :]:
            if self._is_closed.is_set():
                return
            tensors, is_last = [(name, held[name]) for name in names], names is parts[-1]
            part = Weights.of(tensors, is_last=is_last, device=self._group.device)
            assert part.memory is not None  # it was packed here
            self._group.tell(encode(replace(part, memory=None)))
            self._group.meet()
            self._group.broadcast(part.memory)()
            for name in names:
                held[name] = held[name].to("cpu")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None


class Receiver:
    """Receives weights on every rank that samples. Methods are collective over them."""

    def __init__(
        self, store: dist.Store, num_senders: int, *, stop_if_alone: Callable[[], None]
    ) -> None:
        """`stop_if_alone` raises, on all ranks, what ends the job if the trainers are gone."""
        self._store, self._num_senders = _patient(store), num_senders
        self._stop_if_alone = stop_if_alone
        self._groups: list[_Group] = []
        self._number = 1
        self._num_asked = 0
        self._why = ""  # the last failure

    def receive(
        self, version: int, *, is_base: bool, rollbacks: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of all weights of a version, on this rank's device. Raises
        EngineError, on all ranks, where several rounds in a row fail, and what `stop_if_alone`
        raises.
        """
        collectives.barrier()  # an engine may be started anew meanwhile
        first, failures, is_asked = 0, 0, False
        left = [*range(self._num_senders)]  # senders that have more
        while left:
            if not is_asked:
                self._ask(Fetch(self._number, version, first, is_base, rollbacks))
                is_asked = self._on_all(self._join)
            if is_asked and (parts := self._next_round(left)) is not None:
                for sender, (part, memory) in parts.items():
                    yield from part.tensors(memory.to(device()))
                    if part.is_last:
                        left.remove(sender)
                first, failures = first + 1, 0
                continue
            self.leave()
            self._stop_if_alone()  # nobody would come to another group
            self._number, failures, is_asked = self._number + 1, failures + 1, False
            if failures == _MOST_FAILURES:
                collectives.on_main(lambda: watch.ask(watch.SECONDS_TO_REPORT))  # one may hang
                raise EngineError(
                    f"the weights of {version} steps did not come through {failures} groups in a"
                    f" row ({self._why or 'another rank failed'}); --resume goes on from the last"
                    " checkpoint"
                )

    def leave(self) -> None:
        """Leave the groups. Safe to call again."""
        while self._groups:
            self._groups.pop().leave()

    def _ask(self, fetch: Fetch) -> None:
        if collectives.is_main():
            key, text = _request(self._num_asked), encode(fetch)
            self._store.set(key, text)  # type: ignore[arg-type] # bytes are taken too
        self._num_asked += 1

    def _join(self) -> None:
        rank, size = collectives.rank() + 1, collectives.world_size() + 1
        for sender in range(len(self._groups), self._num_senders):
            self._groups.append(_Group(self._store, self._number, sender, rank, size))

    def _next_round(self, senders: Sequence[int]) -> dict[int, tuple[Weights, Tensor]] | None:
        """Return the next part of each sender and its bytes; None if a group fails on a rank."""
        parts: dict[int, tuple[Weights, Tensor]] = {}

        def fill() -> None:
            waits = []
            for sender in senders:
                group = self._groups[sender]
                part = decode(group.hear())
                memory = torch.empty(sum(part.sizes), dtype=torch.uint8, device=group.device)
                group.meet()
                waits.append(group.broadcast(memory))  # in the same order on all ranks
                parts[sender] = part, memory
            for wait in waits:
                wait()
            for part, memory in parts.values():
                if checksum(memory) != part.checksum:
                    raise ValueError(f"weights have changed on their way, from {part.names[0]} on")

        return parts if self._on_all(fill) else None

    def _on_all(self, work: Callable[[], None]) -> bool:
        """Return whether `work` has raised on no rank."""
        failed = 0
        try:
            with here.waiting("weights", "weights through a group"):
                work()
        except (RuntimeError, ValueError, OSError) as error:
            failed, self._why = 1, " ".join(str(error).split())[:200]
        return not collectives.max_over_ranks(torch.tensor([failed]))


def _request(number: int) -> str:
    """Return the key under which a request for weights is in the store."""
    return f"fetch-{number}"
