"""Ranks, and what they tell each other over the gloo control group.

Tensors of the training step travel over the backend of the device (NCCL or gloo); everything else -
trajectories, metrics, per-token results that every rank needs - travels over gloo, so that no NCCL
kernel spins while engines generate.
"""

import datetime
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ragen_mega.ranks import launcher
from ragen_mega.ranks.waits import here

T = TypeVar("T")
_SECONDS_OF_SILENCE = 20.0
"""Time after which a rank says that it waits for others."""
MINUTES_TO_WAIT = 30.0
"""Time for which ranks wait for each other, unless one may be busy for longer."""
_control_group: dist.ProcessGroup | None = None
_timeout = datetime.timedelta(minutes=MINUTES_TO_WAIT)
"""Time for which ranks wait for each other in the control group."""
_store: dist.Store | None = None
"""Store in which the ranks of the job find each other."""


def start(
    timeout_minutes: float = MINUTES_TO_WAIT,
    *,
    interface: str | None = None,
    num_samplers: int = 0,
) -> None:
    """Join the job that torchrun started, or a job of one process without torchrun; idempotent. A
    job on one node listens on the loopback, or on `interface`, if engines elsewhere have to be
    reached. The last `num_samplers` ranks only sample, and may share GPUs with others.
    `timeout_minutes` are those for which ranks wait for each other between training steps.

    Raises ValueError on a rank that has no GPU where others have one, and where others than
    torchrun promise ranks.
    """
    global _store
    if dist.is_initialized():
        return
    launcher.forget_foreign_ranks()
    launcher.open_many_files()  # connections of ranks are some
    launcher.keep_caches_at_home()
    processors = launcher.num_processors()
    if "OMP_NUM_THREADS" not in os.environ and processors < torch.get_num_threads():
        torch.set_num_threads(processors)  # torch does not know of quotas
    timeout = datetime.timedelta(minutes=timeout_minutes)
    is_alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if is_alone:  # no other node has to reach this one, and nobody else may
        name = interface or launcher.loopback()
        os.environ.update({launcher.GLOO_INTERFACE: name, launcher.NCCL_INTERFACE: name})
    if not launcher.is_rank():
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )
        _store, rank, world_size = dist.HashStore(), 0, 1
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            may_share = rank >= world_size - num_samplers
            _take_device(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count(), may_share)
        if is_alone:
            _store = _private_store(timeout)
        else:
            _store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun --max-restarts hands restarted ranks the store of those that died, with their
        # addresses in it.
        _store = dist.PrefixStore(
            f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store
        )
    _join(_store, rank, world_size, timeout)


def _private_store(timeout: datetime.timedelta) -> dist.Store:
    """Return the file in which the ranks of one machine meet: a TCP store would listen on every
    interface and ask nobody who they are.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull
    if error_file == os.devnull:
        raise ValueError(
            "ranks of one machine meet in torchrun's log folder, and --log-dir says that there is"
            " none; drop --log-dir"
        )
    # <private folder>/<attempt>/<local rank>/error.json: torchrun makes the first with mode 0700.
    store = dist.FileStore(str(Path(error_file).parents[1] / "store"), -1)
    store.set_timeout(timeout)
    return store


def board() -> dist.Store:
    """Return a connection to the store that all ranks of the job see, for another thread."""
    assert _store is not None  # since `start`
    clone = _store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
    return dist.PrefixStore("board", clone)


def divide(num_last: int, timeout_minutes: float = MINUTES_TO_WAIT) -> dist.Store:
    """Divide the job into two parts, the last `num_last` ranks and the others: from now on rank,
    world size and all collectives, megatron-core's too, refer to the part that this rank is in.
    Returns a store that both parts see. Collective over the whole job.
    """
    index, first, store = rank(), world_size() - num_last, _store
    assert store is not None  # since `start`
    name, start, end = ("last", first, world_size()) if index >= first else ("first", 0, first)
    barrier()
    stop()
    part = dist.PrefixStore(f"part_{name}", store)
    _join(part, index - start, end - start, datetime.timedelta(minutes=timeout_minutes))
    return dist.PrefixStore("parts", store)


def _join(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    global _control_group, _timeout
    has_gpu = torch.cuda.is_available()
    word = threading.Timer(_SECONDS_OF_SILENCE, _say_what_is_awaited, (rank, world_size))
    word.daemon = True
    if rank < 2:  # in case that the others wait for rank 0 or 1
        word.start()
    try:
        dist.init_process_group(
            "nccl" if has_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=MINUTES_TO_WAIT) if has_gpu else timeout,
        )
    finally:
        word.cancel()
    _timeout = timeout
    world = dist.group.WORLD
    _control_group = dist.new_group(backend="gloo", timeout=timeout) if has_gpu else world


def _say_what_is_awaited(rank: int, world_size: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    text = f"rank {rank} waits for the other ranks to join, {world_size} in all, since"
    text += f" {_SECONDS_OF_SILENCE:g} s"
    if limit != resource.RLIM_INFINITY:
        text += f"; ulimit -v leaves each {limit >> 20} MiB of addresses, without which it may wait"
        text += " for ever: raise it"
    os.write(2, f"{text}\n".encode())


def _take_device(local_rank: int, num_gpus: int, may_share: bool) -> None:
    if local_rank >= num_gpus and not may_share:
        raise ValueError(
            f"every rank needs a GPU of its own, and local rank {local_rank} finds {num_gpus}; "
            f"start torchrun with --nproc-per-node {num_gpus}"
        )
    torch.cuda.set_device(local_rank % num_gpus)


def stop() -> None:
    """Leave the job."""
    global _control_group, _store
    if dist.is_initialized():
        dist.destroy_process_group()
    _control_group = _store = None


def device() -> torch.device:
    """Return the device of this rank."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def ranks_per_device() -> int:
    """Return how many ranks of this machine compute on one of its GPUs, at most. NCCL joins none
    that share one.
    """
    return -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // max(1, torch.cuda.device_count()))


def rank() -> int:
    """Return this process's index among all, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this rank prints and writes."""
    return rank() == 0


def _among_ranks(what: str, operation: Callable[..., Any], *operands: Any, **options: Any) -> None:
    """Call a collective of torch.distributed where there are several ranks; `what` says for what
    this rank waits meanwhile.
    """
    if world_size() > 1:
        with here.waiting("ranks", what):
            operation(*operands, group=_control_group, **options)


def barrier() -> None:
    """Return once every rank has come here."""
    _among_ranks("all ranks", dist.barrier)


def gather_objects(value: Any) -> list[Any]:
    """Return the `value` of every rank, in rank order, on every rank."""
    values: list[Any] = [value] * world_size()
    _among_ranks("a word of every rank", dist.all_gather_object, values, value)
    return values


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and give every rank its result, or its ValueError or OSError.
    Collective.
    """
    outcome: list[Any] = [None, None]  # result and failure
    if is_main():
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    _among_ranks("the answer of rank 0", dist.broadcast_object_list, outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result


def on_each(function: Callable[[], T]) -> T:
    """Call `function` on every rank and return its result there; if it raises ValueError or OSError
    on any, all ranks raise the error of the first such rank. Collective.
    """
    failure = None
    try:
        result = function()
    except (ValueError, OSError) as error:
        failure = error
    for first in filter(None, gather_objects(failure)):
        raise first
    return result


def exchange_bytes(parts: Sequence[bytes]) -> list[memoryview]:
    """Send `parts[r]` to rank r; returns what every rank has sent to this one. Collective."""
    if world_size() == 1:
        return [memoryview(part) for part in parts]
    sizes = torch.tensor([len(part) for part in parts])
    arriving = torch.empty_like(sizes)
    joined = bytearray().join([*parts, b"."])  # no tensor is a view of nothing
    outgoing = torch.frombuffer(joined, dtype=torch.uint8)
    with here.waiting("ranks", "trajectories of every rank"):
        dist.all_to_all_single(arriving, sizes, group=_control_group)
        incoming = torch.empty(int(arriving.sum()), dtype=torch.uint8)
        dist.all_to_all_single(
            incoming,
            outgoing[: int(sizes.sum())],
            arriving.tolist(),
            sizes.tolist(),
            group=_control_group,
        )
    return [memoryview(part.numpy()) for part in incoming.split(arriving.tolist())]


def from_main(memory: Tensor | None, num_bytes: int) -> Tensor:
    """Return the bytes [num_bytes] uint8 that rank 0 has as `memory`, on every rank. Collective."""
    held = torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory
    _among_ranks("bytes of rank 0", dist.broadcast, held, src=0)
    return held


def max_over_ranks(tensor: Tensor) -> Tensor:
    """Return the element-wise maximum of a CPU tensor over all ranks."""
    _among_ranks("a maximum over ranks", dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
    return tensor


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a CPU tensor over all ranks. With disjoint contributions and zeros
    elsewhere it is an exact exchange.
    """
    _among_ranks("a sum over ranks", dist.all_reduce, tensor)
    return tensor


def consecutive_group(size: int) -> dist.ProcessGroup | None:
    """Return the gloo group of the `size` consecutive ranks to which this rank belongs; None for 1.
    Collective over all ranks.
    """
    if size == 1:
        return None
    groups = [
        dist.new_group(range(start, start + size), timeout=_timeout, backend="gloo")
        for start in range(0, world_size(), size)
    ]
    return groups[rank() // size]
