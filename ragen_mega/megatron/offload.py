"""Tensors that leave the device and come back: each storage is copied to host memory and emptied in
place.

`untyped_storage().resize_(0)` frees the memory but keeps the tensors: parameters, views into
megatron-core's contiguous buffers, tied weights and whatever an optimizer refers to are intact once
the storage has its size and bytes back.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from ragen_mega.megatron import cpu

Kind = Literal["parameters", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
NamedTensors = Callable[[], Iterable[tuple[Kind, str, Tensor]]]
"""Yields the current tensors, parameters first: a storage belongs to the kind and the name under
which it appears first.
"""
KindTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields all or some of the current tensors of a kind, by name."""
HostCopy = Mapping[str, Tensor]
"""Name of a storage -> its bytes [N] uint8 in host memory."""
_PAGES_OF_ITS_OWN = 32 * 2**20
"""Size from which on the C library gives an allocation its own pages."""


class Offloadable:
    """The tensors of one model; each kind is either on the device or away.

    Storages are told apart by their address, so that aliases move once. Host memory is allocated at
    the first move of a storage (pinned where the device is a GPU) and kept for the next. Gradients
    are not copied: they come back as zeros.
    """

    def __init__(self, tensors: NamedTensors, name: str = "model") -> None:
        self.name = name
        self.bring_back: Callable[..., None] | None = None
        """Called with the kinds that `require` finds away; if None, `require` raises instead."""
        self.forget: Callable[[], None] | None = None
        """Called when anything leaves, to free what can be recomputed from the parameters."""
        self._tensors = tensors
        self._parked: set[Kind] = set()
        self._away: dict[Kind, dict[str, tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[str, Tensor] = {}

    def offload(self, *kinds: Kind) -> int:
        """Move kinds (none named: all) to host memory and return how many bytes of the device this
        has freed.
        """
        leaving = {
            kind: found
            for kind, found in self._storages().items()
            if kind in (kinds or KINDS) and kind not in self._away
        }
        for kind, storages in leaving.items():
            self._send(kind, storages)
        if leaving and self.forget is not None:
            self.forget()
        if leaving and not cpu.is_active():
            torch.cuda.empty_cache()  # for other processes
        return sum(size for kind in leaving for _, size in self._away[kind].values())

    def restore(self, *kinds: Kind) -> int:
        """Bring kinds (none named: all) back to the device, parameters and optimizer as they left.
        Returns the bytes.
        """
        returning = [kind for kind in kinds or KINDS if kind not in self._parked]
        return sum(self._bring(kind, self._away.pop(kind, {})) for kind in returning)

    def park(self, kind: Kind) -> None:
        """Let a kind leave for good: only `borrowed` brings tensors of it back."""
        self._parked.add(kind)
        self.offload(kind)

    @contextmanager
    def borrowed(self, kind: Kind, tensors: KindTensors) -> Iterator[None]:
        """Have some tensors of a kind on the device for the block, also those that it creates. They
        leave again unless the whole kind is on the device.
        """
        if (away := self._away.get(kind)) is None:
            yield
            return
        names = [name for name in (f"{kind}/{name}" for name, _ in tensors()) if name in away]
        self._bring(kind, {name: away.pop(name) for name in names})
        yield
        self._send(kind, {f"{kind}/{name}": t.untyped_storage() for name, t in tensors()})

    def require(self, *kinds: Kind) -> None:
        """Bring these kinds back before a use. Raises RuntimeError if a kind is away and nobody
        brings it back.
        """
        missing = [kind for kind in kinds if kind in self._away and kind not in self._parked]
        if missing:
            if self.bring_back is None:
                raise RuntimeError(
                    f"{' and '.join(missing)} of the {self.name} are offloaded; restore() them"
                    " before they are used"
                )
            self.bring_back(*missing)

    def on_device(self) -> dict[Kind, int]:
        """Return the bytes of each kind that are on the device, each storage counted once."""
        return {
            kind: sum(storage.nbytes() for storage in found.values())
            for kind, found in self._storages().items()
        }

    def away(self) -> dict[Kind, int]:
        """Return the bytes of each kind that are off the device."""
        return {kind: sum(size for _, size in self._away.get(kind, {}).values()) for kind in KINDS}

    def snapshot(self, kind: Kind) -> HostCopy:
        """Return a copy of a kind, in new host memory."""
        self.require(kind)
        copy: dict[str, Tensor] = {}
        _copy_to(copy, self._storages()[kind])
        return copy

    @contextmanager
    def replaced(self, kind: Kind, values: HostCopy) -> Iterator[None]:
        """Give the tensors of a kind the `values` of a `snapshot` for the block, and restore their
        own values afterwards.
        """
        self.require(kind)
        storages = self._storages()[kind]
        _copy_to(self._host, storages)
        try:
            _fill(storages, values)
            yield
        finally:
            _fill(storages, self._host)

    def _send(self, kind: Kind, storages: Mapping[str, torch.UntypedStorage]) -> None:
        if kind != "gradients":
            _copy_to(self._host, storages)
        away = self._away.setdefault(kind, {})
        for name, storage in storages.items():
            away[name] = storage, storage.nbytes()
            storage.resize_(0)

    def _bring(self, kind: Kind, storages: Mapping[str, tuple[torch.UntypedStorage, int]]) -> int:
        for name, (storage, size) in storages.items():
            storage.resize_(size)
            if kind == "gradients":
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(self._host[name], non_blocking=True)
        return sum(size for _, size in storages.values())

    def _storages(self) -> dict[Kind, dict[str, torch.UntypedStorage]]:
        """Return the storages on the device: kind -> name -> storage."""
        found: dict[Kind, dict[str, torch.UntypedStorage]] = {kind: {} for kind in KINDS}
        seen = set()
        for kind, name, tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[kind][f"{kind}/{name}"] = storage
        return found


def _copy_to(host: dict[str, Tensor], storages: Mapping[str, torch.UntypedStorage]) -> None:
    """Copy storages into `host`, which grows as needed."""
    for name, storage in storages.items():
        if name not in host or len(host[name]) != storage.nbytes():
            host[name] = _host_memory(storage.nbytes(), for_gpu=storage.is_cuda)
        host[name].copy_(_bytes(storage), non_blocking=True)
    if any(storage.is_cuda for storage in storages.values()):
        torch.cuda.current_stream().synchronize()


def _host_memory(num_bytes: int, *, for_gpu: bool) -> Tensor:
    """[N] uint8, pinned for copies to a GPU where the system allows it."""
    if not for_gpu or num_bytes < _PAGES_OF_ITS_OWN:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=for_gpu)
    # torch's pinned allocator would round up to a power of two, which for a model's buffers is up
    # to twice the host memory.
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    if status := int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0)):
        warnings.warn(
            f"host memory cannot be pinned (cudaHostRegister: error {status}), so that --offload is"
            " slower; raise the limit on locked memory (ulimit -l)",
            stacklevel=2,
        )
        return memory
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes of a storage as a tensor on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def _fill(storages: Mapping[str, torch.UntypedStorage], values: HostCopy) -> None:
    for name, storage in storages.items():
        _bytes(storage).copy_(values[name], non_blocking=True)
