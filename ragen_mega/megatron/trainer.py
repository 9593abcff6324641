"""One model on megatron-core's schedules: per-token forward passes and optimizer steps over packed
trajectories.

Forward and loss are written once; the schedule of megatron-core owns pipelining, its DDP and
optimizer own reduction, clipping and the update. Each data-parallel rank computes a share of the
batch, `TokenBatch.here` or one of even cost, and per-token results and metrics are exchanged over
the control group, so that all ranks go on with the same numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from ragen_mega.algorithm.aggregation import AggregationMode, aggregation_weights
from ragen_mega.config import ParallelConfig, TrainConfig
from ragen_mega.data.fields import ROUTES
from ragen_mega.data.packing import (
    ContextRank,
    Share,
    costs_of,
    microbatch,
    part_of,
    parts_of,
    shares,
)
from ragen_mega.data.types import Microbatch, TokenBatch
from ragen_mega.megatron import cpu
from ragen_mega.megatron.adam import find_updated, update_in_parts
from ragen_mega.megatron.layers import drop_quantised_weights
from ragen_mega.megatron.model import Chunks, model_inputs
from ragen_mega.megatron.offload import Kind, Offloadable
from ragen_mega.megatron.precision import scales_from_history, token_alignment
from ragen_mega.megatron.routing import Routing, check_routes, routing_metrics, sums_of
from ragen_mega.megatron.weights import load_weights, mark_tensor_parallel, trained
from ragen_mega.ranks import collectives
from ragen_mega.ranks.waits import here

MAX_DISTINCT_SHARE = {"on": 1.0, "auto": 0.97, "off": 0.0}
"""Shared prefixes are merged only if at most this share of the positions is distinct: building the
forest has a cost.
"""
PerToken = Callable[[Microbatch, Tensor], Tensor]
"""(microbatch, model output) -> [T] float32"""
Loss = Callable[[Microbatch, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(microbatch, model output) -> scalar loss, [M] float32 sums of metrics, [T] or [T, V] float32
per-token values
"""


class Passes:
    """A model on megatron-core's schedules, without gradients."""

    def __init__(
        self,
        chunks: Chunks,
        groups: ProcessGroupCollection,
        parallel: ParallelConfig,
        train: TrainConfig,
    ) -> None:
        mark_tensor_parallel(chunks)
        self.chunks = chunks
        """The models of this rank: one, or several under the interleaved schedule."""
        self.models: list[Any] = list(chunks)
        """Models that the schedule drives."""
        self.groups = groups
        self.max_tokens = train.microbatch_tokens
        self.alignment = token_alignment(parallel)
        self.shape = chunks[0].shape
        self.cost = self.shape.cost
        self.most_nodes = MAX_DISTINCT_SHARE[
            train.shared_prefixes if parallel.fp8 == "none" else "off"
        ]
        self._lacks_scales = scales_from_history(chunks[0].config)
        self.memory = Offloadable(self._tensors)
        self.memory.forget = partial(drop_quantised_weights, chunks)

    def load_weights(self, read: Callable[[str], Tensor | None]) -> None:
        """Take the Hugging Face tensors that `read` returns."""
        self.memory.require("parameters")
        load_weights(self.chunks, read)

    def per_token(
        self, batch: TokenBatch, compute: PerToken, *columns: int, routes: Tensor | None = None
    ) -> Tensor:
        """[T] of `compute`, or [T, columns], over all trajectories of `batch`, without gradients;
        for labels that were sampled equal on every rank.

        A mixture's tokens go through the experts that a batch has as `routes`. The experts that
        they went through are written into the argument `routes` [T, layers, k] uint8, of this
        rank's tokens and layers.
        """
        batch = batch.by_segment()
        self.memory.require("parameters")
        result = torch.zeros(batch.num_positions, *columns)
        parts = self._parts(batch)
        if micros := self._microbatches(batch, parts):
            self.chunks.eval()
            # delayed scaling learns them from a pass, and only where gradients are enabled
            if self._lacks_scales:
                first = micros[: self._at_once]
                self._run(first, compute, self._routings(first), forward_only=True)
                self._lacks_scales = False
            with torch.no_grad():
                routings = self._routings(micros, records=routes is not None)
                outputs = self._run(micros, compute, routings, forward_only=True)[: len(parts)]
            if routes is not None:
                for micro, routing in zip(micros[: len(parts)], filter(None, routings)):
                    routing.write(routes, micro.batch_positions, micro.forest.sources)
            if self._reports and parts:
                positions, values = _joined(micros, outputs)
                result[positions] = values.cpu()
        return _on_all_ranks(result, batch.loss_mask)

    @property
    def _reports(self) -> bool:
        """Whether this rank holds results that others do not: one tensor-parallel rank of the last
        stage.
        """
        return self.chunks[-1].post_process and self.groups.tp.rank() == 0

    @property
    def _at_once(self) -> int:
        """Number of microbatches of which the schedule takes a multiple: with several chunks it
        passes as many as there are stages through one before it turns to the next.
        """
        return self.groups.pp.size() if len(self.chunks) > 1 else 1

    def _parts(self, batch: TokenBatch) -> list[Share]:
        """Return this data-parallel rank's microbatches, which its context-parallel ranks compute
        together.
        """
        dp, stages = self.groups.dp, self.groups.pp.size()
        cost, most_nodes = self.cost, self.most_nodes
        costs = costs_of(batch, cost)
        if batch.here is not None:
            ids = batch.here.nonzero()[:, 0].tolist()
        else:
            ids = shares(
                batch.tokens, batch.cu_seqlens, costs, dp.size(), cost=cost, most_nodes=most_nodes
            )[dp.rank()]
        if not ids:
            return []
        return parts_of(
            batch, ids, self.max_tokens * self.groups.cp.size(),
            cost=cost, costs=costs, most_nodes=most_nodes, num_stages=stages,
        )  # fmt: skip

    def _microbatches(
        self, batch: TokenBatch, parts: list[Share], at_least: int = 0
    ) -> list[Microbatch]:
        """Return the microbatches of one pass: the microbatches of `parts` and, so that this rank
        takes part in as many collectives as others, some of no weight. There are `at_least` so
        many, with expert parallelism as many on all ranks, since tokens travel between them in
        every layer, and a multiple of what the schedule takes at once.

        In a pipeline all have one size: stages then need not exchange shapes, and they wait for the
        longest anyway.
        """
        number, multiple = max(at_least, len(parts)), self.alignment
        if self.groups.ep.size() > 1:
            number = int(collectives.max_over_ranks(torch.tensor(number)))
        number += -number % self._at_once
        idle = [Share([int(batch.lengths.argmin())], [0])] * (number - len(parts))
        cp = self.groups.cp
        cut = partial(
            part_of, context=ContextRank(cp.rank(), cp.size(), self.cost, self.max_tokens)
        )
        weightless = batch.with_fields(weights=torch.zeros(batch.num_positions)) if idle else batch
        own = [cut(batch, part) for part in parts] + [cut(weightless, part) for part in idle]
        if self.groups.pp.size() > 1 and number:
            longest = max(part.forest.num_nodes for part in own)
            multiple = max(1, -(-longest // multiple)) * multiple
        if (routes := batch.further_fields.get(ROUTES)) is not None and parts:
            positions = torch.cat([batch.positions(part.ids) for part in parts])
            check_routes(routes[positions], self.shape)
        return [microbatch(part, multiple=multiple, device=collectives.device()) for part in own]

    def _routings(self, micros: list[Microbatch], **options: bool) -> list[Routing | None]:
        """Return the routing of each microbatch on this rank; None in a model without experts."""
        if not self.shape.num_experts:
            return [None] * len(micros)
        tp = self.groups.tp
        part = (tp.rank(), tp.size()) if self.chunks[0].config.sequence_parallel else (0, 1)
        num_experts = self.shape.num_experts
        return [Routing(micro, num_experts, part=part, **options) for micro in micros]

    def _run(
        self,
        micros: list[Microbatch],
        function: Callable[[Microbatch, Tensor], Any],
        routings: list[Routing | None],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Drive megatron-core's schedule. On the last stage: one result per microbatch; elsewhere
        nothing.
        """

        def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable]:
            micro, routing = next(iterator)
            inputs = model_inputs(micro, routing, self.groups.cp)
            return model(**inputs), partial(loss_function, micro)

        def loss_function(micro: Microbatch, output: Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return function(micro, output)
            loss, *result = function(micro, output)
            return loss, torch.ones((), dtype=torch.int, device=loss.device), result

        chunks = len(self.chunks) if len(self.chunks) > 1 else None
        return get_forward_backward_func(self.groups.pp.size(), chunks)(
            forward_step_func=forward_step,
            data_iterator=[zip(micros, routings) for _ in self.models],
            model=self.models,
            num_microbatches=len(micros),
            # the same for all, since stages exchange them; megatron-core divides it
            seq_length=micros[0].forest.num_nodes * self.groups.cp.size(),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _tensors(self) -> Iterator[tuple[Kind, str, Tensor]]:
        """Yield everything large that this model keeps."""
        for name, parameter in self.chunks.named_parameters():
            # a base beside which adapters stand is of several models, and stays
            if parameter.requires_grad or not self.chunks[0].lora.rank:
                yield "parameters", name, parameter


class Trainer(Passes):
    """A model, its gradient buffers, its optimizer and its learning-rate schedule."""

    def __init__(
        self,
        chunks: Chunks,
        groups: ProcessGroupCollection,
        parallel: ParallelConfig,
        train: TrainConfig,
        *,
        lr: float,
        first_step: int = 0,
        decoupled_lr: float | None = None,
        adam_eps: float = 1e-8,
    ) -> None:
        """`first_step`: the step of the run in which its schedule begins."""
        super().__init__(chunks, groups, parallel, train)
        config = chunks[0].config  # the same object for all
        self._lacks_gradient_scales = self._lacks_scales
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_grad_reduce=groups.dp_cp.size() > 1,
        )
        # passes of other chunks hide the reduction of a later one
        self.models = [
            DistributedDataParallel(config, reduction, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        # gradients are reduced during the backward pass of the last microbatch
        config.no_sync_func = self._no_sync
        config.finalize_model_grads_func = _sum_gradients
        options = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=0.0,
            decoupled_lr=decoupled_lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=adam_eps,
            clip_grad=train.clip_grad,
            bf16=parallel.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
        )
        with cpu.cuda_literals_as_cpu():
            self.optimizer = get_megatron_optimizer(
                options, self.models, use_gloo_process_groups=False, pg_collection=groups
            )
        self.schedule = _Schedule(self.optimizer, train, lr, first_step)
        self._lrs = [group["max_lr"] for group in self.optimizer.param_groups]
        # megatron-core has one of no parameters for dense weights where experts alone have adapters
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        self.optimizers = [part for part in parts if not part.is_stub_optimizer]
        # On a processor torch's Adam then updates all parameters in one call, where it otherwise
        # takes a dozen for each, which small models feel.
        for group in self.optimizer.param_groups if cpu.is_active() else ():
            group["fused"] = True
        self.updated = find_updated(chunks, self.optimizers)
        if parallel.optimizer_cpu_offload:
            self.memory.park("optimizer")
            update_in_parts(self.updated.values(), self.memory)

    def set_lr_factor(self, factor: float) -> None:
        """Let the learning rate be this share of what the schedule says, now and later."""
        for group, highest in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["max_lr"] = highest * factor
        self.schedule.step(0)

    def load_weights(self, read: Callable[[str], Tensor | None]) -> None:
        """Start from the Hugging Face tensors that `read` returns."""
        self.memory.require("parameters", "optimizer")

        def start(parameter: nn.Parameter, values: Tensor) -> None:
            if (item := self.updated.get(parameter)) is not None:
                with self.memory.borrowed("optimizer", item.tensors):
                    item.start(values)

        load_weights(self.chunks, read, start)

    def step(
        self,
        batch: TokenBatch,
        loss: Loss,
        num_metrics: int,
        num_values: int = 1,
        mode: AggregationMode = "token-mean",
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Take one optimizer step on a loss that `mode` aggregates. Returns the metric sums [M]
        over the batch, the loss first, the per-token values [T, V] of the pass, equal on every
        rank, and metrics of the update.

        `grad_norm` is the norm before clipping. A loss or gradient that is not finite leaves
        weights and optimizer as they are, on all ranks; then `grad_norm` is nan and `skipped` is 1.
        """
        self.memory.require("parameters", "gradients", "optimizer")
        if not self.chunks.training:  # it visits every module
            self.chunks.train()
        self._zero_gradients()
        self.optimizer.zero_grad()
        weights = aggregation_weights(batch.loss_mask, batch.cu_seqlens, mode)
        batch = batch.with_fields(weights=weights).by_segment()
        parts = self._parts(batch)
        micros = self._microbatches(batch, parts, at_least=1)
        # without scales the small gradients of the first pass would be zeros in FP8
        if self._lacks_gradient_scales:
            first = micros[: self._at_once]
            self._run(first, loss, self._routings(first), forward_only=False)
            self._zero_gradients()
            self._lacks_scales = self._lacks_gradient_scales = False
        routings = self._routings(micros, counts=True)
        results = self._run(micros, loss, routings, forward_only=False)[: len(parts)]
        counted = sums_of(routings[: len(parts)], self.shape, collectives.device())
        forests = [micro.forest for micro in micros]
        counts = [
            sum(forest.num_nodes - forest.padding for forest in forests[: len(parts)]),
            sum(sum(forest.received) for forest in forests),
        ]
        if replays := ROUTES in batch.further_fields:
            counts.append(_num_nodes(batch, self._parts(batch.without(ROUTES))))
            counts[-1] *= self.groups.cp.rank() == 0
        totals, square, counted, numbers, values = self._exchange(
            batch, micros, results, counted, counts, (num_metrics, num_values)
        )
        norm = math.nan
        # megatron-core's optimizer looks for inf and nan only when it scales the loss, which
        # float32 and bfloat16 do not. With a norm whose square overflows in float32, clipping would
        # multiply all gradients by zero, and Adam would still move.
        if square <= torch.finfo(torch.float32).max and math.isfinite(totals[0]):
            with cpu.stepping(self.optimizers):
                _, norm, _ = self.optimizer.step()
        computed, received, *unshared = numbers.tolist()
        metrics = {
            "grad_norm": float(norm),
            "skipped": float(not math.isfinite(norm)),
            "computed_share": computed / batch.num_positions,
        }
        if self.groups.cp.size() > 1:
            width = 2 * self.shape.kv_size * self.shape.num_layers  # a token's keys and values
            itemsize = self.chunks[0].config.params_dtype.itemsize
            metrics["context_gbytes"] = received * width * itemsize / 1e9
        if replays:
            metrics["routing_unshared"] = (computed - sum(unshared)) / batch.num_positions
        if counted.numel():
            metrics |= routing_metrics(counted, self.shape, replays=replays)
        return totals, values, metrics

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced, clipped gradient of every local parameter after `step`, under the
        name that its slot has (not with the distributed optimizer).
        """
        self.memory.require("gradients")
        return {slot.parameter: vars(item)["main_grad"] for slot, item in trained(self.chunks)}

    @property
    def lr(self) -> float:
        """Learning rate of the layers."""
        return self.optimizer.param_groups[0]["lr"]

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Keep the gradients of the block on this rank."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    def _zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()

    def _exchange(
        self,
        batch: TokenBatch,
        micros: list[Microbatch],
        results: list[Any],
        counted: Tensor,
        counts: list[int],
        num_results: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the metric sums [M], the square of the gradient norm [1], what routers have
        counted, the sums of the counts and the values [T, V] of a pass, exchanged among all ranks.
        `num_results` are M and V. The host waits for the device once.
        """
        num_metrics, num_values = num_results
        found = torch.cat([self._squared_norm(), counted.flatten()])
        sizes = [1, counted.numel(), num_metrics, len(counts)]
        positions = torch.empty(0, dtype=torch.int64)
        totals = torch.zeros(sum(sizes)).double()
        whole = torch.zeros(batch.num_positions, num_values)
        if self._reports and results:
            sums = torch.stack([sums for sums, _ in results]).double().sum(0)
            positions, values = _joined(micros, [values for _, values in results])
            found = torch.cat([found, sums, values.double().flatten()])
            totals[-len(counts) :] = torch.tensor(counts)
        found, values = found.cpu().tensor_split([sum(sizes[:3])])
        totals[: len(found)], whole[positions] = found, values.view(-1, num_values).float()
        values = _on_all_ranks(whole, batch.loss_mask)
        square, routed, totals, numbers = collectives.sum_over_ranks(totals).split(sizes)
        return totals, square, routed.view_as(counted), numbers, values

    def _tensors(self) -> Iterator[tuple[Kind, str, Tensor]]:
        """Yield what the model keeps, and what its training does."""
        yield from super()._tensors()
        for index, buffer in enumerate(self._buffers()):
            yield "gradients", f"buffer_{index}", buffer.grad_data
        for item in self.updated.values():
            for name, tensor in item.tensors():
                yield "optimizer", name, tensor

    def _buffers(self) -> list[Any]:
        """Return megatron-core's contiguous gradients, the experts' gradients apart."""
        return [
            buffer
            for model in self.models
            for buffer in model.buffers + model.expert_parallel_buffers
        ]

    def _squared_norm(self) -> Tensor:
        """[1] float64 on the device: of this rank's gradient buffers."""
        norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in self._buffers()]
        return torch.stack(norms).double().square().sum().reshape(1)


class _Schedule(OptimizerParamScheduler):
    """The schedule of `TrainConfig`: megatron-core's would warm up from a rate of 0. It also
    applies weight decay per group: without a scheduler megatron-core decays norms and biases.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, train: TrainConfig, lr: float, first_step: int
    ) -> None:
        self._share = partial(train.schedule, first=first_step)
        super().__init__(
            optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=train.weight_decay,
            end_wd=train.weight_decay,
            wd_incr_steps=train.num_steps,
            wd_incr_style="constant",
        )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of a group of parameters in the present step."""
        return param_group["max_lr"] * self._share(self.num_steps)


def _num_nodes(batch: TokenBatch, parts: Sequence[Share]) -> int:
    """Return the number of nodes of microbatches, without padding."""
    return sum(int(batch.lengths[ids].sum()) - sum(shared) for ids, shared in parts)


def _joined(micros: Sequence[Microbatch], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the batch positions of the microbatches that have values, and these."""
    positions = [micro.batch_positions for micro, _ in zip(micros, values)]
    return torch.cat(positions), torch.cat(values).float()


def _on_all_ranks(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values [T], or [T, columns], under the mask, each of which one rank has computed,
    with the values of all ranks.
    """
    if collectives.world_size() > 1:
        values[mask] = collectives.sum_over_ranks(values[mask])
    return values


def _sum_gradients(model: list, num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """megatron-core's reduction without its division: `TokenBatch.weights` already holds the global
    normaliser. One rank alone has nothing to reduce.
    """
    if collectives.world_size() > 1:
        with here.waiting("ranks", "gradients of every rank"):  # on a GPU the host goes on
            finalize_model_grads(model, None, **kwargs)
