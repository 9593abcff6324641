"""One run: the objects that the loop works with, and what happens around a step - timing, evaluation, files."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NoReturn, TextIO

import torch

from ragen_mega import distributed
from ragen_mega.checkpointing import CHECKPOINTS, Checkpoint, CheckpointWriter
from ragen_mega.config import StarPOConfig
from ragen_mega.console import Console
from ragen_mega.environments.boards import Board
from ragen_mega.environments.solvers import Baselines
from ragen_mega.evaluation import EvaluationResult, collect_on_all_ranks, evaluate
from ragen_mega.huggingface import save_huggingface
from ragen_mega.interruption import Interrupted, StopSignal
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.metrics import Metrics, RunLogger, Sum
from ragen_mega.packing import minibatches
from ragen_mega.rollout.collector import Task
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import summarize
from ragen_mega.signals import observe
from ragen_mega.starpo.diagnostics import EchoTrapMonitor
from ragen_mega.starpo.filtering import filter_groups
from ragen_mega.tasks import TaskSampler
from ragen_mega.types import TokenBatch, TrajectoryGroup

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
    step: int = 0
    monitor: EchoTrapMonitor = field(default_factory=EchoTrapMonitor)
    started: float = field(default_factory=time.monotonic)
    totals: Metrics = field(default_factory=Metrics)
    stop: StopSignal = field(default_factory=StopSignal)
    _seconds: dict[str, float] = field(default_factory=dict)
    _trained_tokens: int = 0
    _evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    _best_success: float | None = None

    def __post_init__(self) -> None:
        keep = self.config.checkpoint
        self.checkpoints = CheckpointWriter(
            self.logger.directory / CHECKPOINTS, self.config.to_dict(), keep_last=keep.keep_last, keep_best=keep.keep_best
        )
        self.trainers = {"actor": self.policy.trainer} | ({"critic": self.critic.trainer} if self.critic else {})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step; its seconds are logged as time/<name>."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def collect(self, groups: Sequence[Sequence[Task]]) -> list[TrajectoryGroup]:
        """Play the tasks of one step under the training temperature. Raises Interrupted if the run is to stop."""
        rollout = self.config.rollout
        num_tasks = sum(len(group) for group in groups)
        with self.console.phase("rollout", num_tasks // distributed.world_size()) as progress:

            def advance() -> None:
                progress.advance()
                self.stop.interrupt()

            try:
                collected = collect_on_all_ranks(
                    self.engine,
                    self.renderer,
                    groups,
                    advance=advance,
                    max_tokens=rollout.max_response_length,
                    max_context=rollout.max_context_length,
                    temperature=rollout.temperature,
                    seed=self.config.train.seed,
                )
            except Interrupted:
                distributed.gather_objects([])  # in place of this rank's part, for which the others wait
        if self.stop.agreed():
            raise Interrupted
        return collected

    def summarize(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """Metrics of a rollout, with the reference players on the evaluation boards beside them."""
        shares = self.config.environment.shares
        weights = {name: share / sum(shares.values()) for name, share in shares.items()}
        return summarize(groups) | {
            "random": sum(weights[name] * self.references[name].random for name in shares),
            "optimum": sum(weights[name] * (self.references[name].optimum or math.nan) for name in shares),
        }

    def filter(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Apply the configured filter to raw returns."""
        config = self.config.filter
        return filter_groups(
            groups, strategy=config.filter_strategy, value=config.value, keep_zero=config.filter_keep_zero
        )

    def minibatches(self, batch: TokenBatch, step: int) -> Iterator[TokenBatch]:
        """The minibatches of a step, the same on every rank.

        Raises Interrupted if the run is to stop; once the first is out the step is finished, so that it can be resumed exactly.
        """
        if self.stop.agreed():
            raise Interrupted
        train = self.config.train
        generator = torch.Generator().manual_seed(train.seed * 1_000_003 + step)
        total = max(1, round(batch.num_trajectories / train.minibatch_size)) * train.updates_per_rollout
        with self.console.phase("update", total) as progress:
            for minibatch in minibatches(
                batch, train.minibatch_size, num_passes=train.updates_per_rollout, generator=generator
            ):
                yield minibatch
                self._trained_tokens += minibatch.num_positions
                progress.advance()

    def finish_step(self, step: int, metrics: Metrics) -> None:
        """Close a step: warnings, schedules, one row of metrics, evaluation and checkpoint when due. May raise Interrupted."""
        for warning in observe(self.monitor, metrics):
            self.console.say(f"step {step}: {warning}")
        self.policy.trainer.schedule.step(1)
        if self.critic:
            self.critic.trainer.schedule.step(1)
        sampled = metrics.result()["rollout/sampled_tokens"]
        trained = self._seconds.get("advantages", 0.0) + self._seconds.get("update", 0.0)
        self.totals.add("total", rollout_tokens=Sum(sampled), rollout_seconds=Sum(self._seconds["rollout"]))
        self.totals.add("total", train_seconds=Sum(trained), trained_tokens=Sum(self._trained_tokens))
        metrics.add("rollout", tokens_per_second=sampled / self._seconds["rollout"])
        if self._trained_tokens:
            metrics.add("update", tokens_per_second=self._trained_tokens / trained)
        metrics.add("time", self._seconds, step=sum(self._seconds.values()))
        self._seconds, self._trained_tokens = {}, 0
        is_last = step + 1 == self.config.train.num_steps
        interval, success = self.config.evaluation.eval_interval, None
        if not is_last and interval and (step + 1) % interval == 0:
            success = _mean_success(self.evaluate(step + 1, metrics))
        result = metrics.result()
        self.logger.log(step, result)
        self.console.step(step, result)
        self.step = step + 1
        if not is_last and self._is_checkpoint_due(success):
            self.save(success)
        if self.stop.agreed():
            raise Interrupted

    def evaluate(self, step: int, metrics: Metrics | None = None) -> dict[str, EvaluationResult]:
        """Evaluate every trained environment on its held-out boards under the current weights."""
        config, rollout = self.config.evaluation, self.config.rollout
        results = {}
        with self.engine.awake():
            self.engine.load_weights(self.policy.export_weights())
            for name in self.config.environment.shares:
                with self.console.phase(f"evaluate {name}", config.eval_prompts // distributed.world_size()) as progress:
                    results[name] = evaluate(
                        self.engine,
                        self.renderer,
                        self.config.environment,
                        name,
                        boards=self.boards[name],
                        num_prompts=config.eval_prompts,
                        temperature=config.eval_temperature,
                        max_tokens=rollout.max_response_length,
                        max_context=rollout.max_context_length,
                        reference=self.references[name],
                        advance=progress.advance,
                    )
        for name, result in results.items():
            suffix = "" if len(results) == 1 else f"_{name}"
            if metrics is not None:
                metrics.add("eval", {f"success{suffix}": result.success, f"reward{suffix}": result.reward})
            self.console.say(
                f"step {step} {name}: success {result.success:.1%} [{result.ci_low:.1%}, {result.ci_high:.1%}]  "
                f"random {result.random:.1%}  optimum {result.optimum:.1%}"
            )
        return results

    def finish(self) -> None:
        """Evaluate, write the last checkpoint, export the policy for transformers, write the summary."""
        evaluated = self.evaluate(self.step)
        self.save(_mean_success(evaluated))
        results = {name: result.to_dict() for name, result in evaluated.items()}
        save_huggingface(
            self.logger.directory / FINAL_EXPORT,
            self.policy.hf,
            self.renderer.tokenizer,
            self.policy.export_weights(),
            is_writer=distributed.is_main(),
        )
        totals = self.totals.result()
        self.logger.write_summary(
            {
                "sets": results,
                "steps": self.step,
                "seconds": time.monotonic() - self.started,
                "rollout_tokens_per_second": _rate(totals, "total/rollout_tokens", "total/rollout_seconds"),
                "train_tokens_per_second": _rate(totals, "total/trained_tokens", "total/train_seconds"),
                "warm_start": self._evaluations,
            }
        )
        self.checkpoints.wait()
        self.console.evaluations("evaluation", results)
        self.console.say(f"run directory: {self.logger.directory}")

    def record_warm_start(self, results: dict[str, EvaluationResult]) -> None:
        """Keep what the policy could do before reinforcement learning; it goes into the summary."""
        self._evaluations = {name: result.to_dict() for name, result in results.items()}

    def save(self, success: float | None = None) -> None:
        """Write a checkpoint in the background; `success` is that of an evaluation at this step. Collective."""
        if self.checkpoints.saved_step == self.step:
            return
        if self._is_best(success):
            self._best_success = success
        state = {
            "monitor": self.monitor.state_dict(),
            "totals": self.totals.result(),
            "seconds": time.monotonic() - self.started,
            "warm_start": self._evaluations,
            "references": {name: asdict(reference) for name, reference in self.references.items()},
            "best_success": self._best_success,
            "weight_version": self.engine.weight_version,
        }
        with self.phase("checkpoint"):
            self.checkpoints.save(self.step, partial(checkpoint.stage, trainers=self.trainers), state, success)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, whatever layout it was written on. Collective. Raises ValueError if it does not fit."""
        checkpoint.load(saved.directory, self.trainers)
        state = saved.state
        self.step = self.checkpoints.saved_step = saved.step
        self.monitor.load_state_dict(state["monitor"])
        self.totals.add("total", {key.removeprefix("total/"): Sum(value) for key, value in state["totals"].items()})
        self.started = time.monotonic() - state["seconds"]
        self._evaluations, self._best_success = state["warm_start"], state["best_success"]
        self.engine.weight_version = state["weight_version"]
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


def _rate(totals: dict[str, float], amount: str, seconds: str) -> float:
    return totals[amount] / totals[seconds] if totals.get(seconds) else 0.0
