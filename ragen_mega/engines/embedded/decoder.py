"""The Qwen2, Qwen2.5 and Qwen3 dense decoder for inference in plain torch, with fused projections.

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2); rotary
embeddings as in RoFormer (arXiv:2104.09864, Eq. 34). Attention itself is a callback, so that one
decoder serves prefill and decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen3Config

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [W, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) -> [W, heads * d]. q is scaled
by d ** -0.5.
"""

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and variants of the architecture."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_config(cls, config: Qwen2Config | Qwen3Config) -> DecoderShape:
        """Raises ValueError for an architecture or a variant that this decoder does not compute."""
        if config.model_type not in ("qwen2", "qwen3"):
            raise ValueError(
                f"model_type must be qwen2 or qwen3, not {config.model_type!r}; load a dense Qwen2,"
                " Qwen2.5 or Qwen3"
            )
        rope = config.rope_parameters
        if (
            config.hidden_act != "silu"
            or rope["rope_type"] != "default"
            or any(kind != "full_attention" for kind in config.layer_types)
        ):
            raise ValueError(
                "the embedded engine computes silu, default rotary embeddings and full attention"
                f" only, not hidden_act {config.hidden_act}, rope_type {rope['rope_type']},"
                f" layer_types {sorted(set(config.layer_types))}; load a checkpoint without these"
                " variants"
            )
        is_qwen3 = config.model_type == "qwen3"
        if is_qwen3 and config.attention_bias:
            raise ValueError(
                "Qwen3 with attention_bias=True is not supported; no released checkpoint has it"
            )
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            qkv_bias=not is_qwen3,
            qk_norm=is_qwen3,
            tied=config.tie_word_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=rope["rope_theta"],
        )

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor under its Hugging Face name, `lm_head.weight` included."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q_rows, self.hidden),
            "self_attn.k_proj.weight": (kv_rows, self.hidden),
            "self_attn.v_proj.weight": (kv_rows, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q_rows),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.qkv_bias:
            projections = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
            layer |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in projections}
        if self.qk_norm:
            layer |= {
                "self_attn.q_norm.weight": (self.head_dim,),
                "self_attn.k_norm.weight": (self.head_dim,),
            }
        expected = {
            f"model.layers.{i}.{name}": shape
            for i in range(self.num_layers)
            for name, shape in layer.items()
        }
        expected["model.embed_tokens.weight"] = (self.vocab, self.hidden)
        expected["model.norm.weight"] = (self.hidden,)
        expected["lm_head.weight"] = (self.vocab, self.hidden)
        return expected


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices are transposed: views of the stored [out, in]."""

    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * d], behind the input norm
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # of q and of k, [d]
    output: Tensor  # [heads * d, hidden]
    gate_up: Tensor  # [hidden, 2 * intermediate], behind the post-attention norm
    down: Tensor  # [intermediate, hidden]


class Workspace:
    """Where a pass over T tokens puts what it computes.

    Steps of one size share it: on a small model allocations and views take as long as the
    arithmetic.
    """

    def __init__(self, shape: DecoderShape, num_tokens: int, dtype: torch.dtype) -> None:
        num_qk = shape.heads + shape.kv_heads
        self.num_tokens = num_tokens
        self.norm = torch.empty(num_tokens, 1, dtype=dtype)
        self.normalized = torch.empty(num_tokens, shape.hidden, dtype=dtype)
        self.qkv = torch.empty(num_tokens, (num_qk + shape.kv_heads) * shape.head_dim, dtype=dtype)
        heads = self.qkv.view(num_tokens, -1, shape.head_dim)
        self.q, self.k, self.v = heads.split(
            [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
        )  # [T, _, d]
        self.rotated = self.qkv.view(_COMPLEX[dtype])[
            :, : num_qk * shape.head_dim // 2
        ]  # q and k as complex pairs
        self.rotations = torch.empty(self.rotated.shape, dtype=_COMPLEX[dtype])
        self.gate_up = torch.empty(num_tokens, 2 * shape.intermediate, dtype=dtype)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)


class Decoder:
    """The weights of one version, fused, and the forward pass over them.

    Rows of q and k are reordered so that the two halves which a rotary embedding mixes are
    neighbours: a rotation is then one complex product. Scores do not change, because q and k are
    reordered alike. The weights of the norms are multiplied into the columns of the matrices behind
    them, so that a norm has only its division left.
    """

    def __init__(
        self,
        shape: DecoderShape,
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
        self.embedding = received["model.embed_tokens.weight"]
        self.head = received["lm_head.weight"]
        self._norm = (
            received["model.norm.weight"] * shape.hidden**0.5
        )  # not in the head: that may be the embedding
        self._norm_floor = torch.tensor((shape.hidden * shape.rms_norm_eps) ** 0.5, dtype=dtype)
        self._qk_norm_floor = torch.tensor(
            (shape.head_dim * shape.rms_norm_eps) ** 0.5, dtype=dtype
        )
        self._layers = [self._fuse(received, f"model.layers.{i}.") for i in range(shape.num_layers)]
        # The frequencies in float32, as transformers and megatron-core hold them: at theta 1e6 the
        # rounding is visible.
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(
            torch.arange(max_context, dtype=torch.float32), 1.0 / shape.rope_theta**exponents
        )
        rotations = torch.polar(torch.ones_like(angles), angles).to(_COMPLEX[dtype])
        self._rotations = rotations.repeat(
            1, shape.heads + shape.kv_heads
        )  # [max_context, (heads + kv_heads) * d / 2]

    def _fuse(self, received: dict[str, Tensor], prefix: str) -> _Layer:
        shape = self.shape
        scale = shape.head_dim**-0.5

        def stack(kind: str) -> Tensor:
            q, k, v = (received[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
            # With q norm the scale belongs behind the norm.
            q = _pair_halves(q, shape.heads) * (1.0 if shape.qk_norm else scale)
            return torch.cat([q, _pair_halves(k, shape.kv_heads), v])

        qk_norm = None
        if shape.qk_norm:
            q_norm, k_norm = (
                _pair_halves(received[f"{prefix}self_attn.{x}_norm.weight"], 1) for x in "qk"
            )
            qk_norm = (
                q_norm,
                k_norm * shape.head_dim**0.5,
            )  # sqrt(d) of the norm; of q it meets the scale
        gate_up = torch.cat(
            [received[f"{prefix}mlp.gate_proj.weight"], received[f"{prefix}mlp.up_proj.weight"]]
        )
        return _Layer(
            qkv=_behind_norm(stack("weight"), received[f"{prefix}input_layernorm.weight"]).t(),
            qkv_bias=stack("bias") if shape.qkv_bias else None,
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

        In the last layer only wanted tokens are queries: of the others nothing but keys and values
        is needed. `workspace` is for T tokens, and new if None.
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

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, vocab]."""
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).hypot_(self._norm_floor)
        return F.linear((hidden / norm).mul_(self._norm), self.head)

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
    shape: DecoderShape, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Copy the stream and check it: exactly the expected names, each once, in the expected shapes."""
    expected = shape.expected_weights()
    received: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(
                f"unexpected weight {name!r}; the model has {len(expected)} names, e.g."
                f" {min(expected)!r}; check that the weights belong to the model config"
            )
        if name in received:
            raise ValueError(
                f"weight {name!r} arrived twice; each name must be exported by one rank only"
            )
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"weight {name!r} must have the full shape {expected[name]} ({prod(expected[name])}"
                f" elements), not {tuple(tensor.shape)}; check the model config and that shards"
                " were gathered"
            )
        received[name] = tensor.detach().to(device="cpu", dtype=dtype, copy=True)
    if shape.tied and (embedding := received.get("model.embed_tokens.weight")) is not None:
        head = received.setdefault("lm_head.weight", embedding)
        if head is not embedding and not torch.equal(head, embedding):
            raise ValueError(
                "the model ties its embeddings, but lm_head.weight differs from"
                " model.embed_tokens.weight"
            )
    missing = sorted(expected.keys() - received.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(expected)} weights are missing, first {missing[0]!r}; export"
            " the whole model"
        )
    return received
