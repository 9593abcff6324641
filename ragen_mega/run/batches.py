"""Batch of a training step: the kept trajectories, packed, with the log-probabilities that they
had, and their minibatches.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragen_mega.config import StarPOConfig
from ragen_mega.data.exchange import gather_field, keep_trained
from ragen_mega.data.packing import (
    behind_first_message,
    choose_owners,
    count_minibatches,
    minibatch_ids,
    pack,
)
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.ranks.collectives import gather_objects, on_main
from ragen_mega.report.console import Console
from ragen_mega.report.step_metrics import engine_vs_policy
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.run.log import StepLog
from ragen_mega.run.timers import Timers


class Batches:
    """The batch of one step after another. Its methods are collective."""

    def __init__(
        self,
        config: StarPOConfig,
        policy: MegatronPolicy,
        renderer: ChatRenderer,
        console: Console,
        timers: Timers,
    ) -> None:
        self.config = config
        self.policy = policy
        self.renderer = renderer
        self.console = console
        self.timers = timers
        self._sizes = config.train.minibatch_size, config.train.updates_per_rollout
        self._dp = policy.groups.dp
        self._homes = gather_objects(self._dp.rank())
        self._owners: Tensor | None = None  # ranks of the present batch, see `choose_owners`

    def pack(
        self, groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup], step: int
    ) -> TokenBatch:
        """Pack the trajectories of `kept`. A rank then holds only the tokens of the `groups` that
        it trains, and rank 0 also of the groups that it traces.
        """
        trajectories = [member for group in kept for member in group.trajectories]
        config, dp, trainer = self.config, self._dp, self.policy.trainer
        owners: Tensor | None = None  # every rank needs all tokens
        reads_all = config.advantage.estimator.reads_tokens or config.loss.loss_mask == "legacy"
        if dp.size() > 1 and not reads_all:
            owners = on_main(
                lambda: choose_owners(
                    trajectories,
                    [*minibatch_ids(len(trajectories), *self._sizes, self._generator(step))],
                    dp.size(),
                    homes=self._homes,
                    cost=trainer.cost,
                    most_nodes=trainer.most_nodes,
                )
            )
        self._owners = owners
        num_shown = config.logging.trace_groups
        keep_trained(groups, trajectories, owners, homes=self._homes, num_shown=num_shown)
        return pack(trajectories, None if owners is None else owners[0] == dp.rank())

    def with_old_logprobs(self, batch: TokenBatch, log: StepLog) -> TokenBatch:
        """`batch` with the old log-probabilities that `--old-logprobs` asks for. The batch stays as
        it is if the forward pass of the step's only optimizer step yields them. Log-probabilities
        that the policy computes here are compared with the engine's.
        """
        config = self.config
        if config.loss.loss_mask == "legacy":
            return self._unmasked(batch, log)
        size, passes = self._sizes
        updates = passes * count_minibatches(batch.num_trajectories, size)
        source = config.old_logprobs_from(updates)
        if source == "engine":
            return batch.with_fields(old_logprobs=gather_field(batch, "rollout_logprobs"))
        if source == "update" and config.train.trains_actor(log.step):
            return batch
        batch = self.policy.with_old_logprobs(batch)
        assert batch.old_logprobs is not None  # just added
        log.add("mismatch", engine_vs_policy(batch, batch.old_logprobs))
        return batch

    def with_passes(self, batch: TokenBatch, log: StepLog) -> TokenBatch:
        """`batch` for the viewer: where no pass has computed the old log-probabilities, each token
        has log-probability and entropy of its first update, or neither.
        """
        if batch.entropies is not None or not self.config.logging.trace_groups:
            return batch
        found = torch.full((batch.num_positions, 2), math.nan)
        num_first = count_minibatches(batch.num_trajectories, self._sizes[0])
        plan = minibatch_ids(batch.num_trajectories, *self._sizes, self._generator(log.step))
        for ids, passed in zip(plan, log.passes[:num_first]):
            found[batch.positions(ids)] = passed
        if not found[batch.loss_mask].isfinite().all():  # the critic alone was trained, or nothing
            return replace(batch, old_logprobs=None)
        logprobs, entropies = found.unbind(1)
        return batch.with_fields(old_logprobs=logprobs, entropies=entropies)

    def _unmasked(self, batch: TokenBatch, log: StepLog) -> TokenBatch:
        """Apply the legacy loss mask. Tokens that were not sampled get the policy's own
        log-probabilities as the engine's, and are left out of their comparison.
        """
        end = self.renderer.end_of_turn
        mask = behind_first_message(batch.by_segment(), end) | batch.loss_mask
        wide = self.policy.with_old_logprobs(batch.with_fields(loss_mask=mask))
        assert wide.old_logprobs is not None  # just added
        log.add("mismatch", engine_vs_policy(batch, wide.old_logprobs))
        of_engine = torch.where(batch.loss_mask, batch.rollout_logprobs, wide.old_logprobs)
        return wide.with_fields(rollout_logprobs=of_engine)

    def minibatches(self, batch: TokenBatch, step: int) -> Iterator[TokenBatch]:
        """Yield the minibatches of a step, of the same trajectories on every rank and at every
        call.
        """
        size, passes = self._sizes
        plan = [*minibatch_ids(batch.num_trajectories, size, passes, self._generator(step))]
        self.timers.trained_tokens = batch.num_positions * passes
        per_pass = count_minibatches(batch.num_trajectories, size)
        with self.console.progress("update", len(plan)) as progress:
            for index, ids in enumerate(plan):
                minibatch = batch.select(ids)
                if batch.here is not None and self._owners is not None:
                    here = self._owners[index // per_pass, ids] == self._dp.rank()
                    minibatch = replace(minibatch, here=here)
                yield minibatch
                progress.advance()

    def _generator(self, step: int) -> torch.Generator:
        """Return the source of the order in which the trajectories of a step are trained."""
        return torch.Generator().manual_seed((self.config.train.seed * 1_000_003 + step) % 2**63)
