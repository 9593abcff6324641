"""The policy: log-probabilities of sampled tokens, StarPO updates, and its weights for the rollout
engine.
"""

from collections.abc import Callable, Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from ragen_kernels import Likeliest, PolicyObjective, linear_policy_loss, logprob_entropy
from torch import Tensor, nn
from transformers import PretrainedConfig

from ragen_mega.config import LoraConfig, LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.fields import ROUTES, TEACHER_IDS, TEACHER_LOGPROBS
from ragen_mega.data.types import Microbatch, TokenBatch
from ragen_mega.megatron.lora import without_adapters
from ragen_mega.megatron.model import build_model, transformer_config
from ragen_mega.megatron.offload import HostCopy
from ragen_mega.megatron.resharding import Traffic
from ragen_mega.megatron.scorer import Scorer
from ragen_mega.megatron.trainer import Trainer
from ragen_mega.megatron.weights import (
    export_weights,
    load_adapters,
    start_adapters,
    trained,
)
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard

_MEANS = (
    "entropy",
    "approx_kl",
    "clip_fraction_low",
    "clip_fraction_high",
    "dual_clip_fraction",
    "importance",
    "importance_masked",
    "ref_kl",
    "forking_share",
    "teacher_kl",
)
"""Metrics of an update that are means over the sampled tokens."""


class MegatronPolicy(Scorer):
    """An actor on tensor, pipeline and data-parallel ranks. All methods are collective."""

    def __init__(
        self,
        hf: PretrainedConfig,
        groups: ProcessGroupCollection,
        parallel: ParallelConfig,
        train: TrainConfig,
        loss: LossConfig,
        *,
        temperature: float,
        keep_reference: bool = False,
        lora: LoraConfig | None = None,
        teacher_coef: float = 0.0,
    ) -> None:
        """`teacher_coef`: factor in the loss of the divergence from a teacher's likeliest tokens,
        which the batches then have.
        """
        lora = lora or LoraConfig()
        self.hf = hf
        self.groups = groups
        self.temperature = temperature
        self.aggregation = loss.loss_aggregation
        self.objective = PolicyObjective(
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
            dual_clip=loss.dual_clip,
            kl_kind=None if loss.kl_kind == "none" else loss.kl_kind,
            kl_coef=loss.kl_coef,
            entropy_coef=loss.entropy_coef,
            importance_cap=loss.importance_cap,
            surrogate=loss.policy_loss,
            importance_mode=loss.importance_mode,
            importance_floor=loss.importance_floor,
            importance_level=loss.importance_level,
            min_entropy=loss.min_entropy,
            teacher_coef=teacher_coef,
        )
        skipped = {
            "importance_masked": self.objective.importance_mode != "mask",
            "ref_kl": self.objective.kl_kind is None,
            "forking_share": not self.objective.min_entropy,
            "teacher_kl": not teacher_coef,
        }
        self._means = [name for name in _MEANS if not skipped.get(name)]
        self.chunks = build_model(hf, transformer_config(hf, parallel), groups, lora=lora)
        start_adapters(self.chunks, train.seed)
        self.head = self.chunks[-1]
        self.trainer: Trainer = Trainer(
            self.chunks,
            groups,
            parallel,
            train,
            lr=train.lr * lora.lr_factor(train.adam_eps),
            first_step=train.critic_warmup,
            decoupled_lr=train.decoupled_lr,
            adam_eps=train.adam_eps,
        )
        self.passed: Tensor
        """[T, 2] log-probabilities and entropies of the latest update's minibatch, under the
        weights before it.
        """
        self._records_routes = train.routing_replay == "policy"
        self._keep_reference = keep_reference
        self._reference: HostCopy | None = None
        self.traffic = Traffic()
        """Traffic of the last export."""

    def load_weights(self, read: Callable[[str], Tensor | None]) -> None:
        """Start from the Hugging Face tensors that `read` returns; they are also the reference
        policy.
        """
        self.trainer.load_weights(read)
        if self._keep_reference and not self.chunks[0].lora.rank:
            self._reference = self.trainer.memory.snapshot("parameters")

    def load_adapter(self, read: Callable[[str], Tensor | None]) -> None:
        """Start from the adapter that `read` returns, by PEFT's names without their prefix."""
        self.trainer.memory.require("parameters", "optimizer")
        load_adapters(self.chunks, read)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Stream of (PEFT's name without its prefix, full tensor) of the adapters; every rank must
        consume it.
        """
        self.trainer.memory.require("parameters")
        own = {slot.parameter: parameter for slot, parameter in trained(self.chunks)}
        self.traffic = Traffic()
        return export_weights(self.chunks, self.groups, tensors=own, traffic=self.traffic)

    def local_weights(self) -> list[nn.Parameter]:
        """Return this rank's part of the weights."""
        self.trainer.memory.require("parameters")
        return list(self.chunks.parameters())

    def export_weights(
        self, part: EngineShard | None = None, *, is_merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream of (Hugging Face name, full tensor), or of (SGLang's name, this part of the
        tensor); every rank must consume it. Adapters are merged unless the base is asked for.

        The weights must be on the device when the first is asked for.
        """
        self.trainer.memory.require("parameters")
        self.traffic = Traffic()
        yield from export_weights(
            self.chunks, self.groups, part, traffic=self.traffic, is_merged=is_merged
        )

    def with_old_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """Add the old log-probabilities with their entropies. Under `--routing-replay policy` the
        routes of this pass are added, which later passes replay.
        """
        if not self._records_routes:
            logprobs, entropies = self.logprobs_and_entropies(batch)
            return batch.with_fields(old_logprobs=logprobs, entropies=entropies)
        shape = self.head.shape
        size = batch.num_positions, shape.num_layers, shape.experts_per_token
        routes = torch.zeros(size, dtype=torch.uint8)
        logprobs, entropies = self.logprobs_and_entropies(batch, routes)
        routes = collectives.sum_over_ranks(routes)
        return batch.with_fields(old_logprobs=logprobs, entropies=entropies, routes=routes)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """[T] log-probabilities under the frozen weights that training started from: a copy in
        host memory, or the base without its adapters.
        """
        return self.reference_scores(batch)[:, 0].contiguous()

    def reference_scores(
        self, batch: TokenBatch, *, top_k: int = 0, top_below: int | None = None
    ) -> Tensor:
        """`scores` under the weights of `reference_logprobs`."""
        if self.chunks[0].lora.rank:
            with without_adapters(self.chunks):
                return self.scores(batch, top_k=top_k, top_below=top_below)
        assert self._reference is not None, "built without a reference policy"
        with self.trainer.memory.replaced("parameters", self._reference):
            return self.scores(batch, top_k=top_k, top_below=top_below)

    def update(self, minibatch: TokenBatch) -> dict[str, float]:
        """Take one clipped-surrogate step on a minibatch with advantages. Returns its metrics.

        Without old log-probabilities the pass uses its own, which is right for the first step under
        the weights that sampled: the ratio is 1.
        """

        def loss(micro: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert micro.advantages is not None and micro.weights is not None  # of the minibatch
            hidden, labels, _ = self._head_rows(micro, output)
            value, stats = linear_policy_loss(
                hidden,
                self.head.head_weight(),
                labels,
                micro.old_logprobs,
                micro.advantages,
                micro.weights,
                self.objective,
                rows=micro.rows,
                repeats=None if micro.edges is None else micro.edges.repeats,
                ref_logprobs=micro.ref_logprobs,
                rollout_logprobs=micro.rollout_logprobs,
                teacher=_likeliest_of(micro),
                cu_seqlens=micro.cu_seqlens,
                context_group=self.groups.cp if self.groups.cp.size() > 1 else None,
                temperature=self.temperature,
                **self.head.vocab_arguments(),
            )
            is_active = micro.weights != 0
            per_token = {
                "entropy": stats.entropy,
                "approx_kl": stats.kl,
                "clip_fraction_low": stats.is_clipped_low,
                "clip_fraction_high": stats.is_clipped_high,
                "dual_clip_fraction": stats.is_dual_clipped,
                "importance": stats.importance,
                "importance_masked": (stats.importance == 0) & is_active,
                "forking_share": (stats.entropy >= self.objective.min_entropy) & is_active,
            }
            optional = {"ref_kl": stats.ref_kl, "teacher_kl": stats.teacher_kl}
            per_token |= {name: kl for name, kl in optional.items() if kl is not None}
            sums = torch.stack([per_token[name].float() for name in self._means]).sum(1)
            passed = torch.stack([stats.logprobs, stats.entropy], dim=1)
            return value, torch.cat([value.detach().float().reshape(1), sums]), passed

        sums, self.passed, step = self.trainer.step(
            minibatch, loss, 1 + len(self._means), 2, mode=self.aggregation
        )
        num_tokens = max(1, int(minibatch.loss_mask.sum()))
        loss_sum, *totals = sums.tolist()
        metrics = {name: total / num_tokens for name, total in zip(self._means, totals)}
        metrics["loss"] = loss_sum
        return metrics | step | {"lr": self.trainer.lr}

    def clone(self, minibatch: TokenBatch) -> dict[str, float]:
        """Take one behaviour-cloning step: mean negative log-likelihood of the tokens under the
        loss mask, at the temperature.
        """

        def loss(micro: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert micro.weights is not None  # of `Trainer.step`
            hidden, labels, rows = self._head_rows(micro, output)
            logprobs, _ = logprob_entropy(
                hidden[rows] @ self.head.head_weight().t(),
                labels[rows],
                temperature=self.temperature,
                **self.head.vocab_arguments(),
            )
            value = -(micro.weights[micro.rows] * micro.per_row(logprobs)).sum()
            return value, value.detach().float().reshape(1), torch.zeros_like(micro.weights)

        sums, _, step = self.trainer.step(minibatch.without(ROUTES), loss, 1)
        return {"loss": float(sums[0])} | step | {"lr": self.trainer.lr}


def _likeliest_of(micro: Microbatch) -> Likeliest | None:
    """Return the tokens that a teacher finds likeliest, if the batch has them."""
    fields = micro.further_fields
    if TEACHER_IDS not in fields:
        return None
    return Likeliest(fields[TEACHER_IDS].long(), fields[TEACHER_LOGPROBS])
