"""The critic: values of the states before sampled tokens, and clipped value regression."""

from collections.abc import Callable, Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.algorithm.value_loss import explained_variance, value_loss
from ragen_mega.config import LoraConfig, LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.fields import ROUTES
from ragen_mega.data.types import Microbatch, TokenBatch
from ragen_mega.megatron.model import Chunks, build_model, transformer_config
from ragen_mega.megatron.trainer import Trainer
from ragen_mega.megatron.weights import export_weights, start_adapters


class MegatronCritic:
    """A value model with the policy's backbone and layout and its own optimizer. All methods are
    collective.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        groups: ProcessGroupCollection,
        parallel: ParallelConfig,
        train: TrainConfig,
        loss: LossConfig,
        *,
        lora: LoraConfig | None = None,
        base: Chunks | None = None,
    ) -> None:
        """`base`: the model, frozen, beside whose layers the adapters of `lora` stand."""
        lora = lora or LoraConfig()
        self.groups = groups
        self.value_clip = loss.value_clip
        config = transformer_config(hf, parallel)
        self.chunks = build_model(hf, config, groups, is_critic=True, lora=lora, base=base)
        start_adapters(self.chunks, train.seed + 1)
        lr = train.critic_lr * lora.lr_factor()
        self.trainer = Trainer(self.chunks, groups, parallel, train, lr=lr)
        self.trainer.cost = self.trainer.cost._replace(per_label=0)  # its head has one row

    def load_weights(self, read: Callable[[str], Tensor | None]) -> None:
        """Start from the Hugging Face tensors that `read` returns; without a value head in them
        values start at 0.
        """
        self.trainer.load_weights(read)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream of (Hugging Face name, full tensor), value head included; every rank must consume
        it.
        """
        self.trainer.memory.require("parameters")
        return export_weights(self.chunks, self.groups)

    def values(self, batch: TokenBatch) -> Tensor:
        """[T] value of the state in which each label is chosen, 0 where the label was not
        sampled.
        """
        return self.trainer.per_token(
            batch.without(ROUTES),
            lambda micro, output: micro.per_position(output) * micro.loss_mask,
        )

    def update(self, minibatch: TokenBatch) -> dict[str, float]:
        """Take one step of clipped value regression towards `returns`. Returns its metrics."""

        def loss(micro: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            values, given = micro.per_position(output), dict(micro.tensors())
            value, is_clipped = value_loss(
                values, given["values"], given["returns"], given["weights"], clip=self.value_clip
            )
            return value, torch.stack([value.detach().float(), is_clipped.sum()]), values.detach()

        sums, _, step = self.trainer.step(minibatch.without(ROUTES), loss, 2)
        mask, returns, values = minibatch.loss_mask, minibatch.returns, minibatch.values
        assert returns is not None and values is not None  # `score` has added them
        return {
            "loss": float(sums[0]),
            "clip_fraction": float(sums[1]) / max(1, int(mask.sum())),
            "explained_variance": explained_variance(values[mask], returns[mask]),
            "lr": self.trainer.lr,
        } | step
