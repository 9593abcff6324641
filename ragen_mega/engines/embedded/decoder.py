"""The Qwen2, Qwen2.5 and Qwen3 dense decoder for inference in plain torch, with fused projections.

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2); rotary
embeddings as in RoFormer (arXiv:2104.09864, Eq. 34). Attention itself is a callback, so that one
decoder serves prefill and decode.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ragen_mega.models.layout import complete, expected_tensors
from ragen_mega.models.shape import ModelShape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [W, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) -> [W, heads * d]. q is scaled
by d ** -0.5.
"""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices are transposed: views of the stored [out, in]."""

    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * d], after the input norm
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # of q and of k, [d]
    output: Tensor  # [heads * d, hidden]
    gate_up: Tensor  # [hidden, 2 * intermediate], after the post-attention norm
    down: Tensor  # [intermediate, hidden]


class Workspace:
    """Where a pass over T tokens puts what it computes.

    Steps of one size share it: on a small model allocations and views take as long as the
    arithmetic.
    """

    def __init__(self, shape: ModelShape, num_tokens: int, dtype: torch.dtype) -> None:
        num_qk = shape.num_heads + shape.num_kv_heads
        self.num_tokens = num_tokens
        self.norm = torch.empty(num_tokens, 1, dtype=dtype)
        self.normalized = torch.empty(num_tokens, shape.hidden_size, dtype=dtype)
        self.qkv = torch.empty(num_tokens, shape.q_size + 2 * shape.kv_size, dtype=dtype)
        heads = self.qkv.view(num_tokens, -1, shape.head_dim)
        num_heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.q, self.k, self.v = heads.split(num_heads, dim=1)  # [T, _, d]
        # q and k as complex pairs
        self.rotated = self.qkv.view(_COMPLEX[dtype])[:, : num_qk * shape.head_dim // 2]
        self.rotations = torch.empty(self.rotated.shape, dtype=_COMPLEX[dtype])
        self.gate_up = torch.empty(num_tokens, 2 * shape.ffn_size, dtype=dtype)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)


class Decoder:
    """The weights of one version, fused, and the forward pass over them.

    Rows of q and k are reordered so that the two halves which a rotary embedding mixes are
    neighbours: a rotation is then one complex product. Scores do not change, because q and k are
    reordered alike. The norms' weights are multiplied into the columns of the matrices that follow
    them, so that only a norm's division is left.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Iterable[tuple[str, Tensor]],
        *,
        max_context: int,
        dtype: torch.dtype,
    ) -> None:
        if dtype not in _COMPLEX:
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, not {dtype}; on a CPU others are"
                " slower"
            )
        self.shape = shape
        received = _receive(shape, weights, dtype)
        self.embedding = received[_EMBEDDING]
        self.head = received[_HEAD]
        # Not into the head, which may be the embedding.
        self._norm = received["model.norm.weight"] * shape.hidden_size**0.5
        self._norm_floor, self._qk_norm_floor = (
            torch.tensor((size * shape.rms_norm_eps) ** 0.5, dtype=dtype)
            for size in (shape.hidden_size, shape.head_dim)
        )
        self._layers = [self._fuse(received, f"model.layers.{i}.") for i in range(shape.num_layers)]
        # The frequencies in float32, as transformers and megatron-core hold them: at theta 1e6 the
        # rounding is visible.
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(
            torch.arange(max_context, dtype=torch.float32), 1.0 / shape.rope_theta**exponents
        )
        rotations = torch.polar(torch.ones_like(angles), angles).to(_COMPLEX[dtype])
        # [max_context, (heads + kv_heads) * d / 2]
        self._rotations = rotations.repeat(1, shape.num_heads + shape.num_kv_heads)

    def _fuse(self, received: dict[str, Tensor], prefix: str) -> _Layer:
        shape = self.shape
        scale = shape.head_dim**-0.5
        has_qk_norm = shape.family.has("self_attention.q_layernorm.weight")
        has_bias = shape.family.has("self_attention.linear_qkv.bias")

        def stack(kind: str) -> Tensor:
            q, k, v = (received[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
            # With a q norm the scale comes after the norm.
            q = _pair_halves(q, shape.num_heads) * (1.0 if has_qk_norm else scale)
            return torch.cat([q, _pair_halves(k, shape.num_kv_heads), v])

        qk_norm = None
        if has_qk_norm:
            q_norm, k_norm = (
                _pair_halves(received[f"{prefix}self_attn.{x}_norm.weight"], 1) for x in "qk"
            )
            # The norm's sqrt(d); for q it cancels against the scale.
            qk_norm = (q_norm, k_norm * shape.head_dim**0.5)
        gate_up = torch.cat(
            [received[f"{prefix}mlp.gate_proj.weight"], received[f"{prefix}mlp.up_proj.weight"]]
        )
        return _Layer(
            qkv=_behind_norm(stack("weight"), received[f"{prefix}input_layernorm.weight"]).t(),
            qkv_bias=stack("bias") if has_bias else None,
            qk_norm=qk_norm,
            output=received[f"{prefix}self_attn.o_proj.weight"].t(),
            gate_up=_behind_norm(gate_up, received[f"{prefix}post_attention_layernorm.weight"]).t(),
            down=received[f"{prefix}mlp.down_proj.weight"].t(),
        )

    def workspace(self, num_tokens: int) -> Workspace:
        """For passes over `num_tokens` tokens, under these weights or others of their shape."""
        return Workspace(self.shape, num_tokens, self.embedding.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        wanted: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """tokens [T], positions [T] -> hidden states before the final norm [T, hidden], or of the
        `wanted` tokens [W].

        In the last layer only wanted tokens are queries: of the others only keys and values are
        needed. `workspace` is for T tokens; None makes a new one.
        """
        work = workspace or self.workspace(tokens.shape[0])
        torch.index_select(self._rotations, 0, positions, out=work.rotations)
        x = self.embedding.index_select(0, tokens)  # [T, hidden]
        for index, layer in enumerate(self._layers):
            self._normalize(x, work)
            if layer.qkv_bias is None:
                torch.mm(work.normalized, layer.qkv, out=work.qkv)
            else:
                torch.addmm(layer.qkv_bias, work.normalized, layer.qkv, out=work.qkv)
            q, k, v = work.q, work.k, work.v
            if layer.qk_norm is not None:
                for heads, weight in zip((q, k), layer.qk_norm, strict=True):
                    norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
                    heads.div_(norm.hypot_(self._qk_norm_floor)).mul_(weight)
            work.rotated.mul_(work.rotations)
            if wanted is not None and index == self.shape.num_layers - 1:
                x, q = x[wanted], q[wanted]
                work = self.workspace(x.shape[0])
            x.addmm_(attend(index, q, k, v), layer.output)
            self._normalize(x, work)
            torch.mm(work.normalized, layer.gate_up, out=work.gate_up)
            F.silu(work.gate, inplace=True).mul_(work.up)
            x.addmm_(work.gate, layer.down)
        return x

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, vocab], in the first rows of `out` if there is one."""
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).hypot_(self._norm_floor)
        normalized = (hidden / norm).mul_(self._norm)
        return torch.mm(normalized, self.head.t(), out=None if out is None else out[: len(hidden)])

    def _normalize(self, x: Tensor, work: Workspace) -> None:
        """x / |(x, floor)|: the RMS norm but for its weight and sqrt(hidden), which are in the
        matrix that follows.
        """
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=work.norm).hypot_(self._norm_floor)
        torch.div(x, work.norm, out=work.normalized)


def _behind_norm(matrix: Tensor, norm: Tensor) -> Tensor:
    """[rows, hidden] that takes x / |x| instead of the RMS norm of x with the weight `norm`
    [hidden].
    """
    return matrix * (norm * norm.shape[0] ** 0.5)


def _pair_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from [a0 a1 .. b0 b1 ..] to [a0 b0 a1 b1 ..]."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


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
