"""The decoder of the families for inference: compiled, but for the choice of experts in a mixture.
In bfloat16 are matrices, their factors and the cache; all sums, and the router, are in float32. The
result for a token depends on no other trajectory of its batch, to the bit.

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2).
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ragen_mega.compiled.jit import Integers, Reals, in_parts
from ragen_mega.config import LoraConfig
from ragen_mega.engines.embedded import kernels
from ragen_mega.engines.embedded.kv_cache import KVCache
from ragen_mega.engines.embedded.products import Panels
from ragen_mega.models.layout import complete, expected_tensors
from ragen_mega.models.lora import expected_adapters
from ragen_mega.models.rotary import rotary_frequencies
from ragen_mega.models.shape import ModelShape

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_REALS = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Type of the weights -> type of the numbers between matrix products."""


class _PackedMatrix:
    """A bfloat16 weight in the order in which oneDNN's kernels read it, for processors with AMX,
    which they use. Rows and results are float32.

    Every product has ROWS rows, so that the result of a row depends on no other row.
    """

    ROWS = 32

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())

    def put(self, rows: Tensor, out: Tensor) -> None:
        """out [T, out] <- the products of rows [T, in], each rounded to bfloat16."""
        for block, results in self._blocks(rows, out):
            results.copy_(self._times(block)[: len(results)])

    def put_exactly(self, rows: Tensor, out: Tensor) -> None:
        """out [T, out] <- the products with 16 bits: oneDNN returns 8, and the product less those
        in a second pass, which sums in float32.
        """
        subtract = torch.ops.mkldnn._linear_pointwise.binary
        for block, results in self._blocks(rows, out):
            rounded = self._times(block)
            rest = subtract(block, rounded, self._weight, None, "sub")
            results.copy_(rounded[: len(results)]).add_(rest[: len(results)])

    def add(self, rows: Tensor, total: Tensor) -> None:
        """Add the products of rows [T, in] to total [T, out]."""
        for block, results in self._blocks(rows, total):
            results.add_(self._times(block)[: len(results)])

    def _blocks(self, rows: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ROWS rows at a time, in the end with zeros, and where their results go."""
        padded = F.pad(rows.bfloat16(), (0, 0, 0, -len(rows) % self.ROWS))
        return zip(padded.split(self.ROWS), out.split(self.ROWS), strict=True)

    def _times(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "none", [], "")


class _Adapted:
    """A weight with an adapter beside it: the products with W, and then with A and B."""

    def __init__(self, base: "_Weight", down: Tensor, up: Tensor) -> None:
        self._base, self._rank = base, len(down)
        self._down, self._up = Panels(down.t().contiguous()), Panels(up.t().contiguous())

    def put(self, rows: Tensor, out: Tensor) -> None:
        """out [T, out] <- the products of rows [T, in]."""
        self._base.put(rows, out)
        self._add_low(rows, out)

    def add(self, rows: Tensor, total: Tensor) -> None:
        """Add the products of rows [T, in] to total [T, out]."""
        self._base.add(rows, total)
        self._add_low(rows, total)

    def _add_low(self, rows: Tensor, total: Tensor) -> None:
        low = rows.new_empty(len(rows), self._rank)
        self._down.put(rows, low)
        self._up.add(low, total)


_Weight = Panels | _PackedMatrix | _Adapted


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Reals  # [hidden]
    qkv: _Weight  # hidden -> (heads + 2 * kv_heads) * d
    qkv_bias: Reals  # [heads + 2 * kv_heads, 2, d / 2], or [0, 2, d / 2]
    q_norm: Reals  # [1, 2, d / 2], or [0, 2, d / 2]
    k_norm: Reals
    output: _Weight  # heads * d -> hidden
    mlp_norm: Reals  # [hidden]
    router: Panels | None  # hidden -> experts; None in a dense layer, which has one pair below
    gate_up: list[_Weight]  # of each expert: hidden -> 2 * ffn
    down: list[_Weight]  # of each expert: ffn -> hidden


class Workspace:
    """Buffers for the results of a pass over T tokens: tensors, and the same memory as arrays for
    the compiled kernels.

    Steps of one size share it: on a small model allocations and views take as long as the
    arithmetic.
    """

    def __init__(self, shape: ModelShape, num_tokens: int, dtype: torch.dtype) -> None:
        def rows(width: int) -> Tensor:
            return torch.empty(num_tokens, width, dtype=dtype)

        self.num_tokens = num_tokens
        self.hidden = rows(shape.hidden_size)
        self.normalized = rows(shape.hidden_size)
        self.qkv = rows(shape.q_size + 2 * shape.kv_size)
        self.attended = rows(shape.q_size)
        self.gate_up = rows(2 * shape.ffn_size)
        self.gated = rows(shape.ffn_size)
        self.hidden_array = self.hidden.numpy()
        self.normalized_array = self.normalized.numpy()
        halves = (num_tokens, -1, 2, shape.head_dim // 2)
        self.qkv_array = self.qkv.numpy().reshape(halves)
        self.attended_array = self.attended.numpy().reshape(num_tokens, -1, shape.head_dim)
        self.gate_up_array = self.gate_up.numpy().reshape(num_tokens, 2, -1)
        self.gated_array = self.gated.numpy()


class Decoder:
    """The weights of one version, fused, and the forward pass over them."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Iterable[tuple[str, Tensor]],
        *,
        max_context: int,
        dtype: torch.dtype,
    ) -> None:
        if dtype not in _REALS:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _REALS))}, not {dtype}")
        self.shape = shape
        self._real = _REALS[dtype]
        processor = torch.cpu.get_capabilities()
        if dtype == torch.bfloat16 and not processor.get("avx512_bf16"):
            dtype = self._real  # this processor multiplies float32 faster
        has_amx = dtype == torch.bfloat16 and processor.get("amx_bf16")
        self._matrix = _PackedMatrix if has_amx else Panels
        received = _receive(shape, weights, dtype)
        self._embedding = received[_EMBEDDING]
        self._head = self._matrix(received[_HEAD].t())
        self._norm = self._numbers(received["model.norm.weight"])
        self._epsilon = self._numbers(torch.tensor(shape.rms_norm_eps, dtype=torch.float64))[()]
        self._layers = [self._fuse(received, f"model.layers.{i}.") for i in range(shape.num_layers)]
        positions = torch.arange(max_context, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(shape))
        # [max_context, d / 2]
        self._cosines, self._sines = map(self._numbers, (angles.cos(), angles.sin()))

    def _numbers(self, weight: Tensor) -> Reals:
        """Return a weight that is no factor of a matrix product."""
        return weight.to(self._real).numpy()

    def _fuse(self, received: dict[str, Tensor], prefix: str) -> _Layer:
        half = self.shape.head_dim // 2
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def matrix(*names: str) -> _Weight:
            parts = [received[f"{name}_proj.weight"] for name in names]
            return self._matrix(torch.cat(parts).t().contiguous())

        def halves(*names: str) -> Reals:
            """[..., 2, d / 2]; nothing of it if the family has no such parameters."""
            found = [received[name] for name in names if name in received]
            return self._numbers(torch.cat([torch.empty(0), *found])).reshape(-1, 2, half)

        projections = [f"{attention}{x}" for x in "qkv"]
        router = received.get(f"{mlp}gate.weight")
        experts = [f"{mlp}experts.{e}." for e in range(self.shape.num_experts)] or [mlp]
        return _Layer(
            input_norm=self._numbers(received[f"{prefix}input_layernorm.weight"]),
            qkv=matrix(*projections),
            qkv_bias=halves(*(f"{name}_proj.bias" for name in projections)),
            q_norm=halves(f"{attention}q_norm.weight"),
            k_norm=halves(f"{attention}k_norm.weight"),
            output=matrix(f"{attention}o"),
            mlp_norm=self._numbers(received[f"{prefix}post_attention_layernorm.weight"]),
            router=None if router is None else Panels(router.to(self._real).t()),
            gate_up=[matrix(f"{expert}gate", f"{expert}up") for expert in experts],
            down=[matrix(f"{expert}down") for expert in experts],
        )

    def with_adapter(self, tensors: Mapping[str, Tensor], lora: LoraConfig) -> "Decoder":
        """Return a decoder with an adapter beside these weights, which it shares. Raises ValueError
        unless exactly the tensors of the adapter are given.
        """
        received = dict(complete(tensors.items(), expected_adapters(self.shape, lora)))

        def beside(weight: _Weight, *names: str) -> _Weight:
            if f"{names[0]}.lora_A.weight" not in received:
                return weight
            downs, ups = (
                [received[f"{name}.{part}.weight"] for name in names]
                for part in ("lora_A", "lora_B")
            )
            down, up = torch.cat(downs), torch.block_diag(*ups)
            return _Adapted(weight, down.to(self._real), (lora.scale * up).to(self._real))

        def layer_with(number: int, layer: _Layer) -> _Layer:
            prefix = f"model.layers.{number}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            experts = [f"{mlp}experts.{e}." for e in range(self.shape.num_experts)] or [mlp]
            return replace(
                layer,
                qkv=beside(layer.qkv, *(f"{attention}{x}_proj" for x in "qkv")),
                output=beside(layer.output, f"{attention}o_proj"),
                gate_up=[
                    beside(weight, f"{expert}gate_proj", f"{expert}up_proj")
                    for weight, expert in zip(layer.gate_up, experts, strict=True)
                ],
                down=[
                    beside(weight, f"{expert}down_proj")
                    for weight, expert in zip(layer.down, experts, strict=True)
                ],
            )

        adapted = copy(self)
        adapted._layers = [layer_with(*item) for item in enumerate(self._layers)]
        return adapted

    def workspace(self, num_tokens: int) -> Workspace:
        """Make the buffers of passes over `num_tokens` tokens, for any weights of this shape."""
        return Workspace(self.shape, num_tokens, self._real)

    def forward(
        self,
        tokens: Integers,
        rows: Integers,
        positions: Integers,
        cache: KVCache,
        *,
        wanted: Integers | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """tokens [T] at positions [T] of rows [T] of the cache -> hidden states after the final
        norm [T, hidden], or of the `wanted` tokens [W].

        The cache has room for them, and tokens of one row stand in order. In the last layer only
        wanted tokens are queries: of the others only keys and values are needed, or else the
        experts, where the cache records them. `workspace` is for T tokens; None makes a new one.
        """
        work = workspace or self.workspace(len(tokens))
        queries = np.arange(len(tokens))
        records = cache.records_routes
        work.hidden.copy_(self._embedding[torch.from_numpy(tokens)])
        for number, (layer, blocks) in enumerate(zip(self._layers, cache.layers, strict=True)):
            self._normalize(work, layer.input_norm)
            layer.qkv.put(work.normalized, work.qkv)
            qkv = work.qkv_array
            kernels.rotate_and_store(
                qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, self._epsilon, self._cosines,
                self._sines, rows, positions, cache.table, blocks,
            )  # fmt: skip
            if wanted is not None and not records and layer is self._layers[-1]:
                queries, hidden = wanted, work.hidden[torch.from_numpy(wanted)]
                work = self.workspace(len(wanted))
                work.hidden.copy_(hidden)
            in_parts(
                kernels.attend, len(queries), qkv, queries, rows, positions, cache.table, blocks,
                work.attended_array,
            )  # fmt: skip
            layer.output.add(work.attended, work.hidden)
            self._normalize(work, layer.mlp_norm)
            if layer.router is not None:
                chosen = self._add_experts(work, layer, layer.router)
                if records:
                    cache.put_routes(number, rows, positions, chosen.numpy())
                continue
            layer.gate_up[0].put(work.normalized, work.gate_up)
            kernels.gate(work.gate_up_array, work.gated_array)
            layer.down[0].add(work.gated, work.hidden)
        self._normalize(work, self._norm)
        if wanted is not None and records:
            return work.normalized[torch.from_numpy(wanted)]
        return work.normalized

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, vocab], in the first rows of `out` if there is one."""
        if out is None:
            out = hidden.new_empty(len(hidden), self.shape.vocab_size)
        out = out[: len(hidden)]
        self._head.put_exactly(hidden, out)
        return out

    def _add_experts(self, work: Workspace, layer: _Layer, router: Panels) -> Tensor:
        """Add to the hidden states what the experts that the router chooses for each token make of
        the normalized ones. Returns their numbers [T, k].
        """
        sizes = dict(self.shape.further)
        logits = work.normalized.new_empty(work.num_tokens, self.shape.num_experts)  # [T, experts]
        router.put(work.normalized, logits)
        scores = logits.softmax(-1) if sizes["moe_router_pre_softmax"] else logits
        weights, chosen = scores.topk(self.shape.experts_per_token)  # [T, k]
        if not sizes["moe_router_pre_softmax"]:
            weights = weights.softmax(-1)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gate_up, gated = work.gate_up[: len(tokens)], work.gated[: len(tokens)]
            layer.gate_up[expert].put(work.normalized[tokens], gate_up)
            kernels.gate(work.gate_up_array[: len(tokens)], work.gated_array[: len(tokens)])
            made = torch.empty(len(tokens), self.shape.hidden_size, dtype=gated.dtype)
            layer.down[expert].put(gated, made)
            work.hidden.index_add_(0, tokens, made.mul_(weights[tokens, places, None]))
        return chosen

    def _normalize(self, work: Workspace, weight: Reals) -> None:
        kernels.normalize(work.hidden_array, weight, self._epsilon, work.normalized_array)


def _receive(
    shape: ModelShape, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Copy the stream and check that it holds the model's tensors; a tied LM head may be among
    them.
    """
    expected = expected_tensors(shape)
    wanted = expected | {_HEAD: expected[_EMBEDDING]}
    received = {
        name: tensor.detach().to(device="cpu", dtype=dtype, copy=True)
        for name, tensor in complete(weights, wanted, optional=wanted.keys() - expected.keys())
    }
    head = received.setdefault(_HEAD, received[_EMBEDDING])
    if shape.is_tied and not torch.equal(head, received[_EMBEDDING]):
        raise ValueError(f"the model ties its embeddings, but {_HEAD} differs from {_EMBEDDING}")
    return received
