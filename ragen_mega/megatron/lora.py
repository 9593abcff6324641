"""Low-rank adapters (LoRA, arXiv:2106.09685, Eq. 3) beside the linear layers of a model: the output
W x + scale B A x, where the base W is frozen and may be shared by several models.

A local layer of megatron-core adds W x onto what the adapter makes of x, in float32, and rounds the
sum. A Transformer Engine layer returns a rounded W x, to which a hook adds the adapter; in bfloat16
this rounds most of a small adapter away (it has never run on a GPU).

Parameters are float32. Beside a column-parallel layer A is whole on every rank and B cut by rows,
beside a row-parallel one A is cut by columns and B whole. A whole matrix gets a part of its
gradient on each rank: under sequence parallelism of some tokens, otherwise of some inputs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ragen_mega.config import LoraConfig
from ragen_mega.megatron.layers import normalized
from ragen_mega.models.cuts import ROW
from ragen_mega.models.family import CRITIC_HEAD, VALUE_HEAD
from ragen_mega.models.layout import Slot, find_slot
from ragen_mega.models.lora import adapted, adapter_weights
from ragen_mega.models.rounding import spread_bits
from ragen_mega.ranks import collectives

_Mapping = Callable[..., Tensor]
_TOKENS = (
    mappings.gather_from_sequence_parallel_region,
    mappings.copy_to_tensor_model_parallel_region,
)
"""Mappings of this rank's tokens to what a column-parallel matrix takes."""
_SUMS = (
    mappings.reduce_scatter_to_sequence_parallel_region,
    mappings.reduce_from_tensor_model_parallel_region,
)
"""Mappings of what the ranks' columns of A give to their sums."""


class Adapter(nn.Module):
    """The matrices A and B beside a linear layer. Where the layer holds several experts each has
    its own, and the expert's number on this rank ends the parameters' names.
    """

    def __init__(self, slots: Sequence[Slot], lora: LoraConfig, chunk: Any, names: str) -> None:
        super().__init__()
        self.slots, self.scale, self.is_on = slots, lora.scale, True
        self._tp, self._is_sequence = chunk.tp_group, chunk.config.sequence_parallel
        cut = slots[0].weight.cut
        self._is_row = cut == ROW
        self._is_divided = self._tp.size() > 1 and cut.group != "expert"
        self._suffixes = [str(number) for number in range(len(slots))] if names else [""]
        for slot, suffix in zip(slots, self._suffixes, strict=True):
            for part in adapter_weights(slot.weight, lora.rank):
                self._add(Slot(part, slot.shape, slot.layer, "", slot.expert), suffix)
        # which of the weight's tensors a row of it is of, as its rows are cut
        rows = adapter_weights(slots[0].weight, len(slots[0].names))[1]
        kinds = torch.eye(len(slots[0].names), device=collectives.device())
        whole = [kind.expand(size[0], -1) for kind, size in zip(kinds, slots[0].shapes)]
        self._kind = self._cut(Slot(rows, slots[0].shape, None, ""), whole)  # [out, tensors]

    def _add(self, slot: Slot, suffix: str) -> None:
        whole = [torch.empty(size, device="meta") for size in slot.shapes]
        local = torch.zeros(self._cut(slot, whole).shape, device=collectives.device())
        parameter = nn.Parameter(local)
        is_whole = slot.group == "dense" and slot.weight.cut.axis is None
        vars(parameter)["sequence_parallel"] = self._is_sequence and is_whole
        self.register_parameter(slot.weight.key.rpartition(".")[2] + suffix, parameter)

    def _cut(self, slot: Slot, tensors: list[Tensor]) -> Tensor:
        return slot.shard(tensors, self._tp.rank(), self._tp.size())

    def matrices(self, number: int) -> tuple[Tensor, Tensor]:
        """A [k rank, in] and B [out, k rank] of a weight of k tensors, B with zeros where a row is
        not of the tensor that columns of it are for.
        """
        suffix = self._suffixes[number]
        down, up = getattr(self, f"lora_A{suffix}"), getattr(self, f"lora_B{suffix}")
        if len(self.slots[number].names) > 1:
            up = (self._kind.to(up.dtype).unsqueeze(2) * up.unsqueeze(1)).flatten(1)
        return down, up

    def merged(self, number: int, weight: Tensor) -> Tensor:
        """Return W + scale B A in the type of the weight, from a sum in float32 at least. A weight
        in bfloat16 is spread between its neighbours before, so that a small product arrives.
        """
        down, up = self.matrices(number)
        base = spread_bits(weight, self.slots[number].parameter)
        wide = torch.promote_types(base.dtype, down.dtype)
        product = (up.to(wide) @ down.to(wide)).mul_(self.scale)
        return product.add_(base).to(weight.dtype)

    def product(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return W x + scale B A x and the bias: this rank's output of a local layer, of a
        row-parallel one before the sum over ranks. Arguments as of megatron-core's `_forward_impl`.
        """
        # with strides of a shape with more dimensions torch would multiply by a copy of a frozen
        # weight for each token
        rows = (input if self._is_row else self._among_ranks(input, *_TOKENS)).flatten(0, -2)
        if self.is_on:
            low, up = self._factors(0, input)
            if not self._is_row:
                low = self._among_ranks(low, *_TOKENS)
            elif self._is_divided and not self._is_sequence:
                up = mappings.copy_to_tensor_model_parallel_region(up, group=self._tp)
            out = F.linear(low.flatten(0, -2), up).addmm_(rows, weight.t())
        else:
            out = rows @ weight.t()
        return (out if bias is None else out + bias).view(-1, *input.shape[1:-1], len(weight))

    def add(self, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
        """Add the adapter to the output of a Transformer Engine layer: a forward hook."""
        if not self.is_on:
            return output
        x, (out, *rest) = inputs[0], output
        if (norm := getattr(linear, "layer_norm_weight", None)) is not None:
            x = normalized(x, norm, vars(linear)["eps"])  # the norm is in the layer
        if len(self.slots) == 1:
            return self._sum(0, x, out), *rest
        parts = zip(x.split(inputs[1]), out.split(inputs[1]), strict=True)  # of the experts
        return torch.cat([self._sum(number, *part) for number, part in enumerate(parts)]), *rest

    def _sum(self, number: int, x: Tensor, out: Tensor) -> Tensor:
        low, up = self._factors(number, x)
        low = self._among_ranks(low, *_SUMS) if self._is_row else self._among_ranks(low, *_TOKENS)
        total = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), up.t())
        return total.view(*out.shape)

    def _factors(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale A x [tokens, rank] of this rank, and B in the type of x."""
        down, up = (matrix.to(x.dtype) for matrix in self.matrices(number))
        return F.linear(x, down * self.scale), up

    def _among_ranks(self, x: Tensor, of_tokens: _Mapping, of_whole: _Mapping) -> Tensor:
        if not self._is_divided:
            return x
        return (of_tokens if self._is_sequence else of_whole)(x, group=self._tp)


def attach(chunks: Iterable[Any], lora: LoraConfig) -> None:
    """Freeze a model but for a critic's head, and put adapters beside its linear layers. Raises
    ValueError if a target names none.
    """
    for chunk in chunks:
        chunk.lora, weights = lora, adapted(chunk.shape, lora)
        beside: dict[str, list[Slot]] = defaultdict(list)
        for name, parameter in [*chunk.named_parameters()]:
            offsets = chunk.layer_offset, chunk.expert_offset
            slot = find_slot(name, chunk.shape, *offsets, is_critic=chunk.is_critic)
            parameter.requires_grad_(slot.names == (VALUE_HEAD,))
            if slot.weight in weights:
                beside[name.rstrip("0123456789").removesuffix(".weight")].append(slot)
        for name, slots in beside.items():
            linear = chunk.get_submodule(name)
            numbers = slots[0].parameter[len(slots[0].parameter.rstrip("0123456789")) :]
            linear.adapter = Adapter(slots, lora, chunk, numbers)
            if chunk.config.transformer_impl == "local":
                vars(linear)["_forward_impl"] = linear.adapter.product
                continue
            # a Transformer Engine layer that has not seen its input's type yet asks that all of its
            # parameters have this type
            vars(linear)["activation_dtype"] = chunk.config.params_dtype
            linear.register_forward_hook(linear.adapter.add)


def adapters(chunks: Iterable[nn.Module]) -> Iterator[Adapter]:
    """Yield the adapters of this rank's chunks of a model."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


@contextmanager
def without_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Let a model be its base for the block."""
    found = [*adapters(chunks)]
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


class Merged(Mapping[str, Tensor]):
    """The weights of a model by the names of their slots, each merged with its adapter when it is
    asked for, so that no second copy of the model is held.
    """

    def __init__(self, chunks: Iterable[nn.Module], weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._adapters = {
            slot.parameter: (adapter, number)
            for adapter in adapters(chunks)
            for number, slot in enumerate(adapter.slots)
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if name not in self._adapters:
            return weight
        adapter, number = self._adapters[name]
        return adapter.merged(number, weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class NoMemory(TorchFunctionMode):
    """Inside, weights have no memory: another model will lend its weights. Transformer Engine gives
    weights on the meta device memory to initialise them, by `torch.empty_like`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.empty_like):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def share_base(chunks: Iterable[nn.Module], base: Iterable[nn.Module]) -> None:
    """Give a critic that was built without memory the parameters of a policy, `base`; its head is
    zero.
    """
    for chunk, other in zip(chunks, base, strict=True):
        theirs = dict(other.named_parameters())
        for name, parameter in [*chunk.named_parameters()]:
            if name == CRITIC_HEAD.key:
                shared = nn.Parameter(torch.zeros_like(parameter, device=collectives.device()))
                vars(shared).update(vars(parameter))
            else:
                shared = theirs[name]
            module, _, leaf = name.rpartition(".")
            setattr(chunk.get_submodule(module), leaf, shared)


def draw(names: Mapping[str, tuple[int, ...]], seed: int) -> Any:
    """Return a reader of the adapters that training starts from: B is zero, and A uniform within
    1 / sqrt(in), as PEFT draws it, from the seed and its name, so the same under every layout.
    """

    def read(name: str) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(names[name])
        generator = torch.Generator().manual_seed((seed * 2**32 + crc32(name.encode())) % 2**63)
        bound = names[name][1] ** -0.5
        return torch.empty(names[name]).uniform_(-bound, bound, generator=generator)

    return read
