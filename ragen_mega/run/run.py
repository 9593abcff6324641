"""One run: the objects that the loop works with, and what happens around a step - rollout,
evaluation, files.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NoReturn, TextIO

import torch

from ragen_mega.algorithm.diagnostics import EchoTrapMonitor
from ragen_mega.algorithm.filters import filter_groups
from ragen_mega.config import StarPOConfig
from ragen_mega.data import distributed
from ragen_mega.data.distributed import on_main
from ragen_mega.data.packing import minibatches
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.environments.boards import Board
from ragen_mega.environments.reference_players import Baselines
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import save_huggingface
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import Metrics, RunLogger
from ragen_mega.report.step_metrics import observe
from ragen_mega.rollout.all_ranks import count_engines, engine_metrics
from ragen_mega.rollout.collector import PlaySettings
from ragen_mega.rollout.engine import Interrupted, RolloutEngine
from ragen_mega.rollout.evaluate import EvaluationResult, evaluate, mean_references
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import summarize
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.guards import FAULTS, UpdateGuard
from ragen_mega.run.placement import PhaseMachine
from ragen_mega.run.rollouts import (
    DurableRollouts,
    fingerprint,
    report_environment_errors,
    sample,
)
from ragen_mega.run.stop import StopSignal
from ragen_mega.run.timers import Throughput
from ragen_mega.storage.checkpoints import CHECKPOINTS, Checkpoint, CheckpointWriter

FINAL_EXPORT = "huggingface"


@dataclass
class Run:
    """Everything that `train.train` uses. Methods that play or compute are collective."""

    config: StarPOConfig
    policy: MegatronPolicy
    critic: MegatronCritic | None
    engine: RolloutEngine
    renderer: ChatRenderer
    tasks: TaskSampler
    boards: dict[str, list[Board] | None]
    references: dict[str, Baselines]
    logger: RunLogger
    console: Console
    lock: TextIO | None = None  # claims the run directory while it is open; rank 0
    phases: PhaseMachine = field(default_factory=PhaseMachine)
    step: int = 0
    monitor: EchoTrapMonitor = field(default_factory=EchoTrapMonitor)
    started: float = field(default_factory=time.monotonic)
    throughput: Throughput = field(default_factory=Throughput)
    stop: StopSignal = field(default_factory=StopSignal)
    _weights: str = ""  # fingerprint of what the rollout of this step is sampled from
    _is_recalled: bool = False  # the rollout of this step was read from the disk
    _evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    _best_success: float | None = None

    def __post_init__(self) -> None:
        self.phases.timed = self.throughput.phase
        keep = self.config.checkpoint
        self.checkpoints = CheckpointWriter(
            self.logger.directory / CHECKPOINTS,
            self.config.to_dict(),
            keep_last=keep.keep_last,
            keep_best=keep.keep_best,
        )
        self.rollouts = DurableRollouts(self.logger.directory, self.config)
        self.faults = UpdateGuard(
            self.logger.directory / FAULTS,
            max_consecutive=self.config.train.max_nonfinite_updates,
            report=self.console.say,
        )
        self.trainers = {"actor": self.policy.trainer} | (
            {"critic": self.critic.trainer} if self.critic else {}
        )

    def steps(self) -> range:
        """The steps that are left."""
        return range(self.step, self.config.train.num_steps)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step; its seconds are logged as time/<name>."""
        return self.throughput.phase(name)

    def handover(self) -> AbstractContextManager[None]:
        """The device passes to the engine for the rollout of a step, and back. Collective."""
        with self.phase("rollout_files"):
            self._weights = fingerprint(self.policy.local_weights())  # before they leave the device
        return self.phases.handover()

    def send_weights(self, *, again: bool = False) -> None:
        """The policy's weights go to the engine; `again` in the middle of a rollout, if an engine
        has lost them. Collective.
        """
        weights = self.phases.until_sent(self.policy.export_weights(self.engine.shard))
        self.engine.load_weights(weights, again=again)

    def collect(self, step: int) -> list[TrajectoryGroup]:
        """The rollout of a step, which is on the disk when this returns: sampled, or read if a run
        repeats the step.

        Raises Interrupted if the run is to stop, EngineError if sampling failed on any rank,
        OSError for a full disk.
        """
        tasks = self.tasks.sample(step)
        with self.phase("rollout_files"):
            origin = self.rollouts.origin(tasks, self._weights, self.engine.weight_version)
            groups = self.rollouts.recall(step, origin, self.console.say)
        self._is_recalled = groups is not None
        if groups is None:
            send = partial(self.send_weights, again=True)
            groups = sample(
                self.engine,
                self.renderer,
                tasks,
                self.config,
                self.console,
                self.stop,
                send_again=send,
            )
            with self.phase("rollout_files"):
                self.rollouts.write(step, groups, origin)
        else:
            self.console.say(
                f"step {step}: repeated from the rollout in {self.rollouts.store.directory}"
            )
        report_environment_errors(step, groups, self.console.say)
        return groups

    def summarize(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """Metrics of a rollout, with the reference players on the evaluation boards beside them."""
        return summarize(groups) | mean_references(self.references, self.config.environment.shares)

    def filter(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Apply the configured filter to raw returns."""
        config = self.config.filter
        return filter_groups(
            groups,
            strategy=config.filter_strategy,
            value=config.value,
            keep_zero=config.filter_keep_zero,
        )

    def minibatches(self, batch: TokenBatch, step: int) -> Iterator[TokenBatch]:
        """The minibatches of a step, the same on every rank.

        Raises Interrupted if the run is to stop; once the first is out the step is finished, so
        that it can be resumed exactly.
        """
        if self.stop.agreed():
            raise Interrupted
        train = self.config.train
        generator = torch.Generator().manual_seed(train.seed * 1_000_003 + step)
        total = (
            max(1, round(batch.num_trajectories / train.minibatch_size)) * train.updates_per_rollout
        )
        with self.console.phase("update", total) as progress:
            for minibatch in minibatches(
                batch,
                train.minibatch_size,
                num_passes=train.updates_per_rollout,
                generator=generator,
            ):
                yield minibatch
                self.throughput.trained_tokens += minibatch.num_positions
                progress.advance()

    def finish_step(self, step: int, metrics: Metrics) -> None:
        """Close a step: warnings, schedules, one row of metrics, evaluation and checkpoint when
        due. May raise Interrupted.
        """
        self.advance(metrics)
        for warning in observe(self.monitor, metrics):
            self.console.say(f"step {step}: {warning}")
        sampled = None if self._is_recalled else metrics.result()["rollout/sampled_tokens"]
        self.throughput.close_step(metrics, sampled)
        metrics.add("memory", self.phases.take_ledger())
        is_last = step + 1 == self.config.train.num_steps
        interval, success = self.config.evaluation.eval_interval, None
        if not is_last and interval and (step + 1) % interval == 0:
            success = _mean_success(self.evaluate(step + 1, metrics))
        metrics.add("engine", engine_metrics(self.engine))
        result = metrics.result()
        if num_lost := round(result["engine/restarts"]):
            self.console.say(
                f"step {step}: {num_lost} rollout servers were lost and replaced; see the logs"
                " under sglang/"
            )
        on_main(lambda: self.logger.log(step, result))
        self.console.step(step, result)
        self.step = step + 1
        if not is_last and self._is_checkpoint_due(success):
            self.save(success)
        if self.stop.agreed():
            raise Interrupted

    def advance(self, metrics: Metrics) -> None:
        """What every step ends with, also one that is only replayed: the schedules, and the number
        of bad updates.
        """
        for trainer in self.trainers.values():
            trainer.schedule.step(1)
        metrics.add("update", nonfinite=self.faults.take_count())

    def evaluate(
        self, step: int, metrics: Metrics | None = None, samples: int = 1
    ) -> dict[str, EvaluationResult]:
        """Evaluate every trained environment on its held-out boards under the current weights."""
        config, rollout = self.config.evaluation, self.config.rollout
        num_episodes = config.eval_prompts * samples // count_engines(self.engine)
        settings = PlaySettings(
            rollout.max_response_length,
            rollout.max_context_length,
            config.eval_temperature,
            seed=0,
            environment_timeout=self.config.environment.environment_timeout,
        )
        results = {}
        with self.phases.handover(), self.engine.awake():
            self.send_weights()
            for name in self.config.environment.shares:
                with self.console.phase(f"evaluate {name}", num_episodes) as progress:
                    results[name] = evaluate(
                        self.engine,
                        self.renderer,
                        self.config.environment,
                        name,
                        settings,
                        boards=self.boards[name],
                        num_prompts=config.eval_prompts,
                        samples_per_prompt=samples,
                        reference=self.references[name],
                        advance=progress.advance,
                        send_again=partial(self.send_weights, again=True),
                    )
        for name, result in results.items():
            suffix = "" if len(results) == 1 else f"_{name}"
            if metrics is not None:
                metrics.add(
                    "eval", {f"success{suffix}": result.success, f"reward{suffix}": result.reward}
                )
            self.console.say(f"step {step} {name}: {result}")
        return results

    def finish(self) -> None:
        """Evaluate, write the last checkpoint, export the policy for transformers, write the
        summary.
        """
        evaluated = self.evaluate(self.step, samples=self.config.evaluation.eval_samples)
        self.save(_mean_success(evaluated))
        results = {name: result.to_dict() for name, result in evaluated.items()}
        save_huggingface(
            self.logger.directory / FINAL_EXPORT,
            self.policy.hf,
            self.renderer.tokenizer,
            self.policy.export_weights(),
            is_writer=distributed.is_main(),
        )
        summary = {
            "sets": results,
            "steps": self.step,
            "seconds": time.monotonic() - self.started,
            **self.throughput.summary(),
            "warm_start": self._evaluations,
        }
        on_main(lambda: self.logger.write_summary(summary))
        self.checkpoints.wait()
        self.console.evaluations("evaluation", results)
        self.console.say(f"run directory: {self.logger.directory}")

    def record_warm_start(self, results: dict[str, EvaluationResult]) -> None:
        """Keep what the policy could do before reinforcement learning; it goes into the summary."""
        self._evaluations = {name: result.to_dict() for name, result in results.items()}

    def save(self, success: float | None = None) -> None:
        """Write a checkpoint in the background; `success` is that of an evaluation at this step.
        Collective.
        """
        if self.checkpoints.saved_step == self.step:
            return
        if self._is_best(success):
            self._best_success = success
        state = {
            "monitor": self.monitor.state_dict(),
            "totals": self.throughput.state_dict(),
            "seconds": time.monotonic() - self.started,
            "warm_start": self._evaluations,
            "references": {name: asdict(reference) for name, reference in self.references.items()},
            "best_success": self._best_success,
            "weight_version": self.engine.weight_version,
            "nonfinite": self.faults.consecutive,
        }
        with self.phase("checkpoint"):
            self.checkpoints.save(
                self.step, partial(checkpoint.stage, trainers=self.trainers), state, success
            )

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, whatever layout it was written on. Collective. Raises ValueError
        if it does not fit.
        """
        checkpoint.load(saved.directory, self.trainers)
        state = saved.state
        self.step = self.checkpoints.saved_step = saved.step
        self.monitor.load_state_dict(state["monitor"])
        self.throughput.load_state_dict(state["totals"])
        self.started = time.monotonic() - state["seconds"]
        self._evaluations, self._best_success = state["warm_start"], state["best_success"]
        self.engine.weight_version = state["weight_version"]
        self.faults.consecutive = dict(state.get("nonfinite", {}))
        self.console.say(f"resumed from {saved.directory}: {saved.step} steps are done")

    def leave(self) -> NoReturn:
        """End an interrupted run with a checkpoint."""
        self.save()
        self.checkpoints.wait()
        self.console.say(f"stopped by SIGTERM after {self.step} steps; --resume goes on from there")
        raise SystemExit(128 + signal.SIGTERM)

    def close(self) -> None:
        """Stop the engine and flush all files; safe after any failure."""
        self.engine.shutdown()
        self.logger.close()
        if self.lock:
            self.lock.close()

    def _is_checkpoint_due(self, success: float | None) -> bool:
        config = self.config.checkpoint
        is_regular = bool(config.save_interval) and self.step % config.save_interval == 0
        return is_regular or (config.keep_best and self._is_best(success))

    def _is_best(self, success: float | None) -> bool:
        return success is not None and (self._best_success is None or success > self._best_success)


def _mean_success(results: dict[str, EvaluationResult]) -> float:
    return sum(result.success for result in results.values()) / len(results)
