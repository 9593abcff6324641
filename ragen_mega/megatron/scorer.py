"""Log-probabilities of sampled tokens under a model: of the policy, or of a teacher that is never
trained.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from ragen_kernels import linear_logprobs
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.config import ParallelConfig, TrainConfig
from ragen_mega.data.types import Microbatch, TokenBatch
from ragen_mega.megatron.model import build_model, transformer_config
from ragen_mega.megatron.trainer import Passes


class Scorer:
    """A model with its LM head. All methods are collective."""

    trainer: Passes
    temperature: float
    head: Any
    """The chunk that has the LM head on ranks of the last stage."""

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """[T] log-probability of each sampled label at the rollout temperature, 0 elsewhere."""
        return self.logprobs_and_entropies(batch)[0]

    def logprobs_and_entropies(
        self, batch: TokenBatch, routes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`logprobs`, and [T] entropy in nats of the distribution that each label was drawn from;
        the same pass gives both. `routes`: see `Trainer.per_token`.
        """
        logprobs, entropies = self.scores(batch, routes).t().contiguous()
        return logprobs, entropies

    def scores(
        self,
        batch: TokenBatch,
        routes: Tensor | None = None,
        *,
        top_k: int = 0,
        top_below: int | None = None,
    ) -> Tensor:
        """[T, 2 + 2 K] of `logprobs_and_entropies`, then log-probabilities and ids of the K
        likeliest tokens among those with ids less than `top_below` (None: all).
        """

        def compute(micro: Microbatch, output: Tensor) -> Tensor:
            hidden, labels, rows = self._head_rows(micro, output)
            columns = linear_logprobs(
                hidden,
                self.head.head_weight(),
                labels,
                temperature=self.temperature,
                rows=rows,
                top_k=top_k,
                top_below=top_below,
                **self.head.vocab_arguments(),
            )
            of_rows = micro.per_row(torch.stack(columns, dim=-1)[rows])
            found = of_rows.new_zeros(micro.num_positions, len(columns))
            return found.index_copy_(0, micro.rows, of_rows)

        return self.trainer.per_token(batch, compute, 2 + 2 * top_k, routes=routes)

    def _head_rows(self, micro: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states and labels for the LM head, and the rows of them that it has to
        compute: one for each edge of the microbatch.
        """
        hidden = self.head.head_input(output)
        if micro.edges is None:
            return hidden[: micro.num_positions], micro.labels, micro.rows
        nodes, labels = micro.edges.nodes, micro.edges.labels
        return hidden.index_select(0, nodes), labels, torch.arange(len(nodes), device=nodes.device)


class FrozenPolicy(Scorer):
    """A teacher: a model of the policy's tokens, under the policy's layout and temperature, without
    gradients and optimizer.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        groups: ProcessGroupCollection,
        parallel: ParallelConfig,
        train: TrainConfig,
        read: Callable[[str], Tensor | None],
        *,
        temperature: float,
    ) -> None:
        """`read`: Hugging Face name -> tensor."""
        chunks = build_model(hf, transformer_config(hf, parallel), groups)
        self.temperature = temperature
        self.head = chunks[-1]
        self.trainer = Passes(chunks, groups, parallel, train)
        self.trainer.load_weights(read)
