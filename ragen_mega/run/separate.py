"""Placement `separate`: some ranks of the job sample, the others train, at the same time.

Each part is a torch.distributed world. The first ranks of the parts share one socket;
every other message stays within a part.

    ranks that train: `train.starpo`               ranks that sample: `train.sample`
    ================================               =================================
    rollouts.request(step)                         sampler.orders()
      Samplers.order, collective                     inbox of rank 0, broadcast to the others
      each rank that sends copies --- Order ------>  sampler.load_weights(order)
      its share into _shares,     --- Weights ---->    in parts, made while training goes on;
      until no rollout needs it   --- ... -------->    for SGLang fetched by groups (`fetching`)
                                                       each engine cuts its part
                                                     sampler.sample(step)
                                                       engines and environments of all ranks
                                                     sampler.deliver(step, groups)
    rollouts.receive(step)                             rank 0 has all trajectories
      _accept: arrival at rank 0  <-- Delivery ----
      |          `-> writer thread -> rollouts/
      _arrived, by step
      Samplers.take: rank 0 keeps
      the tokens, all ranks get
      outlines

    Begin and End frame a run. Beats (one a second, while turns end) say that samplers live. Beats
    and errors of rank 0 of the samplers travel as messages, of other samplers through the store.

| queue | holds | bound |
|---|---|---|
| orders on their way, samplers' inbox | rollouts to sample | max_staleness + 1 |
| deliveries on their way, _arrived | rollouts to train | the same: each answers an order |
| _shares of trainers | weights of rollouts that have not come back | max_staleness + 1 |
| writer thread | one rollout that is written to disk | `_accept` waits for the last write |

Back-pressure is in the orders alone. Rollout t is ordered under the weights after
max(0, t - max_staleness) steps, whatever takes how long, so a run is repeated to the bit without a
record of timing. Samplers without an order wait, and are at most max_staleness rollouts ahead;
trainers wait in `take`, until the samplers deliver or have finished no turn for --sampler-timeout
seconds. The trainers order a rollout as soon as its weights exist, before they log, evaluate or
write anything. No trajectory is ever dropped, with one exception: a run that goes back to earlier
weights (`--guard react`) orders anew what was or would be sampled under the weights that it leaves.
Weights that ordered rollouts still need are in checkpoints (`staged`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.config import StarPOConfig
from ragen_mega.data.exchange import read_on_main
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.models.layout import group_by_size
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.planning.memory import ON_DEVICE
from ragen_mega.ranks import collectives, watch
from ragen_mega.ranks.collectives import device, is_main, on_main
from ragen_mega.ranks.waits import here
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import Metrics
from ragen_mega.rollout.all_ranks import engine_metrics
from ragen_mega.rollout.engine import EngineShard, Interrupted, RolloutEngine
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.fetching import PART_BYTES, Receiver, Sender
from ragen_mega.run.idleness import summed
from ragen_mega.run.link import (
    SAMPLERS,
    TRAINERS,
    Alarm,
    Link,
    LinkLost,
    connect,
    listen,
)
from ragen_mega.run.messages import (
    PORTABLE,
    Begin,
    Delivery,
    End,
    Fetch,
    Order,
    Weights,
    decode,
    encode,
)
from ragen_mega.run.nodes import minutes_to_wait, own_address
from ragen_mega.run.sampling import Origin, Sampling, origin_of
from ragen_mega.run.shares import Shares
from ragen_mega.run.stop import StopSignal
from ragen_mega.run.timers import Timers

_POLL_SECONDS = 0.2
_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_TO_HANG_UP = 1.0
"""Seconds within which the end of a part that has died closes the link."""


class Role(NamedTuple):
    """Task of a rank in a divided job, and its connection to the other part."""

    samples: bool
    """Whether it only samples."""
    link: Link | None = None
    """Link to the other part, on the first rank of each part."""
    alarm: Alarm | None = None
    """Alarm of every rank, if there are two parts."""
    store: dist.Store | None = None
    """Store that both parts see."""
    senders: Sequence[int] = (0,)
    """Ranks of those that train which send weights to those that sample, each a share."""


def divide(config: StarPOConfig) -> Role:
    """Divide the job as the placement says. Collective over the whole job."""
    num_samplers = config.parallel.rollout_ranks
    if not num_samplers:
        return Role(samples=False)
    num_trainers = collectives.world_size() - num_samplers
    samples, senders = collectives.rank() >= num_trainers, config.senders(num_trainers)
    store, link = collectives.divide(num_samplers, minutes_to_wait(config)), None
    if is_main():
        shared = config.run_directory.parent.absolute()
        link = connect(store, shared) if samples else listen(store, shared, own_address())
    return Role(samples, link, Alarm(store), store, senders)


class Samplers:
    """The trainers' view of the ranks that sample. Methods are collective over the trainers unless
    they say otherwise.
    """

    def __init__(
        self,
        config: StarPOConfig,
        role: Role,
        tasks: TaskSampler,
        *,
        recall: Callable[[int, Origin], list[TrajectoryGroup] | None],
        keep: Callable[[int, Origin, Sequence[TrajectoryGroup]], None],
        stop_if_asked: Callable[[], None],
        say: Callable[[str], None],
        base: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """`recall` and `keep` read and write rollouts on the disk, on the first rank; `keep` in
        another thread. With `base`, which streams frozen weights, the weights of `order` are
        adapters beside them.
        """
        self._config, self._tasks, self._base = config, tasks, base
        self._link, self._alarm = role.link, role.alarm
        self._by_group = role.store is not None and config.fetches_weights
        # versions in `_ordered`, and those that rollouts may still be ordered under
        self._shares = Shares(role.senders, on_device=ON_DEVICE * self._by_group)
        self._frozen: dict[str, Tensor] | None = None  # the base of adapters, if groups carry it
        self._sender: Sender | None = None
        if self._by_group and role.store is not None and self._shares.index is not None:
            num_samplers = config.parallel.rollout_ranks
            self._sender = Sender(role.store, self._shares.index, num_samplers, self._asked_for)
        self._recall, self._keep, self._stop_if_asked, self._say = recall, keep, stop_if_asked, say
        self._next = 0  # the first rollout that was not asked for
        self._ordered: dict[int, tuple[int, Origin]] = {}  # rollouts not taken yet: version, origin
        self._digests: dict[int, str] = {}  # digests of recent weights
        self._sending = 0.0  # seconds of sending when a rollout was taken
        self._oldest = 0  # the first version since the run went back
        self._rollbacks = 0  # of this process
        self._sent: int | None = None  # the latest version that they have
        self._arrived: dict[int, Delivery] = {}  # first rank: ready to be taken
        self._failure: Exception | None = None  # first rank: what ended their work
        self._unused = [summed(())] * config.parallel.rollout_ranks
        self.usage = self._unused
        """Usage by the ranks that sample, for the rollout that was taken last."""
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._written: Future[None] | None = None  # first rank: the last write

    def begin(self, base: Path) -> None:
        """Let the samplers build engine and renderer, from tokenizer and model in `base`."""
        self._send(Begin(str(base), self._config.logging.name))

    def order(self, step: int, digest: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Order the rollouts up to `step + max_staleness` that nobody has sampled yet, the last of
        them under `weights`, those after `step` steps. Does not wait for samplers.
        """
        staleness = self._config.rollout.max_staleness
        last = min(step + staleness, self._config.train.num_steps - 1)
        self._digests[step] = digest
        self._digests = {
            version: text for version, text in self._digests.items() if version >= step - staleness
        }
        self._shares.keep({*self._digests, *(version for version, _ in self._ordered.values())})
        for rollout in range(max(self._next, step), last + 1):
            due = max(self._oldest, rollout - staleness)
            if due not in self._digests or not self._order(rollout, due, step, weights):
                self._order(rollout, step, step, weights)
                self._say(
                    f"step {rollout}: sampled under the weights after {step} steps, since those of"
                    f" {due} are not in the checkpoint"
                )
        self._next = last + 1

    def go_back(self, step: int) -> None:
        """Have the next `order`, for `step`, order every rollout from there on anew: the run
        has left the weights of the earlier orders.
        """
        self._next = self._oldest = step
        self._rollbacks += 1
        self._sent = None  # they drop what they have not read
        self._ordered.clear()
        self._arrived.clear()
        self._digests.clear()

    def _order(
        self, rollout: int, version: int, step: int, weights: Iterable[tuple[str, Tensor]]
    ) -> bool:
        """Order a rollout under a version, unless it is on the disk; False if its weights are not
        there. The weights of `step` always are.
        """
        origin = origin_of(
            self._config, self._tasks.sample(rollout), self._digests[version], version
        )
        # Carried-over trajectories are only finished beside the next rollout.
        may_skip = not (self._config.rollout.carry_over and self._sent is not None)
        if may_skip and on_main(lambda: self._find_stored(rollout, origin)):
            return True
        if version == step and step not in self._shares:
            self._shares.add(step, weights)
        if version not in self._shares:
            return False
        self._ordered[rollout] = version, origin
        has_base, is_new = self._sent is not None, version != self._sent
        parts, self._sent = self._shares[version], version
        if self._base and self._by_group and self._frozen is None:
            self._frozen = self._shares.copied(self._base())
        elif self._base and not (self._by_group or has_base):
            parts = self._shares.copied(self._base()) | parts
        collectives.barrier()  # each sender has its share before anybody asks for it
        self._send(Order(rollout, version, is_new, self._rollbacks))
        if is_new and self._link and not self._by_group:
            for make in parts_of(parts, self._rollbacks):
                self._link.send(make)
        return True

    def _asked_for(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return this rank's share of the weights that the samplers want, in another thread.
        Weights of an order that is void may be gone: then any serve. Raises KeyError or ValueError
        where there are none.
        """
        if fetch.is_base and self._frozen is not None:
            return self._frozen
        if fetch.version not in self._shares and fetch.rollbacks < self._rollbacks:
            return self._shares.newest
        return self._shares[fetch.version]

    def take(self, step: int, metrics: Metrics) -> tuple[list[TrajectoryGroup], float]:
        """Return the rollout of a step, as soon as it has come, and the seconds that it took (0 if
        it was on the disk).

        Raises, on all ranks alike, Interrupted if the run is to stop, LinkLost if the samplers have
        ended or do not answer, and what ended their work.
        """
        ready = on_main(lambda: len(self._arrived) + (self._link.num_waiting if self._link else 0))
        metrics.add("engine", ready=ready)
        start = time.monotonic()
        stays: list[Delivery] = []  # on the first rank

        def find() -> Delivery | Exception | None:
            found = self._find(step, start)
            if isinstance(found, Delivery):
                stays.append(found)
                return replace(found, groups=None)
            return found

        with here.waiting("samples", f"rollout {step} of {SAMPLERS}", polls=True):
            while (found := on_main(find)) is None:
                self._stop_if_asked()
        if isinstance(found, Exception):
            raise found
        self._ordered.pop(step, None)
        for note in found.notes:
            self._say(note)
        metrics.add("engine", found.metrics)
        self.usage = [*found.usage] or self._unused  # the disk had it
        if self._link:
            seconds = self._link.seconds_sending + (self._sender.seconds if self._sender else 0.0)
            metrics.add("engine", sending_seconds=seconds - self._sending)
            self._sending = seconds
        groups = read_on_main(lambda: [*(stays[0].groups or ())])
        assert groups is not None  # the first rank has them
        return groups, found.metrics.get("sampling_seconds", 0.0)

    def flush(self) -> None:
        """Have on disk what has come. Raises OSError on all ranks if that fails."""
        on_main(self._accept_all)

    def staged(self) -> dict[str, dict[str, Tensor]]:
        """Name -> weights of the files with which a checkpoint of the present weights repeats the
        rollouts that are to come; each rank that sends has its share. Collective.
        """
        arrived = on_main(lambda: {*self._arrived})
        missing = {
            version
            for rollout, (version, _) in self._ordered.items()
            if rollout not in arrived and version != max(self._digests)
        }
        return self._shares.files(missing)

    def state_dict(self) -> dict[str, Any]:
        """Return the record of the weights for a checkpoint: version -> digest of its weights; and
        `oldest`, the first version since the run went back.
        """
        return {"oldest": self._oldest} | {str(each): text for each, text in self._digests.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, with the files of `read_staged`."""
        self._oldest = state.get("oldest", 0)
        self._digests = {int(version): state[version] for version in state if version != "oldest"}

    def read_staged(self, directory: Path) -> None:
        """Read the files that `staged` has left in a checkpoint, with as many senders or others."""
        self._shares.read(directory, self._digests)

    def close(self, exit_code: int) -> None:
        """Tell them how the run has ended. Not collective."""
        if self._link:
            self._link.send(encode(End(exit_code)))
            self._link.close()
        if self._sender:
            self._sender.close()

    def _send(self, message: Begin | Order) -> None:
        if self._link:
            self._link.send(encode(message))

    def _find_stored(self, rollout: int, origin: Origin) -> bool:
        """Look on the first rank for a rollout that an earlier process has sampled."""
        groups = self._recall(rollout, origin)
        if groups is not None:
            self._arrived[rollout] = Delivery(rollout, groups)
        return groups is not None

    def _find(self, rollout: int, start: float) -> Delivery | Exception | None:
        """Find, on the first rank, a rollout, or the error that ended the samplers' work; None if
        nothing came for now. Raises OSError if one could not be written.
        """
        if self._written and self._written.done():
            self._written.result()
        if rollout in self._arrived:
            return self._arrived.pop(rollout)
        if self._failure is None and not self._accept(_POLL_SECONDS):
            self._failure = self._alarm.given() if self._alarm else None
            heard = [each.last_heard for each in (self._link, self._alarm) if each]
            silent = time.monotonic() - max([start, *heard])
            if self._failure is None and silent > self._config.parallel.sampler_timeout:
                watch.ask(watch.SECONDS_TO_REPORT)
                raise LinkLost(
                    f"{SAMPLERS} have finished no turn for {silent:.0f} s; mend what they wait for"
                    " or raise --sampler-timeout; --resume goes on from the last checkpoint"
                )
        return self._failure

    def _accept_all(self) -> None:
        """Accept every message that has come, on the first rank, and wait until all is written."""
        with suppress(LinkLost):  # `take` says so
            while self._accept(0.0):
                pass
        if self._written:
            self._written.result()

    def _accept(self, seconds: float) -> bool:
        """Read a message on the first rank, and begin to write a rollout to disk, after the last
        one; False if none comes.
        """
        data = self._link.receive(seconds) if self._link else None
        if data is None:
            return False
        message = decode(data)
        if isinstance(message, Exception):
            self._failure = message
            return True
        if message.rollbacks < self._rollbacks:
            return True
        self._arrived[message.rollout] = message
        if self._written:
            self._written.result()
        _, origin = self._ordered[message.rollout]
        self._written = self._writer.submit(self._write, data, origin)
        return True

    def _write(self, delivery: bytes, origin: Origin) -> None:
        """Write a delivery on the writer thread; it is decoded again because the loop mutates its
        copy.
        """
        message = decode(delivery)
        self._keep(message.rollout, origin, message.groups)


class Sampler:
    """The loop of a rank that only samples. As a context manager it tells the trainers what ends
    its work, and ends as they do. Methods are collective over the samplers.
    """

    def __init__(
        self,
        config: StarPOConfig,
        role: Role,
        prepare: Callable[[Path, str | None], tuple[RolloutEngine, ChatRenderer, PretrainedConfig]],
    ) -> None:
        """`prepare` builds what samples, from the directory of tokenizer and configuration and the
        run's name.
        """
        self.stop = StopSignal()
        self.summary: dict[str, Any] = {}
        """Summary of the run; only trainers have one."""
        self._config, self._prepare = config, prepare
        self._link, self._alarm = role.link, role.alarm
        self._notes: list[str] = []
        self._weights: dict[str, Tensor] = {}
        self._memory: Tensor | None = None  # first rank: bytes of the weights that came last
        self._version = 0  # of the engine's weights
        self._receiver: Receiver | None = None
        if role.store is not None and config.fetches_weights:
            self._receiver = Receiver(
                role.store, len(role.senders), stop_if_alone=self._stop_if_alone
            )
        self._has_begun = self._has_told = False
        self._open: dict[int, range] = {}  # rollouts that are not complete: their tasks
        self._inbox: list[Begin | Order | Weights | End] = []  # first rank: messages that are read
        self._rollbacks = 0  # number of the last order
        self._is_reading = False  # weights, whose order is taken and may have become void since
        self._playing = ExitStack()  # ends what `_together` plays
        self._last_beat = time.monotonic()
        self._timers, self._gbytes = Timers(), 0.0

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the engine awake for the block; it is built once the trainers have begun."""
        if isinstance(begin := self._receive(), End):
            raise SystemExit(begin.exit_code)
        assert isinstance(begin, Begin)  # it comes first
        self._engine, renderer, self._hf = self._prepare(Path(begin.base), begin.name)
        adapter = partial(self._stream, are_adapters=True)
        has_adapter = self._config.lora.lora_sync == "adapter"
        self._sync = WeightSync(
            self._engine, self._export_weights, adapter=adapter if has_adapter else None
        )
        self._sampling = Sampling(
            self._config,
            self._engine,
            renderer,
            TaskSampler(self._config),
            Console(is_writer=False, num_steps=0),
            say=self._notes.append,
            interrupt=self._send_heartbeat,
            stop_if_asked=lambda: None,  # the trainers stop
            send_again=self._sync.send_again,
        )
        try:
            with self._engine.awake(), self._playing:
                self._begin_anew()
                yield
        finally:
            self._engine.shutdown()
            if self._receiver:
                self._receiver.leave()

    def _begin_anew(self) -> None:
        """Drop the trajectories that are unfinished."""
        self._playing.close()
        self._open.clear()
        self._together = self._playing.enter_context(self._sampling.together())

    def orders(self) -> Iterator[Order]:
        """Yield the rollouts to sample, until the trainers have ended."""
        self._timers.begin(0)
        while isinstance(order := self._receive(), Order):
            self._has_begun, here.step = True, order.rollout
            yield order
        if isinstance(order, End) and order.exit_code:
            raise SystemExit(order.exit_code)

    def load_weights(self, order: Order) -> None:
        """Give the engine the weights that an order is due under. Trajectories of the rollout
        before that are unfinished go on with them, unless the trainers have gone back since.
        """
        if order.rollbacks > self._rollbacks:
            self._rollbacks = order.rollbacks
            self._begin_anew()
        if not order.has_weights:  # the engine has them
            return
        self._version = order.version
        with self._timers.timed("sync"):
            if not self._receiver:  # else the engine's stream asks for them
                self._weights |= dict(self._receive_weights())  # the base of adapters comes once
            self._take_weights(order.version)

    def _receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the weights that follow an order on the link."""
        is_last = False
        while not is_last:
            part = self._next_part()
            yield from part.tensors(collectives.from_main(self._memory, sum(part.sizes)))
            self._memory, is_last = None, part.is_last

    def _next_part(self) -> Weights:
        """Return the next part of the weights, without its bytes. Raises SystemExit if the trainers
        have ended meanwhile.
        """
        self._is_reading = True
        part = self._receive()
        self._is_reading = False
        if isinstance(part, End):
            raise SystemExit(part.exit_code)
        assert isinstance(part, Weights)  # nothing else is looked for
        self._gbytes += sum(part.sizes) / 1e9
        return part

    def _stop_if_alone(self) -> None:
        """Raise what ends the job if the trainers have hung up."""
        if on_main(self._has_hung_up):
            self._next_part()

    def _has_hung_up(self) -> bool:
        """Return whether they have, as the first rank knows a second after a failure."""
        end = time.monotonic() + _SECONDS_TO_HANG_UP
        while self._link and not self._link.is_closed and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self._link is not None and self._link.is_closed

    def _take_weights(self, version: int) -> None:
        if self._config.rollout.carry_over_cache == "recompute":
            self._together.drop_caches()
        else:
            self._engine.seal_caches()
        is_again = bool(self._open)
        # An engine that is not loaded again counts one up, and a server labels what it samples.
        self._engine.weight_version = version - (not is_again)
        self._sync.send(again=is_again)

    def sample(self, step: int) -> Iterator[tuple[int, list[TrajectoryGroup]]]:
        """Play the rollout of a step, and the rest of the one before; yields each rollout that is
        complete. With `--carry-over` the last trajectories are left for the next call.
        """
        tasks, share = self._sampling.tasks.sample(step), self._config.rollout.carry_over
        if not share:
            with self._timers.timed("rollout"):
                groups = self._sampling.sample(step, tasks)
            yield step, groups
            return
        self._open[step] = self._together.add(tasks)
        is_last = step + 1 == self._config.train.num_steps
        for rollout, indices in list(self._open.items()):
            most = 0 if rollout < step or is_last else int(share * len(indices))
            with self._timers.timed("rollout"):
                self._together.play(partial(_are_few, indices, most))
                if rollout == step:  # answers of environments in the meantime are not late
                    self._together.finish_turns()
            if not self._together.unfinished.intersection(indices):
                del self._open[rollout]
                yield rollout, self._sampling.judge(rollout, self._together.take(indices))

    def deliver(self, rollout: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Send a rollout to the trainers."""
        own = self._timers.usage()
        waited = own.seconds["waiting_weights"]
        metrics = engine_metrics(self._engine) | {
            "weights_gbytes": self._gbytes,
            "sampling_seconds": sum(own.seconds.values()) - waited,
            "waiting_seconds": waited,
        }
        everyone = tuple(collectives.gather_objects(own))
        self._timers, self._gbytes = Timers(), 0.0
        self._timers.begin(rollout + 1)
        if self._link:
            said = tuple(self._notes)
            delivery = Delivery(rollout, groups, metrics, said, self._rollbacks, everyone)
            self._link.send(encode(delivery))
        self._notes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, LinkLost) and not self._has_begun:
            raise SystemExit(2) from error  # the trainers have said why
        if isinstance(error, PORTABLE) and not isinstance(error, LinkLost):
            if self._link:
                self._link.send(encode(error))  # behind what was delivered
            elif self._alarm:  # the others may not know of the error
                self._alarm.give(error)
            self._wait_for_end()  # they say it
        if isinstance(error, Interrupted):  # they have hung up, or will
            self._wait_for_end()

    def _wait_for_end(self) -> NoReturn:
        while not isinstance(message := self._receive(), End):
            pass
        raise SystemExit(message.exit_code)

    def _receive(self) -> Begin | Order | Weights | End:
        """Return the next message. Raises LinkLost if the trainers are gone."""
        with here.waiting("weights", f"weights of {TRAINERS}", polls=True):
            while (message := on_main(self._next_message)) is None:
                if self.stop.agreed():
                    self._request_stop()
        return message

    def _next_message(self) -> Begin | Order | Weights | End | None:
        """Read what has come, on the first rank, and return the first message of it that is not
        void, a part of weights if one is read; None if there is none for now. Raises LinkLost if
        none can come any more.
        """
        kinds = (Weights, End) if self._is_reading else (Begin, Order, End)

        def found() -> list[Any]:
            return [message for message in self._inbox if isinstance(message, kinds)]

        try:
            while self._link and (data := self._link.receive(0.0 if found() else _POLL_SECONDS)):
                self._inbox.append(decode(data))
        except LinkLost:
            if not found():
                raise
        latest = max((m.rollbacks for m in self._inbox if isinstance(m, Order)), default=0)
        valid = {latest, self._rollbacks} if self._is_reading else {latest}
        self._inbox = [m for m in self._inbox if getattr(m, "rollbacks", latest) in valid]
        message = next(iter(found()), None)
        if message is not None:
            self._inbox = [other for other in self._inbox if other is not message]
        if isinstance(message, Weights):  # the bytes go to the others by themselves
            self._memory, message = message.memory, replace(message, memory=None)
        return message

    def _send_heartbeat(self) -> None:
        """Give a sign of life after a turn. Raises Interrupted if the trainers have hung up, or if
        a rank other than the first received a signal.
        """
        if self._link is None:
            self.stop.interrupt()
        elif self._link.is_closed:
            raise Interrupted
        elif self.stop.received:
            self._request_stop()
        teller = self._link or self._alarm
        if teller and time.monotonic() - self._last_beat > _SECONDS_BETWEEN_BEATS:
            teller.beat()
            self._last_beat = time.monotonic()

    def _request_stop(self) -> None:
        """Have the trainers stop the run, because a sampling rank received the signal."""
        if self._link and not self._has_told:
            self._has_told = True
            self._link.send(encode(Interrupted()))

    def _export_weights(self, shard: EngineShard | None) -> Iterable[tuple[str, Tensor]]:
        """Stream the weights of the last order as the engine takes them, without adapters."""
        weights = self._stream(are_adapters=False)
        return weights if shard is None else cut_stream(weights, self._hf, *shard)

    def _stream(self, *, are_adapters: bool) -> Iterator[tuple[str, Tensor]]:
        if self._receiver:
            is_base = self._config.lora.lora_sync == "adapter" and not are_adapters
            weights = self._receiver.receive(
                self._version, is_base=is_base, rollbacks=self._rollbacks
            )
            for name, tensor in weights:
                self._gbytes += tensor.nbytes / 1e9
                yield name, tensor
        for name, tensor in self._weights.items():
            if (".lora_" in name) == are_adapters:
                yield name, tensor.to(device())


def parts_of(weights: Mapping[str, Tensor], rollbacks: int) -> Iterator[Callable[[], bytes]]:
    """Yield, for each part of the weights, the call that makes its message."""
    parts = [*group_by_size(weights.items(), lambda one: one[1].nbytes, PART_BYTES)]
    for index, tensors in enumerate(parts):
        is_last = index == len(parts) - 1
        yield partial(_encoded, tensors, is_last=is_last, rollbacks=rollbacks)


def _encoded(tensors: Sequence[tuple[str, Tensor]], *, is_last: bool, rollbacks: int) -> bytes:
    return encode(Weights.of(tensors, is_last=is_last, rollbacks=rollbacks))


def _are_few(tasks: range, most: int, left: set[int]) -> bool:
    return len(left.intersection(tasks)) <= most
