"""The sizes of a model, from its config.json and its family. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from ragen_mega.data.balance import Cost
from ragen_mega.models.cuts import HeadSizes, head_rows
from ragen_mega.models.families import FAMILIES, find_family
from ragen_mega.models.family import Family, Weight

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ragen_mega.config.sections.parallel import ParallelSizes


_MOST_LAYERS = 10_000


def check_config(hf: PretrainedConfig) -> None:
    """Raise ValueError if a configuration asks for something that is not supported."""
    values = hf.to_dict()
    find_family(hf.model_type).check(values)
    shape = ModelShape.of(hf)
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"num_attention_heads ({shape.num_heads}) in config.json must be a multiple of"
            f" num_key_value_heads ({shape.num_kv_heads}); is the file damaged?"
        )
    chosen = shape.experts_per_token
    if chosen > shape.num_experts:
        raise ValueError(
            f"num_experts_per_tok ({chosen}) in config.json must be at most num_experts"
            f" ({shape.num_experts}); is the file damaged?"
        )
    if chosen == 1 and values.get("norm_topk_prob"):
        raise ValueError(
            "norm_topk_prob in config.json gives a single expert (num_experts_per_tok 1) the weight"
            " 1, from which its router cannot learn; set it to false"
        )


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The slower rotation of Llama 3.1 and later (`rope_type` `llama3`): by `factor` for a pair of
    channels that turns at most `low_turns` times in the context of pretraining, not at all from
    `high_turns` on, and linear in the turns between the two.
    """

    factor: float
    low_turns: float
    high_turns: float
    pretrained_length: int


@dataclass(frozen=True, slots=True)
class ModelShape(HeadSizes):
    """The sizes of a model, and the numbers of its norms and positions."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    is_tied: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    further: tuple[tuple[str, int], ...] = ()
    """Name and value of each further field of the family's `sizes`."""

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> ModelShape:
        """Read the shape from the entries of a config.json, whether or not the trainer supports
        them all; what older files leave out, or hold as null, has the value that it had then.
        Raises ValueError if another one is missing or the family is unknown.
        """
        family = find_family(values.get("model_type"))
        values = {name: value for name, value in values.items() if value is not None}
        # transformers 5 has moved base and scaling into one dictionary
        rope = values | values.get("rope_scaling", {}) | values.get("rope_parameters", {})
        if (layers := values.get("num_hidden_layers", 0)) > _MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers must be at most {_MOST_LAYERS}, not {layers}; is the file"
                " damaged?"
            )
        try:
            return cls(
                model_type=family.model_type,
                num_layers=values["num_hidden_layers"],
                hidden_size=values["hidden_size"],
                num_heads=values["num_attention_heads"],
                num_kv_heads=values.get("num_key_value_heads", values["num_attention_heads"]),
                head_dim=values.get("head_dim")
                or values["hidden_size"] // values["num_attention_heads"],
                ffn_size=values[family.ffn_entry],
                vocab_size=values["vocab_size"],
                is_tied=bool(values.get("tie_word_embeddings")),
                rms_norm_eps=values.get("rms_norm_eps", 1e-6),
                rope_theta=rope.get("rope_theta", 1e4),
                rope_scaling=_rope_scaling(rope) if rope.get("rope_type") == "llama3" else None,
                further=tuple((name, read(values)) for name, read in family.sizes.items()),
            )
        except KeyError as error:
            raise ValueError(f"config.json lacks {error}; use the model's own file") from None

    @classmethod
    def of(cls, hf: PretrainedConfig) -> ModelShape:
        """Read the shape from a configuration of transformers."""
        return cls.from_config(vars(hf) | {"model_type": hf.model_type})

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def q_size(self) -> int:
        """Channels of all queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all keys, or of all values."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 0 in a dense model."""
        return dict(self.further).get("num_moe_experts", 0)

    @property
    def experts_per_token(self) -> int:
        """Experts of a layer that a token goes through, 0 in a dense model."""
        return dict(self.further).get("moe_router_topk", 0)

    def experts(self, weight: Weight) -> Sequence[int | None]:
        """Return the experts that each have this parameter; None alone if no experts have it."""
        return range(self.num_experts) if weight.cut.group == "expert" else (None,)

    def num_local(self, weight: Weight, ep: int) -> int:
        """Return the number of parameters of this kind that a layer has on each of `ep` ranks that
        share the experts.
        """
        return max(1, len(self.experts(weight)) // ep)

    def shapes(self, weight: Weight) -> list[tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors of one parameter."""
        further = dict(self.further)
        return [
            tuple(
                size if isinstance(size, int) else further.get(size) or getattr(self, size)
                for size in shape
            )
            for shape in weight.tensors.values()
        ]

    def whole(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape in Megatron's layout on one rank: its tensors row by row."""
        shapes = self.shapes(weight)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def num_elements(self, weight: Weight, tp: int = 1) -> int:
        """Return the elements of one parameter on a tensor-parallel rank, rows of padding among
        them.
        """
        return math.prod(weight.cut.padded(self.whole(weight), tp)) // weight.cut.num_parts(tp)

    def layer_sizes(self, tp: int = 1, ep: int = 1, *, matrices: bool = False) -> tuple[int, ...]:
        """Return the elements of the parameters of a layer on a rank that tensor and expert
        parallelism leave it, in the order of megatron-core's local layer. With `matrices` only
        its linear layers count.
        """
        return _layer_sizes(self, tp, ep, matrices)

    @property
    def attention_size(self) -> int:
        """Elements of a layer's matrices around attention."""
        return 2 * self.hidden_size * (self.q_size + self.kv_size)

    @property
    def expert_size(self) -> int:
        """Elements of the matrices of a feed-forward part, of one expert in a mixture."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def head_size(self) -> int:
        """Elements of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def active_size(self) -> int:
        """Elements of a layer's matrices by which a token is multiplied: of the experts only those
        that the router chooses.
        """
        chosen = self.experts_per_token or 1
        return sum(
            self.num_elements(weight) * min(chosen, len(self.experts(weight)))
            for weight in self.family.layer
            if weight.is_matrix
        )

    @property
    def cost(self) -> Cost:
        """FLOPs of a token. A product takes two operations an element forward and four backward;
        attention takes two such products for each channel of queries.
        """
        return Cost(
            6 * self.num_layers * self.active_size,
            12 * self.num_layers * self.q_size,
            6 * self.head_size,
        )

    def engine_weights(self, itemsize: int, tp: int, *, fp8: bool = False) -> int:
        """Return the bytes of the policy's weights on a rank of an engine; with `fp8` the layers'
        matrices have one byte an element.
        """
        total = self.num_parameters * itemsize
        if fp8:  # the scales, one for 128 x 128 weights, are negligible
            total -= self.num_layers * sum(self.layer_sizes(matrices=True)) * (itemsize - 1)
        return total // tp

    def kv_cache_bytes(self, itemsize: int, tp: int) -> int:
        """Return the bytes of a token in the key-value cache of a rank of an engine."""
        heads = max(1, self.num_kv_heads // tp)  # above that they are replicated
        return self.num_layers * 2 * heads * self.head_dim * itemsize

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole policy."""
        outer = map(
            self.num_elements, self.family.outer[:-1] if self.is_tied else self.family.outer
        )
        return self.num_layers * sum(self.layer_sizes()) + sum(outer)


@lru_cache(maxsize=1024)  # a search for a layout asks a hundred thousand times
def _layer_sizes(shape: ModelShape, tp: int, ep: int, matrices: bool) -> tuple[int, ...]:
    return tuple(
        size
        for weight in shape.family.layer
        if weight.is_matrix or not matrices
        for size in [shape.num_elements(weight, tp)] * shape.num_local(weight, ep)
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        factor=rope["factor"],
        low_turns=rope["low_freq_factor"],
        high_turns=rope["high_freq_factor"],
        pretrained_length=rope["original_max_position_embeddings"],
    )


@lru_cache(maxsize=1024)
def stage_layers(num_layers: int, pp: int, vp: int = 1) -> tuple[tuple[range, ...], ...]:
    """Return the layers of each pipeline stage, one run of them for each of its `vp` chunks: the
    first chunks of all stages come first. Where runs cannot be equally long, some have a layer
    fewer: first the last one, which has the LM head, then the first one, which has the embedding,
    then the neighbour of the last one, and so on.
    """
    number = pp * vp
    lengths = [-(-num_layers // number)] * number
    from_the_ends = chain.from_iterable(zip(reversed(range(number)), range(number)))
    for run, _ in zip(from_the_ends, range(sum(lengths) - num_layers)):
        lengths[run] -= 1
    runs = [range(end - length, end) for end, length in zip(accumulate(lengths), lengths)]
    return tuple(tuple(runs[stage::pp]) for stage in range(pp))


def cut_error(shape: ModelShape, cut: ParallelSizes) -> str | None:
    """Return why the trainer cannot cut a model this way, None if it can."""
    if cut.ep > 1 and not shape.num_experts:
        return (
            f"expert_model_parallel_size ({cut.ep}) divides experts, and a {shape.model_type} model"
            " has none; drop --expert-model-parallel-size"
        )
    if shape.num_experts % cut.ep:
        return (
            f"expert_model_parallel_size ({cut.ep}) must divide the model's experts"
            f" ({shape.num_experts}); lower --expert-model-parallel-size to a divisor"
        )
    for what, count in (
        ("attention heads", shape.num_heads),
        ("key-value heads", shape.num_kv_heads),
        ("intermediate size", 0 if shape.num_experts else shape.ffn_size),  # experts are whole
    ):
        if count % cut.tp:
            return (
                f"tensor_model_parallel_size ({cut.tp}) must divide the model's {what} ({count}); "
                "lower --tensor-model-parallel-size to a divisor"
            )
    if shape.num_layers < cut.pp * cut.vp:
        chunks = f" x virtual_pipeline_model_parallel_size ({cut.vp})" if cut.vp > 1 else ""
        return (
            f"pipeline_model_parallel_size ({cut.pp}){chunks} must be at most the model's layers"
            f" ({shape.num_layers}); lower --pipeline-model-parallel-size"
        )
    return None


def server_error(shape: ModelShape, tp: int, ep: int = 1) -> str | None:
    """Return why a server of `tp` ranks, `ep` of which share the experts, cannot cut a model this
    way; None if it can.
    """
    try:
        head_rows(shape, 0, tp)
    except ValueError as error:
        return str(error)
    if ep > 1 and (not shape.num_experts or shape.num_experts % ep):
        return (
            f"rollout_expert_parallel_size ({ep}) must divide the model's experts"
            f" ({shape.num_experts or 'none'}); drop --rollout-expert-parallel-size"
        )
    if shape.ffn_size * ep % tp:
        return (
            f"rollout_tensor_parallel_size ({tp}) must divide the model's intermediate size"
            f" ({shape.ffn_size}); lower --rollout-tensor-parallel-size to a divisor"
        )
    return None
