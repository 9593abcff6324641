"""StarPO (arXiv:2504.20073): alternate multi-turn rollouts with updates over whole trajectories.
The loop comes first.
"""

import gc
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.megatron.initialize import shutdown
from ragen_mega.ranks.collectives import is_main
from ragen_mega.report.console import fail
from ragen_mega.rollout.engine import EngineError, Interrupted
from ragen_mega.run.build import build
from ragen_mega.run.log import StepLog
from ragen_mega.run.run import Run
from ragen_mega.run.separate import Sampler
from ragen_mega.run.stop import (
    end_with_launcher,
    exit_on_signal,
    fail_if_rank_lost,
)
from ragen_mega.storage.integrity import describe_error
from ragen_mega.storage.run_directory import Finished


def starpo(run: Run) -> None:
    """Run one step of StarPO (arXiv:2504.20073) after another, until `num_steps`."""
    run.rollouts.request(run.step)  # sends the weights to samplers (--placement separate)
    for step in run.steps():
        log = run.log.begin(step)
        train_step(run, step, log)
        run.roll_back_if_collapsed(log)  # `--guard`
        run.rollouts.request(step + 1)  # samplers work while this step is logged and saved
        run.report(log)
        run.evaluation.play_if_due(log)
        run.close(log)  # a row of metrics, a checkpoint if due
    run.finish()


def train_step(run: Run, step: int, log: StepLog) -> None:
    """Roll out, filter, estimate advantages, update. A stage is timed in the log."""
    rollouts, batches, placement = run.rollouts, run.batches, run.placement

    # Rollout: N trajectories of at most K turns from each of P initial states.
    # An earlier process may have sampled them under these weights.
    groups: Sequence[TrajectoryGroup] | None = rollouts.recall(step)
    if groups is None and rollouts.are_remote:
        groups = rollouts.receive(step, log)  # sampled under weights sent max_staleness steps ago
    elif groups is None:
        with log.stage("rollout"), placement.lend_device(run.engine):  # TRAIN -> SYNC
            with log.stage("sync"):
                run.sync.send()  # the weights into the engine, then the device: SYNC -> ROLLOUT
            groups = rollouts.sample(step, log)
        rollouts.store(step, groups)  # again in TRAIN
    run.summarize(groups, log)

    # Filter (StarPO-S, Eq. 7): keep the initial states whose raw returns vary most.
    groups, samples = run.shape_rewards(groups, log)
    kept = run.filter(samples, groups, log)
    if log.empty is None:
        run.diagnose_if_due(samples, log)  # before the weights move

        # Advantages: everything the loss needs, under the weights that sampled.
        with log.stage("advantages"):
            batch = batches.pack(groups, kept, step)  # a rank holds no more than it trains
            batch = run.score(batch, kept, log)
            batch = run.estimate_advantages(batch, kept)

        # Update: first the critic, then the actor, by the clipped surrogate.
        run.stop_if_asked()
        with log.stage("update"):
            for name, learner in run.learners(step).items():
                for minibatch in batches.minibatches(batch, step):
                    run.check_update(name, minibatch, learner.update(minibatch), log)
        run.log.trace(log, groups, kept, batches.with_passes(batch, log))
    run.advance(groups, log)


def sample(sampler: Sampler) -> None:
    """Sample one rollout after another, each under the weights that the trainers have sent for it,
    until the trainers end.
    """
    with sampler.awake():
        for order in sampler.orders():
            sampler.load_weights(order)
            for step, groups in sampler.sample(order.rollout):
                sampler.deliver(step, groups)


def train(config: StarPOConfig) -> dict[str, Any]:
    """Train as `config` says, in this process or on the ranks of the job that it belongs to.

        >>> from ragen_mega import parse
        >>> flags = "--recipe bandit --name quick --num-steps 1 --num-groups 4 --eval-prompts 8"
        >>> summary = train(parse([*flags.split(), "--warm-start-trajectories", "64"]))
        >>> summary["steps"], list(summary["sets"])
        (1, ['bandit'])

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
        config = parse(sys.argv[1:] if argv is None else argv, recipe=recipe).located()
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
        shutdown()
    except OSError as error:
        fail(describe_error(error, output))
    except (ValueError, FloatingPointError, EngineError) as error:
        fail(str(error))
    except torch.OutOfMemoryError as error:
        fail(
            "out of memory in training; lower --max-tokens-per-microbatch, or set --recompute"
            " selective, then full, or --offload turns, and see ragen-mega plan for what fits; the"
            f" error was: {' '.join(str(error).split())[:300]}"
        )
    except RuntimeError as error:
        fail_if_rank_lost(error)
        raise


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    """Ignore an OSError of TensorBoard's thread on a full disk: its owner reports it."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


if __name__ == "__main__":
    main()
