"""StarPO (arXiv:2504.20073): alternate multi-turn rollouts with updates over whole trajectories.
The loop comes first.
"""

import gc
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.data.distributed import device, is_main, on_each, on_main
from ragen_mega.megatron.initialize import shutdown
from ragen_mega.report.console import fail
from ragen_mega.report.metrics import Metrics
from ragen_mega.report.step_metrics import (
    custom_metrics,
    engine_vs_policy,
    filter_metrics,
    group_weights,
)
from ragen_mega.rollout.engine import EngineError, Interrupted
from ragen_mega.rollout.holding import shape_on_main
from ragen_mega.run.build import build
from ragen_mega.run.guards import nothing_to_learn
from ragen_mega.run.nodes import watched
from ragen_mega.run.placement import Phase
from ragen_mega.run.run import Run, count_sampled
from ragen_mega.run.separate import Sampler
from ragen_mega.run.stop import (
    end_with_launcher,
    exit_on_signal,
    fail_if_rank_lost,
)
from ragen_mega.storage.integrity import describe_error
from ragen_mega.storage.run_directory import Finished


def starpo(run: Run) -> None:
    """One StarPO step after another, until `num_steps`."""
    config, policy, critic, engine = run.config, run.policy, run.critic, run.engine
    run.order(run.step)  # where other ranks sample: the first weights; `finish_step` sends the next

    for step in run.steps():
        metrics = Metrics()

        # Rollout: from each of P initial states sample N trajectories of at most K turns.
        if run.samplers:  # other ranks do, under the weights of `max_staleness` steps before
            groups = run.take(step, metrics)
        else:  # the engine takes the weights while the rest of the trainer is away, then the device
            tasks = run.tasks.sample(step)
            origin = run.origin(tasks)
            groups = run.recall(step, origin)  # what an earlier process sampled under these weights
            if groups is None:
                with run.timed("rollout"), run.placement.handover(), engine.awake():
                    with run.timed("sync"):
                        engine.load_weights(policy.export_weights(engine.shard))
                        run.placement.enter(Phase.ROLLOUT)
                        engine.start()
                    groups = run.sample(tasks)
                run.keep(step, origin, groups)
                metrics.add("time", policy.sync_metrics())
        metrics.add("rollout", run.summarize(groups))
        metrics.add("custom", on_main(partial(custom_metrics, groups, config.logging.metric_names)))
        # What an error ended has no return: `groups` show it, and `samples` are trained on.
        groups, samples, rewards = shape_on_main(groups, config.advantage.reward_terms)
        metrics.add("reward", rewards)

        # Filter (StarPO-S, Eq. 7): keep the initial states whose raw returns vary most.
        kept = run.filter(samples, len(groups))
        metrics.add("filter", filter_metrics(samples, kept, len(groups)))
        if not count_sampled(kept):  # no initial state tells good from bad, or none could be played
            run.trace(step, groups)
            why = on_main(partial(nothing_to_learn, groups, samples, config))
            run.finish_step(step, metrics, empty=why)
            continue

        # Diagnose before the weights move: does reasoning still depend on its input (RAGEN-2)?
        interval = config.logging.diagnose_interval
        if interval and step % interval == 0:
            with run.timed("diagnose"):
                metrics.add("collapse", run.diagnose(samples))

        # Advantages: everything the loss needs, under the weights that sampled the trajectories.
        with run.timed("advantages"):
            trajectories = [trajectory for group in kept for trajectory in group.trajectories]
            batch = run.batches.pack(groups, kept, step)  # a rank holds no more than it trains
            batch = run.batches.with_old_logprobs(batch, step, metrics)
            if critic:
                batch = batch.with_fields(values=critic.values(batch))
            if config.needs_reference:
                batch = batch.with_fields(ref_logprobs=policy.reference_logprobs(batch))
            weights = group_weights(kept, config.filter)
            # One rank alone may fail, e.g. for want of memory; all have to leave.
            estimate = partial(estimate_advantages, group_weights=weights, device=device())
            batch = on_each(partial(estimate, batch, trajectories, config.advantage))
            told = run.batches.told(groups, kept, batch)

        # Update: first the critic, then the actor, which do not depend on each other. Clipped
        # surrogate, E trajectories per optimizer step, reused `updates_per_rollout` times.
        run.stop_if_asked()
        with run.timed("update"):
            for name, learner in run.learners(step).items():
                for minibatch in run.batches.minibatches(batch, step):
                    result = learner.update(minibatch)
                    metrics.add(name, run.guard.check(step, name, minibatch, result))
                    if learner is policy and not metrics.has("mismatch"):
                        logprobs = policy.pass_logprobs  # under the weights that sampled
                        metrics.add("mismatch", engine_vs_policy(minibatch, logprobs))
                        if batch.old_logprobs is None and not result["skipped"]:
                            told = told.with_fields(old_logprobs=logprobs)  # minibatch is batch
        run.trace(step, groups, kept, told)

        # Report: warnings of the Echo Trap, evaluation when due, one row of metrics.
        run.finish_step(step, metrics)

    run.finish()


def sample(sampler: Sampler) -> None:
    """What ranks do that only sample: one rollout after another, each under the weights that the
    trainers have sent for it, until these end.
    """
    with sampler.awake():
        for order in sampler.orders():
            sampler.load_weights(order)
            for step, groups in sampler.sample(order.rollout):
                sampler.deliver(step, groups)


def train(config: StarPOConfig) -> dict[str, Any]:
    """Train as `config` says, in this process or on the ranks of the job that it belongs to.

    Returns what is in the run's summary.json; nothing on a rank that only samples. The run is in
    `config.run_directory`. Raises ValueError, before any training, if something cannot work, and
    after `max_empty_steps` that trained nothing; OSError, EngineError or FloatingPointError if
    training cannot go on (a checkpoint is there to resume from).
    """
    with build(config) as run:
        play_part(run)
    return run.summary


def play_part(run: Run | Sampler) -> None:
    """Train, or on a rank that only samples (`--placement separate`) sample."""
    sample(run) if isinstance(run, Sampler) else starpo(run)


def main(argv: Sequence[str] | None = None, *, recipe: str = "none") -> None:
    """Parse flags, build everything, train. A failure is one line and exit code 2 on every rank.

    SIGTERM, Ctrl-C and the end of the terminal stop at once while the run is built, and with a
    checkpoint from then on. So does the end of the launcher.
    """
    exit_on_signal()
    end_with_launcher()
    threading.excepthook = _report_thread
    output = "."
    try:
        with watched():
            config = parse(sys.argv[1:] if argv is None else argv, recipe=recipe)
            output = config.logging.output
            run = build(config)
            # A full collection, in the middle of a rollout, need not look at what lives as long as
            # the run: all that was imported and built, a third of a second each time.
            gc.collect()
            gc.freeze()
            run.stop.listen()
            with run:
                play_part(run)
            shutdown()  # gloo's threads may abort an interpreter that ends before they do
    except Interrupted:
        raise SystemExit(run.stop.exit_code) from None
    except Finished as done:
        if is_main():
            print(done)
    except OSError as error:
        fail(describe_error(error, output))
    except (ValueError, FloatingPointError, EngineError) as error:
        fail(str(error))
    except RuntimeError as error:
        fail_if_rank_lost(error)
        raise


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    """A full disk ends TensorBoard's thread, and its owner says so in one line."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


if __name__ == "__main__":
    main()
