"""Everything that megatron-core needs to run on a CPU over gloo.

megatron-core 0.16 creates some tensors on the literal device "cuda", asks for
`torch.cuda.current_device()` and compares type names with "torch.cuda.FloatTensor". `install()`
rebinds the name `torch` inside the modules that do so to a proxy with CPU answers; the real `torch`
is never changed, and where CUDA exists nothing happens at all.
"""

import contextlib
import functools
import importlib
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_MODULES = (
    "models.common.embeddings.rotary_pos_embedding",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.mappings",
    "tensor_parallel.layers",
    "tensor_parallel.random",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "utils",
    "distributed.param_and_grad_buffer",
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.state_dict_saver",
)


class _Stream:
    """Stands in for a CUDA stream: what is given to it is done at once."""

    def wait_stream(self, stream: "_Stream") -> None:
        """Return at once."""

    def record_event(self) -> "_Stream":
        """Return the event that is awaited."""
        return self

    def synchronize(self) -> None:
        """Return at once."""


class _CudaOnCpu(types.ModuleType):
    """Stands in for `torch.cuda` inside the modules above."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    current_device = staticmethod(lambda: CPU)
    synchronize = staticmethod(lambda *args: None)
    empty_cache = staticmethod(lambda: None)
    get_rng_state = staticmethod(lambda *args: torch.get_rng_state())
    manual_seed = staticmethod(torch.manual_seed)
    Stream = _Stream
    current_stream = staticmethod(_Stream)
    stream = staticmethod(contextlib.nullcontext)


class _TorchOnCpu(types.ModuleType):
    """Stands in for `torch` inside the modules above."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def is_active() -> bool:
    """Return whether this process trains on the CPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Make megatron-core usable without CUDA; idempotent, and without effect where CUDA is
    available.
    """
    if not is_active():
        return
    proxy = _TorchOnCpu("torch")
    vars(proxy)["cuda"] = _CudaOnCpu("torch.cuda")
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(proxy, name, _factory_on_cpu(getattr(torch, name)))
    for name in _MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        if not isinstance(module.torch, _TorchOnCpu):
            vars(module)["torch"] = proxy

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    # The one CPU generator is the forked one here, so megatron-core's warning about it is always
    # raised and never true.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    optimizer.clip_grad_by_total_norm_fp32 = _clip_grad_by_total_norm
    token_dispatcher.maybe_move_tensor_to_cpu = _in_host_memory
    clip_grads.l2_norm_impl = _norm


@contextlib.contextmanager
def sharing_groups() -> Iterator[None]:
    """Let groups of the same ranks, which megatron-core builds in the block, be one where gloo
    serves them: each has threads that poll a hundred times a second.
    """
    create, made = parallel_state.create_group, {}

    def create_once(ranks: Sequence[int], **options: Any) -> Any:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = create(ranks, **options)
        return made[tuple(ranks)]

    if is_active():
        parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


def cuda_literals_as_cpu() -> contextlib.AbstractContextManager[Any]:
    """Redefine for the block: `.cuda()` is the identity, `.type()` reports CUDA names,
    device="cuda" means the CPU.

    Optimizers need it while they are built, stepped (see `stepping`) and saved.
    """
    return _CudaLiteralMode() if is_active() else contextlib.nullcontext()


def stepping(optimizers: Iterable[MegatronOptimizer]) -> contextlib.AbstractContextManager[Any]:
    """Return the context of an optimizer step: nothing in float32, where every operation would pass
    through Python once more.
    """
    if all(isinstance(optimizer, FP32Optimizer) for optimizer in optimizers):
        return contextlib.nullcontext()
    return cuda_literals_as_cpu()


class _CudaLiteralMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types_: Iterable[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = _on_cpu(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    if device is None:
        return kwargs
    names_cuda = isinstance(device, int) or str(device).startswith("cuda")
    return kwargs | {"device": CPU} if names_cuda else kwargs


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return factory(*args, **_on_cpu(kwargs))

    return on_cpu


def _in_host_memory(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core's copy from the device, which returns a CPU tensor as it is, even where sizes
    of a collective are to be an array.
    """
    return tensor.numpy() if as_numpy and tensor is not None else tensor


@torch.no_grad()
def _clip_grad_by_total_norm(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    """megatron-core's clipping without its assertion that gradients are CUDA tensors."""
    scale = max_norm / (total_norm + 1.0e-6)
    if scale < 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)


def _norm(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm [1] of all gradients together, which megatron-core's fallback takes a dozen
    operations for each of them to learn.
    """
    norms = torch._foreach_norm([gradient for gradients in lists for gradient in gradients])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None
