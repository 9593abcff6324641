"""StarPO (arXiv:2504.20073): alternate multi-turn rollouts with updates over whole trajectories.
The loop comes first.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.diagnostics import diagnose
from ragen_mega.algorithm.rewards import shape_rewards
from ragen_mega.algorithm.tables import PlugInError
from ragen_mega.config import parse
from ragen_mega.data.packing import pack
from ragen_mega.report.console import fail
from ragen_mega.report.metrics import Metrics
from ragen_mega.report.step_metrics import (
    custom_metrics,
    engine_vs_policy,
    filter_metrics,
    group_weights,
)
from ragen_mega.rollout.engine import EngineError, Interrupted
from ragen_mega.run.build import build
from ragen_mega.run.run import Run
from ragen_mega.run.stop import fail_if_rank_lost


def train(run: Run) -> None:
    """One StarPO step after another, until `num_steps`."""
    config, policy, critic, engine = run.config, run.policy, run.critic, run.engine

    for step in run.steps():
        metrics = Metrics()

        # Rollout: from each of P initial states sample N trajectories of at most K turns; then they
        # are on the disk.
        with run.phase("rollout"), run.handover(), engine.awake():
            with run.phase("sync"):
                run.send_weights()
            metrics.add("time", policy.sync_metrics())
            groups = run.collect(step)
        metrics.add("rollout", run.summarize(groups))
        metrics.add("custom", custom_metrics(groups, config.logging.metric_names))
        groups, rewards = shape_rewards(groups, config.advantage.reward_terms)
        metrics.add("reward", rewards)

        # Filter (StarPO-S, Eq. 7): keep the initial states whose raw returns vary most.
        kept = run.filter(groups)
        metrics.add("filter", filter_metrics(groups, kept))
        if not kept:
            run.finish_step(step, metrics)  # no initial state tells good from bad: nothing to learn
            continue

        # Advantages: everything the loss needs, under the weights that sampled the trajectories.
        with run.phase("advantages"):
            trajectories = [trajectory for group in kept for trajectory in group.trajectories]
            batch = pack(trajectories)
            batch = batch.with_fields(old_logprobs=policy.logprobs(batch))
            if critic:
                batch = batch.with_fields(values=critic.values(batch))
            if config.needs_reference:
                batch = batch.with_fields(ref_logprobs=policy.reference_logprobs(batch))
            batch = estimate_advantages(
                batch,
                trajectories,
                config.advantage,
                group_weights=group_weights(kept, config.filter),
            )
        metrics.add("mismatch", engine_vs_policy(batch))

        # Diagnose before the weights move: does reasoning still depend on its input (RAGEN-2)?
        interval = config.logging.diagnose_interval
        if interval and step % interval == 0:
            with run.phase("diagnose"):
                length = run.renderer.thought_length
                metrics.add("collapse", diagnose(groups, policy.logprobs, reasoning_length=length))

        # Update: clipped surrogate, E trajectories per optimizer step, reused `updates_per_rollout`
        # times (Online-k).
        with run.phase("update"):
            for minibatch in run.minibatches(batch, step):
                if critic:
                    metrics.add(
                        "critic",
                        run.faults.check(step, "critic", minibatch, critic.update(minibatch)),
                    )
                if step >= config.train.critic_warmup:
                    metrics.add(
                        "actor",
                        run.faults.check(step, "actor", minibatch, policy.update(minibatch)),
                    )

        # Report: warnings of the Echo Trap, evaluation when due, one row of metrics.
        run.finish_step(step, metrics)

    run.finish()


def main(argv: Sequence[str] | None = None, *, recipe: str = "none") -> None:
    """Parse flags, build everything, train. What cannot go on is one line and exit code 2 of every
    rank.

    SIGTERM leaves at once while the run is built, and with a checkpoint from then on.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        config = parse(sys.argv[1:] if argv is None else argv, recipe=recipe)
        run = build(config)
    except (ValueError, OSError, FloatingPointError, EngineError) as error:
        fail(str(error))
    except RuntimeError as error:
        fail_if_rank_lost(error)
        raise
    run.stop.listen()
    try:
        train_and_close(run)
    except (EngineError, OSError) as error:
        fail(str(error))
    except RuntimeError as error:
        fail_if_rank_lost(error)
        raise


def train_and_close(run: Run) -> None:
    """Train to the end, to a SIGTERM or to an error; then the run is closed."""
    try:
        train(run)
    except Interrupted:
        run.leave()
    except (FloatingPointError, PlugInError) as error:
        fail(f"{error}; {run.checkpoints.last()}")
    finally:
        run.close()


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
