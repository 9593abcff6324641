"""torch's Python side of the fake device: `torch.cuda` of a Hopper GPU with 80 GiB, and "nccl" as
gloo with NCCL's demands.

The C++ half, which holds the tensors, is device.cpp.
"""

import contextlib
import ctypes
import mmap
import os
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda_device as native
import torch
import torch.cuda
import torch.cuda.nccl
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from tests.fake_cuda.counts import one_operation

NUM_DEVICES = int(os.environ["RAGEN_FAKE_CUDA"])
TOTAL_MEMORY = int(os.environ.get("RAGEN_FAKE_CUDA_GIB", "80")) * 2**30
CAPABILITY = (9, 0)
PROPERTIES = types.SimpleNamespace(
    name="fake H100",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=TOTAL_MEMORY,
    multi_processor_count=132,
    L2_cache_size=50 * 2**20,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    uuid="GPU-fake",
    pci_domain_id=0,
    pci_bus_id=0,
    pci_device_id=0,
)


def install() -> None:
    """Make torch a CUDA build with `NUM_DEVICES` devices."""
    native.set_device_count(NUM_DEVICES)
    with _stderr_closed():  # torch warns of every operator that has a kernel already
        native.register_collectives()
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch._C._get_accelerator = lambda *args: torch.device("cuda")
    # what torch's Python calls inside its own modules is found in those
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, value in {**_DEVICES, **_MEMORY, **_STREAMS, **_RANDOM}.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    # separate functions: torch's compiler refuses one that is known under two names
    torch._C._cuda_setDevice = lambda device: set_device(device)
    torch._C._cuda_getDevice = lambda: native.get_device()
    torch._C._cuda_getDeviceCount = lambda: NUM_DEVICES
    torch._C._cuda_getCurrentRawStream = lambda device=0: 0
    torch.Generator = Generator
    torch.cuda.nccl.version = lambda: (2, 28, 3)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)
    # what the compiler would fuse is pointwise here, so it counts as one kernel
    torch.compile = lambda function=None, *args, **options: (
        one_operation if function is None else one_operation(function)
    )
    _install_attention()
    _install_storages()
    _install_nccl()
    if folder := os.environ.get(SHARED):
        _publish_memory(Path(folder))
        os.register_at_fork(after_in_child=lambda: _publish_memory(Path(folder)))


def _install_attention() -> None:
    """16-bit attention takes the flash kernel, as on CUDA; for a device without kernels torch
    itself would choose the quadratic one.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.is_cuda and query.itemsize == 2 and attn_mask is None and not dropout_p:
            return flash(query, key, value, is_causal=is_causal, scale=scale)[0]
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


# --------------------------------------------------------------------------------------------------
# devices


def _index(device: Any) -> int:
    if device is None or device == -1:
        return native.get_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return native.get_device() if index is None else index


def set_device(device: Any) -> None:
    """As torch.cuda's; raises if there is no such device."""
    if _index(device) >= NUM_DEVICES:
        raise RuntimeError("CUDA error: invalid device ordinal")
    native.set_device(_index(device))


class Device:
    """torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.previous = native.get_device()
        set_device(self.index)

    def __exit__(self, *error: Any) -> None:
        native.set_device(self.previous)


class DeviceOf(Device):
    """torch.cuda.device_of: the device of a tensor, the current one for a tensor on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.is_cuda else None)


def _call(function: Callable[[], None], **_: Any) -> None:
    function()


_DEVICES: dict[str, Any] = dict(
    is_available=lambda: True,
    is_initialized=lambda: True,
    init=lambda: None,
    _is_compiled=lambda: True,
    _lazy_init=lambda: None,
    _lazy_call=_call,
    device_count=lambda: NUM_DEVICES,
    current_device=native.get_device,
    set_device=set_device,
    device=Device,
    device_of=DeviceOf,
    synchronize=lambda device=None: native.synchronize_device(_index(device)),
    get_device_capability=lambda device=None: CAPABILITY,
    get_device_name=lambda device=None: PROPERTIES.name,
    get_device_properties=lambda device=None: PROPERTIES,
    get_arch_list=lambda: ["sm_90"],
    is_bf16_supported=lambda *args, **options: True,
    can_device_access_peer=lambda device, peer: True,
    is_current_stream_capturing=lambda: False,
    current_blas_handle=lambda: 0,
    has_magma=False,
)


# --------------------------------------------------------------------------------------------------
# memory


class _Runtime:
    """torch.cuda.cudart(): page-locking memory of the host. Status 0 is success."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        native.pin(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        native.unpin(pointer)
        return 0


SHARED = "RAGEN_FAKE_CUDA_SHARED"
"""Environment variable: a folder in which the processes that share a device say how much of its
memory they hold. Without it none knows of the others.
"""


_published: list[ctypes.c_int64] = []  # they keep the file mapped


def _publish_memory(folder: Path) -> None:
    """Keep this process's allocated bytes in a file of the folder. Raises OSError if the disk is
    full.
    """
    with (folder / str(os.getpid())).open("w+b") as file:
        file.write(bytes(8))  # a hole that finds no room when it is first written is a bus error
        file.flush()
        _published.append(ctypes.c_int64.from_buffer(mmap.mmap(file.fileno(), 8)))
    native.count_allocated_at(ctypes.addressof(_published[-1]))


def _allocated_by_all() -> int:
    """Bytes that this process, and those that publish theirs and are alive, hold."""
    folder = os.environ.get(SHARED)
    if not folder:
        return native.memory()[0]
    return sum(
        int.from_bytes(file.read_bytes(), "little")
        for file in Path(folder).iterdir()
        if Path("/proc", file.name).exists()
    )


_MEMORY: dict[str, Any] = dict(
    cudart=_Runtime,
    check_error=lambda status: None,
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    mem_get_info=lambda device=None: (TOTAL_MEMORY - _allocated_by_all(), TOTAL_MEMORY),
    memory_allocated=lambda device=None: native.memory()[0],
    memory_reserved=lambda device=None: native.memory()[0],
    max_memory_allocated=lambda device=None: native.memory()[1],
    max_memory_reserved=lambda device=None: native.memory()[1],
    reset_peak_memory_stats=lambda device=None: native.reset_peak(),
    memory_stats=lambda device=None: {"allocated_bytes.all.current": native.memory()[0]},
    host_memory_stats=lambda: {},
)


def _install_storages() -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        native.resize_storage(empty.set_(self, 0, (0,), (1,)), int(size))
        return self

    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage._share_cuda_ = _share
    torch.UntypedStorage._new_shared_cuda = _open_shared
    torch.UntypedStorage._release_ipc_counter_cuda = lambda *args, **options: None


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """What torch pickles of a CUDA tensor's memory: device, handle, bytes, offset, counter,
    event.
    """
    handle = f"{os.getpid()} {storage.data_ptr()}".encode()
    shared_cache[handle, 0] = StorageWeakRef(storage)  # where this process itself looks first
    return (storage.device.index, handle, storage.nbytes(), 0, b"", 0, b"", False)


@one_operation
def _open_shared(device: int, handle: bytes, num_bytes: int, *_: Any) -> torch.UntypedStorage:
    """The memory of another process's handle, as it is now: a copy, where CUDA would map it."""
    process, address = handle.decode().split()
    with torch.cuda.device(device):
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")
    with open(f"/proc/{process}/mem", "rb", buffering=0) as source:
        source.seek(int(address))
        while target and (count := source.readinto(target)):
            target = target[count:]
    if target:
        raise RuntimeError(f"CUDA error: the memory behind {handle.decode()} is gone")
    return memory.untyped_storage()


# --------------------------------------------------------------------------------------------------
# streams


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **numbers: int) -> "Stream":
        if numbers:
            return super().__new__(cls, **numbers)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle that kernels are launched with."""
        return self.stream_id

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream or current_stream())
        self.recorded_at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end.recorded_at - self.recorded_at) * 1e3

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(stream or current_stream())


class StreamContext:
    """torch.cuda.stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.previous = current_stream(self.stream.device)
            native.set_stream(self.stream.device_index, self.stream.stream_id)

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            native.set_stream(self.previous.device_index, self.previous.stream_id)


def _stream(device: int, number: int) -> Stream:
    kind = int(torch._C._autograd.DeviceType.CUDA)
    return Stream(stream_id=number, device_index=device, device_type=kind)


def current_stream(device: Any = None) -> Stream:
    """As torch.cuda's."""
    return _stream(_index(device), native.current_stream(_index(device)))


def default_stream(device: Any = None) -> Stream:
    """As torch.cuda's."""
    return _stream(_index(device), native.default_stream(_index(device)))


def set_stream(stream: Stream) -> None:
    """As torch.cuda's."""
    native.set_stream(stream.device_index, stream.stream_id)


_STREAMS: dict[str, Any] = dict(
    Stream=Stream,
    ExternalStream=Stream,
    Event=Event,
    StreamContext=StreamContext,
    stream=StreamContext,
    current_stream=current_stream,
    default_stream=default_stream,
    set_stream=set_stream,
)


# --------------------------------------------------------------------------------------------------
# random numbers: from the CPU


class Generator(torch.Generator):
    """torch.Generator, on the CPU whatever the device."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")


_RANDOM: dict[str, Any] = dict(
    manual_seed=torch.default_generator.manual_seed,
    manual_seed_all=torch.default_generator.manual_seed,
    seed=torch.seed,
    seed_all=torch.seed,
    initial_seed=torch.initial_seed,
    get_rng_state=lambda device="cuda": torch.get_rng_state(),
    set_rng_state=lambda new_state, device="cuda": torch.set_rng_state(new_state),
    get_rng_state_all=lambda: [torch.get_rng_state()] * NUM_DEVICES,
    set_rng_state_all=lambda states: torch.set_rng_state(states[0]),
    default_generators=(torch.default_generator,) * NUM_DEVICES,
)


# --------------------------------------------------------------------------------------------------
# collectives

_COLLECTIVES = (
    "all_reduce broadcast reduce gather scatter send recv isend irecv all_gather"
    " all_gather_into_tensor all_to_all all_to_all_single reduce_scatter reduce_scatter_tensor"
    " all_gather_single reduce_scatter_single"  # torch 2.13's names of two
).split()
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")
_nccl_groups: list[dist.ProcessGroup] = []
_groups_that_met: list[dist.ProcessGroup] = []
_all_gather = dist.all_gather  # gloo's


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    group = group or dist.group.WORLD
    return any(group is known for known in _nccl_groups)


def _install_nccl() -> None:
    """Groups over "nccl" become groups over gloo, which remember that NCCL was meant."""
    init_process_group, new_group, destroy = (
        dist.init_process_group,
        dist.new_group,
        dist.destroy_process_group,
    )

    def as_gloo(backend: Any) -> Any:
        return "cpu:gloo,cuda:gloo" if "nccl" in str(backend) else backend

    def init(backend: Any = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        options.pop("pg_options", None)
        init_process_group(as_gloo(backend or "nccl"), *args, **options)
        if "nccl" in str(backend or "nccl"):
            _nccl_groups.append(dist.group.WORLD)

    def new(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        options.pop("device_id", None)
        wanted = backend or ("nccl" if _is_nccl(None) else "gloo")
        group = new_group(ranks, timeout, as_gloo(wanted), None, *args, **options)
        if "nccl" in str(wanted) and isinstance(group, dist.ProcessGroup):
            _nccl_groups.append(group)
        return group

    helper = c10d._new_process_group_helper

    def form(
        size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any
    ) -> Any:
        """As programs form a group with ranks of other jobs."""
        group, *store = helper(size, rank, ranks, as_gloo(backend), *args, **options)
        if "nccl" in str(backend):
            _nccl_groups.append(group)
        return group, *store

    def forget(group: dist.ProcessGroup | None = None) -> None:
        destroy(group)
        for groups in (_nccl_groups, _groups_that_met):
            groups[:] = [known for known in groups if group and known is not group]

    get_backend, default_device = dist.get_backend, c10d._get_object_coll_device
    replacements: dict[str, Any] = dict(
        init_process_group=init,
        new_group=new,
        _new_process_group_helper=form,
        destroy_process_group=forget,
        get_backend=lambda group=None: "nccl" if _is_nccl(group) else get_backend(group),
        is_nccl_available=lambda: True,
        # objects and barriers of NCCL's groups travel as tensors of the device
        _get_object_coll_device=lambda group=None: (
            "cuda" if _is_nccl(group) else default_device(group)
        ),
        _get_pg_default_device=lambda group=None: torch.device(
            "cuda" if _is_nccl(group) else "cpu"
        ),
    )
    replacements |= {
        name: _checked(getattr(dist, name)) for name in _COLLECTIVES if hasattr(dist, name)
    }
    for name, value in replacements.items():
        for module in (dist, c10d):
            if hasattr(module, name):
                setattr(module, name, value)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _checked(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Check that NCCL gets tensors on the device and gloo, as this project uses it, those on the
    host.
    """

    def checked(*args: Any, **options: Any) -> Any:
        groups = [value for value in args if isinstance(value, dist.ProcessGroup)]
        group = options.get("group") or (groups[0] if groups else None)
        is_nccl = _is_nccl(group)
        for tensor in _tensors((*args, *options.values())):
            if tensor.is_cuda != is_nccl:
                raise RuntimeError(
                    f"{collective.__name__} over {'NCCL' if is_nccl else 'gloo'}: No backend type"
                    f" associated with device type {tensor.device.type}"
                )
        if is_nccl and collective.__name__ not in _POINT_TO_POINT:
            _meet(group or dist.group.WORLD)
        return collective(*args, **options)

    return checked


def _meet(group: dist.ProcessGroup) -> None:
    """As NCCL does when the ranks of a group first communicate: each must have its own device."""
    if group.size() == 1 or any(group is known for known in _groups_that_met):
        return
    mine = torch.tensor([native.get_device()], device="cpu")
    found = [torch.empty_like(mine) for _ in range(group.size())]
    _all_gather(found, mine, group=group)
    if len(devices := sorted(map(int, found))) > len({*devices}):
        raise RuntimeError(f"NCCL: Duplicate GPU detected: the ranks of a group are on {devices}")
    _groups_that_met.append(group)
