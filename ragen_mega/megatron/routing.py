"""The experts that tokens go through: the experts that the routers choose, or the choices of an
earlier pass (`--routing-replay`, arXiv:2510.11370); and how far the routers would have chosen
others.

Every microbatch has a `Routing`, which reaches the routers with the arguments of the layers.
megatron-core's own replay keeps the choices in a queue for each router, from which a recomputed
forward pass takes the first: a pass that recomputes nothing, or ends early, leaves stale ones
there. Here the function that is recomputed holds the routing of its microbatch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.data.fields import ROUTES
from ragen_mega.data.types import Microbatch
from ragen_mega.models.shape import ModelShape

TopK = Callable[..., tuple[Tensor, Tensor]]
"""(scores [n, experts], k, ...) -> the k highest scores [n, k], and their experts"""


class Routing:
    """The routing of the nodes [n] of one microbatch that this tensor-parallel rank computes."""

    def __init__(
        self,
        micro: Microbatch,
        num_experts: int,
        *,
        part: tuple[int, int] = (0, 1),
        records: bool = False,
        counts: bool = False,
    ) -> None:
        """Take the routes of the microbatch, if it has any; padding gets experts in turn. `part`:
        number of this rank's part of the nodes, and the number of parts.
        """
        index, num_parts = part
        size = micro.forest.num_nodes // num_parts
        self.start = index * size
        """Number of the first node."""
        num_real = micro.forest.num_nodes - micro.forest.padding
        self.num_real = min(max(0, num_real - self.start), size)
        """Number of the nodes that are no padding, the first ones."""
        self.routes: Tensor | None = None
        """[n, layers, k] uint8 experts to go through; None: the routers choose."""
        if (routes := micro.further_fields.get(ROUTES)) is not None:
            self.routes = routes[self.start : self.start + size]
            padding = torch.arange(size - self.num_real, device=routes.device)[:, None, None]
            turn = torch.arange(routes.shape[-1], device=routes.device)
            self.routes[self.num_real :] = (padding + turn) % num_experts
        self.chosen: dict[int, Tensor] | None = {} if records else None
        """Layer -> experts [n, k] that the nodes went through; None: they are not recorded."""
        self.sums: dict[int, Tensor] | None = {} if counts else None
        """Layer -> what `_count` returns; None: nothing is counted."""

    def write(self, routes: Tensor, positions: Tensor, nodes: NDArray) -> None:
        """Write what was recorded into `routes` [T, layers, k], at the positions [P] of the
        microbatch, which are the nodes [P].
        """
        assert self.chosen is not None  # it `records`
        places = torch.from_numpy(nodes) - self.start
        is_here = (places >= 0) & (places < self.num_real)
        found = torch.stack([*self.chosen.values()], 1).to(routes.dtype).cpu()
        layers = torch.tensor([*self.chosen])
        routes[positions[is_here][:, None], layers] = found[places[is_here]]


class Choice:
    """The choice of a router: what megatron-core's router asks in place of its own `RouterReplay`,
    whose instances of all models are in one list.
    """

    def __init__(self, layer: int, config: TransformerConfig) -> None:
        if config.moe_router_fusion:
            raise ValueError(
                "moe_router_fusion chooses experts in one kernel, which replays none; set it to"
                " False"
            )
        self.layer = layer
        self.is_of_probabilities = config.moe_router_pre_softmax
        self.routing: Routing | None = None
        """Routing of the present microbatch; None: the router chooses."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [n, k] of the experts that the nodes go through, and these, for scores
        [n, experts]: logits, or probabilities where the softmax comes first.
        """
        routing = self.routing
        if routing is None:
            return choose(scores, topk, num_groups, group_topk)
        if routing.routes is None:
            found, experts = choose(scores, topk, num_groups, group_topk)
        else:
            experts = routing.routes[:, self.layer].long()
            found = scores.gather(1, experts)
        if routing.chosen is not None:
            routing.chosen[self.layer] = experts
        if routing.sums is not None:
            real = scores.detach()[: routing.num_real].float()
            probs = real if self.is_of_probabilities else real.softmax(1)
            routing.sums[self.layer] = _count(probs, experts[: routing.num_real])
        return found, experts


def _count(probs: Tensor, experts: Tensor) -> Tensor:
    """Return [experts + 3] float64 for the router's probabilities [n, experts] of tokens that go
    through `experts` [n, k]: the tokens of each expert; the sum of the entropies, in nats; the
    number of experts that the router would choose too; the probability of its choices minus the
    probability of `experts`.
    """
    best, own = probs.topk(experts.shape[1])
    is_used = torch.zeros_like(probs).scatter_(1, experts, 1.0)
    sums = (
        torch.special.entr(probs).sum(),
        is_used.gather(1, own).sum(),
        best.sum() - probs.gather(1, experts).sum(),
    )
    return torch.cat([is_used.sum(0), torch.stack(sums)]).double()


class MixtureLayer(TransformerLayer):
    """A layer with experts, whose router follows the `Routing` of each microbatch, also when its
    activations are recomputed.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._choice = self.mlp.router.router_replay = Choice(self.layer_number - 1, config)
        # megatron-core would recompute the experts without the routing
        self._is_recomputed, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False

    def forward(self, *arguments: Any, packed_seq_params: Any, **named: Any) -> Any:
        self._choice.routing = packed_seq_params.routing
        return super().forward(*arguments, packed_seq_params=packed_seq_params, **named)

    def _forward_mlp(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        routing = self._choice.routing

        def compute(hidden: Tensor) -> tuple[Tensor, None]:
            self._choice.routing = routing
            return self.mlp(hidden)

        normal = self._forward_pre_mlp_layernorm(hidden_states)
        if self._is_recomputed:
            output = tensor_parallel.checkpoint(compute, False, normal)
        else:
            output = compute(normal)
        return self._forward_post_mlp(output, hidden_states)


def check_routes(routes: Tensor, shape: ModelShape) -> None:
    """Raise ValueError unless routes [T, layers, k] name k different experts of the model."""
    expected = [shape.num_layers, shape.experts_per_token]
    if list(routes.shape[1:]) != expected:
        raise ValueError(
            f"routes of a token must be {expected} experts [layers, k], not"
            f" {list(routes.shape[1:])}; replay what the same model has recorded"
        )
    if not routes.numel():
        return
    ordered = routes.sort(dim=-1).values
    if int(ordered.max()) >= shape.num_experts:
        raise ValueError(
            f"routes must name experts below {shape.num_experts}, not {int(ordered.max())}; replay"
            " what the same model has recorded"
        )
    if (is_twice := (ordered[..., 1:] == ordered[..., :-1]).any(-1)).any():
        token, layer = is_twice.nonzero()[0].tolist()
        raise ValueError(
            f"routes must name {expected[1]} different experts for a token, not"
            f" {routes[token, layer].tolist()} as in layer {layer}; look for tokens without routes"
        )


def sums_of(routings: Sequence[Routing | None], shape: ModelShape, device: torch.device) -> Tensor:
    """Return [layers, experts + 3] float64: the sum of what `_count` returned for the microbatches,
    0 for layers of other ranks.
    """
    width = shape.num_experts + 3 if shape.num_experts else 0
    sums = torch.zeros(shape.num_layers, width, dtype=torch.float64, device=device)
    for routing in filter(None, routings):
        for layer, row in (routing.sums or {}).items():
            sums[layer] += row
    return sums


def routing_metrics(sums: Tensor, shape: ModelShape, *, replays: bool) -> dict[str, float]:
    """Return the metrics of a pass from the sums [layers, experts + 3] over all ranks."""
    load = sums[:, : shape.num_experts]
    entropy, overlap, drift = sums[:, shape.num_experts :].sum(0).tolist()
    num_choices = float(load.sum())
    num_tokens = num_choices / shape.experts_per_token
    metrics = {
        "routing_load": float((load.amax(1) / load.mean(1)).mean()),
        "routing_entropy": entropy / num_tokens,
    }
    if replays:
        metrics |= {
            "routing_overlap": overlap / num_choices,
            "routing_drift": drift / num_tokens,
        }
    return metrics
