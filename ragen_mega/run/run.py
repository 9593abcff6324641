"""One run: the objects that the loop works with, and what happens around a step - rollout files,
evaluation, checkpoints, the log.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self, TextIO

from torch import Tensor

from ragen_mega.algorithm.diagnostics import EchoTrapMonitor, diagnose, moving_average, probes
from ragen_mega.algorithm.filters import filter_groups
from ragen_mega.algorithm.tables import PlugInError
from ragen_mega.config import StarPOConfig
from ragen_mega.data import distributed
from ragen_mega.data.checksums import checksum_each
from ragen_mega.data.distributed import on_main
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.environments.reference_players import Baselines, Prompt
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.report.console import Console
from ragen_mega.report.hardware import describe
from ragen_mega.report.metrics import Metrics, RunLogger
from ragen_mega.report.step_metrics import (
    collapse_signals,
    evaluation_metrics,
    observe,
    staleness,
)
from ragen_mega.report.terminal import command_line
from ragen_mega.report.timeline import TIMELINE, append_spans, drop_spans
from ragen_mega.report.traces import TRACES, TraceWriter
from ragen_mega.rollout.all_ranks import engine_metrics
from ragen_mega.rollout.endings import PolicyErrors, describe_errors
from ragen_mega.rollout.engine import Interrupted, RolloutEngine
from ragen_mega.rollout.evaluate import EvaluationResult, HeldOut, evaluate_each, mean_references
from ragen_mega.rollout.holding import from_main
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import summarize
from ragen_mega.rollout.tasks import TaskSampler, play_settings
from ragen_mega.run.batches import Batches
from ragen_mega.run.guards import FAULTS, CollapseGuard, StartGuard, UpdateGuard
from ragen_mega.run.link import LinkLost
from ragen_mega.run.placement import Phase, Placement
from ragen_mega.run.sampling import Origin, Sampling, Tasks, origin_of
from ragen_mega.run.separate import Part, Samplers
from ragen_mega.run.stop import StopSignal
from ragen_mega.run.timers import Timers
from ragen_mega.storage.checkpoints import CHECKPOINTS, Checkpoint, CheckpointWriter
from ragen_mega.storage.integrity import write_whole
from ragen_mega.storage.model_writers import export
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore, oldest_kept
from ragen_mega.storage.run_directory import FINAL_EXPORT

_PROBES = 8
"""Prompts of every evaluation that are kept for the viewer."""


@dataclass
class Run:
    """Everything that `train.starpo` uses. Methods that play or compute are collective.

    As a context manager it ends the run: with a checkpoint where it was interrupted, and with its
    files closed and its engine stopped in any case.
    """

    config: StarPOConfig
    policy: MegatronPolicy
    critic: MegatronCritic | None
    engine: RolloutEngine
    renderer: ChatRenderer
    tasks: TaskSampler
    prompts: dict[str, list[Prompt]]
    references: dict[str, Baselines]
    logger: RunLogger
    console: Console
    placement: Placement
    timers: Timers
    part: Part = Part(samples=False)
    lock: TextIO | None = None  # claims the run directory while it is open; rank 0
    models: Mapping[str, str] = field(default_factory=dict)
    """Flag -> digest of the content of the model that it loads; on rank 0."""
    screen: ExitStack = field(default_factory=ExitStack)  # the console's, while training
    step: int = 0
    monitor: EchoTrapMonitor = field(default_factory=EchoTrapMonitor)
    started: float = field(default_factory=time.monotonic)
    stop: StopSignal = field(default_factory=StopSignal)
    warm_start: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the policy could do before reinforcement learning, by environment."""
    best_success: float | None = None
    step_version: int = 0
    """The engine's weight version when the present step began; a step that is repeated starts from
    it.
    """
    score_average: float | None = None
    """Of the diagnoses so far (collapse/score_average)."""
    empty_steps: int = 0
    """Steps in a row, the last one included, that trained on nothing."""
    evaluated: dict[str, EvaluationResult] = field(default_factory=dict)
    """The last evaluation, once the last step has made it."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The final results; empty until it has finished."""

    def __post_init__(self) -> None:
        config, directory = self.config, self.logger.directory
        self.checkpoints = CheckpointWriter(
            directory / CHECKPOINTS,
            config.to_dict(),
            models=self.models,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
        )
        self.rollouts = RolloutStore(directory / ROLLOUTS)
        self.sampling = Sampling(
            config,
            self.engine,
            self.renderer,
            self.tasks,
            self.console,
            say=self.console.say,
            interrupt=lambda: self.stop.interrupt(),
            stop_if_asked=self.stop_if_asked,
            send_again=self.send_weights_again,
        )
        self.samplers = None
        if config.parallel.placement == "separate":
            self.samplers = Samplers(
                config,
                self.part,
                self.tasks,
                recall=self._recall,
                keep=self._keep,
                stop_if_asked=self.stop_if_asked,
                say=self.console.say,
            )
        self.traces = TraceWriter(
            directory / TRACES,
            self.renderer.tokenizer.decode,
            config.environment,
            self.console.say,
        )
        self.guard = UpdateGuard(
            directory / FAULTS,
            max_consecutive=config.train.max_nonfinite_updates,
            report=self.console.say,
        )
        self.collapse_guard = CollapseGuard(config.guard)
        self.start_guard = StartGuard(config.environment)
        self.policy_errors = PolicyErrors()
        self.batches = Batches(config, self.policy, self.renderer, self.console, self.timers)
        self.trainers = {"actor": self.policy.trainer}
        if self.critic:
            self.trainers["critic"] = self.critic.trainer

    def steps(self) -> range:
        """The steps that are left."""
        return range(self.step, self.config.train.num_steps)

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step; its seconds are logged as time/<name>."""
        return self.timers.timed(name)

    # Rollouts, and their files

    def origin(self, tasks: Tasks) -> Origin:
        """What the rollout of these tasks depends on; two with the same origin are the same."""
        with self.timed("rollout_files"):
            weights = fingerprint(self.policy.local_weights())
        return origin_of(self.config, tasks, weights, self.engine.weight_version + 1)

    def recall(self, step: int, origin: Origin) -> list[TrajectoryGroup] | None:
        """The groups that an earlier process sampled for this step, None if it did not."""
        with self.timed("rollout_files"):
            groups = from_main(lambda: self._recall(step, origin))
        if groups is not None:
            self.engine.weight_version += 1  # those that sampled them
        return groups

    def _recall(self, step: int, origin: Origin) -> list[TrajectoryGroup] | None:
        """On one rank."""
        groups = self.rollouts.recall(step, origin, self.console.say)
        if groups is not None:
            self.console.say(f"step {step}: repeated from the rollout in {self.rollouts.directory}")
        return groups

    def sample(self, tasks: Tasks) -> list[TrajectoryGroup]:
        """Play the tasks of a step with an engine that has the policy's weights. Raises as
        `Sampling.sample` does.
        """
        groups = self.sampling.sample(self.step, tasks)
        self.timers.sampled_tokens = count_sampled(groups)
        return groups

    def order(self, step: int) -> None:
        """Let the ranks that only sample, if there are any, go on to the rollout of step
        `step + max_staleness`, with the present weights. They are not waited for.
        """
        if self.samplers:
            with self.timed("sync"):
                digest = fingerprint(self.policy.local_weights())
                self.samplers.order(step, digest, self.policy.export_weights())

    def take(self, step: int, metrics: Metrics) -> list[TrajectoryGroup]:
        """Wait for what they have sampled for a step. Raises as `Samplers.take` does."""
        with self.timed("rollout"):
            groups, seconds = self.samplers.take(step, metrics)
        if seconds:
            self.timers.sampled_tokens = count_sampled(groups)
            self.timers.sampling_seconds = seconds
        metrics.add("rollout", on_main(lambda: staleness(step, groups)))
        return groups

    def keep(self, step: int, origin: Origin, groups: Sequence[TrajectoryGroup]) -> None:
        """Write a rollout to disk and delete those that are not to be kept.

        Raises OSError on all ranks if the disk is full.
        """

        with self.timed("rollout_files"):
            on_main(lambda: self._keep(step, origin, groups))

    def _keep(self, step: int, origin: Origin, groups: Sequence[TrajectoryGroup]) -> None:
        """On one rank."""
        self.rollouts.write(step, groups, origin)
        keep, saved = self.config.checkpoint.keep_rollouts, self.checkpoints.steps()
        # The one to go back to may be old; what followed it is not repeated.
        saved = [one for one in saved if one not in self.collapse_guard.pinned] or saved
        oldest = oldest_kept(self.step, keep, saved)
        if self.samplers:  # a checkpoint lacks the weights of rollouts that were on the disk
            needed = {*saved, self.checkpoints.saved_step} - {None}
            oldest = min({oldest} | needed)
        self.rollouts.prune(oldest)

    def trace(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        kept: Sequence[TrajectoryGroup] = (),
        batch: TokenBatch | None = None,
    ) -> None:
        """Keep the first groups of a step for the viewer. Raises OSError on all ranks."""
        shown = groups[: self.config.logging.trace_groups]
        if shown:
            with self.timed("rollout_files"):
                on_main(lambda: self.traces.write_step(step, shown, kept, batch))

    def repeat_from(self, step: int) -> None:
        """Delete what an earlier process kept for readers of this step and later ones, which come
        again, or never: a run may end there. Raises OSError on all ranks.
        """

        def drop() -> None:
            self.logger.drop_from(step)
            self.traces.drop_from(step)
            drop_spans(self.logger.directory / TIMELINE, step)

        on_main(drop)

    def note(self, step: int, text: str) -> None:
        """Report something that happened in a step, and keep it in events.jsonl."""
        self.console.say(f"step {step}: {text}")
        self.logger.note(step, text)

    def send_weights_again(self) -> None:
        """Repeat the transfer in the middle of a rollout, after an engine has lost its weights;
        all ranks hold a part.
        """
        self.engine.pause()
        self.placement.enter(Phase.SYNC)
        self.engine.load_weights(self.policy.export_weights(self.engine.shard), again=True)
        self.placement.enter(Phase.ROLLOUT)
        self.engine.start()

    # The parts of a step

    def summarize(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """Metrics of a rollout, with the reference players on the evaluation boards beside them."""

        def notes() -> list[str]:
            errors = describe_errors(groups)
            mixed = self.start_guard.check(self.step, groups)
            mixed += self.start_guard.check_markers(groups)
            return mixed + ([errors] if errors else []) + self.policy_errors.add(groups)

        for note in on_main(notes):
            self.note(self.step, note)
        rounds, rollout = {}, self.config.rollout
        if rollout.max_sampling_rounds > 1:
            rounds = {"sampling_rounds": len(groups) / rollout.num_groups}
        references = mean_references(self.references, self.config.environment.shares)
        return on_main(lambda: summarize(groups)) | rounds | references

    def filter(self, groups: Sequence[TrajectoryGroup], num_played: int) -> list[TrajectoryGroup]:
        """Apply the configured filter to raw returns, and after a rollback the guard's to what is
        left. Of several rounds it keeps as many groups as of one. `groups` have their samples
        alone, and were `num_played` with those that lack them.
        """
        config, rollout = self.config.filter, self.config.rollout
        strategy, value = config.filter_strategy, config.value
        if rollout.max_sampling_rounds > 1:
            strategy, value = "top_k", config.num_kept(rollout.num_groups)
        kept = filter_groups(
            groups,
            strategy=strategy,
            value=value,
            keep_zero=config.filter_keep_zero,
            num_groups=num_played,
        )
        share = self.collapse_guard.filter_share
        if share == 1.0 or not kept:
            return kept
        return filter_groups(kept, strategy="top_fraction", value=share, keep_zero=False)

    def diagnose(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """How much thoughts depend on their prompts, under the weights that sampled them, with the
        moving average of the score.
        """
        found = diagnose(
            on_main(lambda: probes(groups)),
            self.policy.logprobs,
            reasoning_length=self.renderer.thought_length,
        )
        if found:  # the average counts once the step is done, see `advance`
            found["score_average"] = moving_average(self.score_average, found["score"])
        return found

    def learners(self, step: int) -> dict[str, MegatronPolicy | MegatronCritic]:
        """Who learns in a step, in order; the actor only after `critic_warmup` steps."""
        critic = {"critic": self.critic} if self.critic else {}
        return critic | ({"actor": self.policy} if self.config.train.trains_actor(step) else {})

    def stop_if_asked(self) -> None:
        """Raise Interrupted, on all ranks, if any was asked to stop. Never called in the middle of
        a step's updates, so that the run can be resumed exactly.
        """
        if self.stop.agreed():
            raise Interrupted

    def finish_step(self, step: int, metrics: Metrics, *, empty: str | None = None) -> None:
        """Close a step: warnings, schedules, one row of metrics, evaluation and checkpoint when
        due. `empty` says why it trained nothing. May raise Interrupted, and ValueError after too
        many empty steps.
        """
        self.advance(metrics)
        for warning in observe(self.monitor, metrics):
            self.note(step, str(warning))
        is_last = step + 1 == self.config.train.num_steps
        is_back = self._guard_from_collapse(step, metrics, is_last)
        self.order(step + 1)  # others sample while this step is closed
        self.timers.close_step(metrics)
        metrics.add("memory", self.placement.take_ledger())
        self.console.step(step, metrics.result())  # evaluation says its own lines below
        interval, success = self.config.evaluation.eval_interval, None
        if step == 0:
            trained = [*self.config.environment.shares]
            metrics.add("eval", evaluation_metrics(self.warm_start, trained, "initial_"))
        if is_last:
            self.evaluated = self.evaluate(step + 1, metrics, self.config.evaluation.eval_samples)
        elif interval and (step + 1) % interval == 0:
            success = self._mean_success(self.evaluate(step + 1, metrics))
        if not self.samplers:
            metrics.add("engine", engine_metrics(self.engine))
        result = metrics.result()
        if result.get("reward/inverted"):
            self.note(step, "the reward pays more for failing than for success (--reward)")
        if num_lost := round(result.get("engine/restarts", 0)):
            self.note(
                step,
                f"{num_lost} rollout servers were lost and replaced; see the logs under sglang/",
            )
        on_main(lambda: self.logger.log(step, result))
        self.step, self.step_version = step + 1, self.engine.weight_version
        self._count_empty(empty)
        if not is_last and (is_back or self._is_checkpoint_due(success)):
            self.collapse_guard.checkpoint_at(self.step)
            self.save(success)
        self._write_timeline(step)
        self.stop_if_asked()

    def _write_timeline(self, step: int) -> None:
        spans = self.timers.take_spans()
        if self.config.logging.timeline:
            ranks = distributed.gather_objects(spans)
            path = self.logger.directory / TIMELINE
            on_main(lambda: append_spans(path, step, ranks))

    def _guard_from_collapse(self, step: int, metrics: Metrics, is_last: bool) -> bool:
        """What `--guard` does at the end of a step; returns whether the run went back."""
        guard, is_back = self.collapse_guard, False
        if guard.config.guard == "off":
            return False
        signals = on_main(lambda: collapse_signals(metrics))  # the same numbers on all ranks
        reason = guard.observe(signals, is_last=is_last)
        if reason is not None and guard.may_react:
            try:
                saved = self.checkpoints.read(guard.good_step)
            except ValueError as error:  # on all ranks
                guard.good_step = None
                reason += f"; the run goes on, for its good checkpoint cannot be read: {error}"
            else:
                change = guard.go_back(step + 1)
                self._go_back(saved)
                reason += f"; back to the weights after {saved.step} steps, {change}"
                is_back = True
        if reason is not None:
            self.note(step, f"collapse: {reason}")
        if step + 1 in self.config.environment.curriculum_steps:
            guard.task_changed()
        metrics.add("guard", rollbacks=guard.rollbacks, filter_share=guard.filter_share)
        return is_back

    def _go_back(self, saved: Checkpoint) -> None:
        """Give the trainers what a checkpoint holds, except for the time on their schedules, and
        the guard's learning rate. The engine gets the weights with the next rollout.
        """
        with self.timed("rollback"):
            times = {name: trainer.schedule.num_steps for name, trainer in self.trainers.items()}
            checkpoint.load(saved.directory, self.trainers)
            for name, trainer in self.trainers.items():
                trainer.schedule.num_steps = times[name]
                trainer.set_lr_factor(self.collapse_guard.lr_factor)

    def _count_empty(self, why: str | None) -> None:
        self.empty_steps = self.empty_steps + 1 if why else 0
        if why is None:
            return
        self.console.say(f"step {self.step - 1}: trained on nothing: {why}")
        # A resumed run may have more of them behind it than its bound allows.
        if 0 < self.config.train.max_empty_steps <= self.empty_steps:
            self.empty_steps = 0  # a resumed run may try as often
            self.save()
            raise ValueError(
                f"{self.config.train.max_empty_steps} steps in a row trained on nothing, the bound"
                f" of --max-empty-steps: {why}; {self.checkpoints.last('that changed')}"
            )

    def advance(self, metrics: Metrics) -> None:
        """End a step, also one that is only replayed: advance the schedules and the average of
        diagnoses, and log the number of bad updates.
        """
        for trainer in self.trainers.values():
            trainer.schedule.step(1)
        average = metrics.result().get("collapse/score_average")
        self.score_average = self.score_average if average is None else average
        metrics.add("update", nonfinite=self.guard.take_count())

    def evaluate(
        self, step: int, metrics: Metrics | None = None, samples: int = 1
    ) -> dict[str, EvaluationResult]:
        """Evaluate every trained environment, and those of --eval-environments, on their held-out
        initial states under the current weights.
        """
        config = self.config.evaluation
        settings = play_settings(
            self.config.rollout,
            self.config.environment,
            temperature=config.eval_temperature,
            seed=0,
        )
        sets = {
            name: HeldOut(
                self.config.environment, settings, self.prompts[name], self.references[name]
            )
            for name in self.config.environment.evaluated
        }
        with self.timers.uncounted("evaluation"), self.placement.handover(), self.engine.awake():
            self.engine.load_weights(self.policy.export_weights(self.engine.shard))
            self.placement.enter(Phase.ROLLOUT)
            self.engine.start()
            results = evaluate_each(
                self.engine,
                self.renderer,
                self.console,
                sets,
                samples_per_prompt=samples,
                send_again=self.send_weights_again,
                watch=partial(self._trace_evaluation, step),
            )
        for name, result in results.items():
            self.console.say(f"after {step} steps, {name}: {result}", "bold")
        if metrics is not None:
            told = {name: result.to_dict() for name, result in results.items()}
            metrics.add("eval", evaluation_metrics(told, [*self.config.environment.shares]))
        return results

    def _mean_success(self, results: dict[str, EvaluationResult]) -> float:
        """Mean success over the trained environments."""
        return fmean(results[name].success for name in self.config.environment.shares)

    def _trace_evaluation(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Keep one trajectory of each of the first prompts, which are always the same."""
        if not self.config.logging.trace_groups:
            return
        shown = [replace(g, trajectories=g.trajectories[:1]) for g in groups[:_PROBES]]
        boards = [rows for _, rows in self.prompts[name][: len(shown)]]
        on_main(lambda: self.traces.write_evaluation(step, name, shown, boards))
        played = [one for group in shown for one in group.trajectories]
        if not distributed.is_main():  # which has the tokens
            return
        decode = self.renderer.tokenizer.decode
        rows = [
            (one.seed, one.success, one.total_reward, decode(list(one.tokens))) for one in played
        ]
        self.logger.show(f"trajectories/{name}", ("prompt", "success", "reward", "text"), rows)

    # The end, and what it can go on from

    def finish(self) -> None:
        """Evaluate, write the last checkpoint, export the policy for transformers, write the
        summary.
        """
        evaluated = self.evaluated or self.evaluate(
            self.step, samples=self.config.evaluation.eval_samples
        )
        self.save(self._mean_success(evaluated))
        self.checkpoints.wait()  # safe before an export that may fill the disk
        results = {name: result.to_dict() for name, result in evaluated.items()}
        for name, result in evaluated.items():
            if result.random is not None and result.ci_high < result.random:
                self.note(
                    self.step,
                    f"{name} ends below a random player ({result.success:.1%} against"
                    f" {result.random:.1%}): read its answers (ragen-mega view), and look at"
                    " rollout/cut_answer_rate, rollout/truncated_by_context and the reward",
                )
        export(
            self.logger.directory / FINAL_EXPORT,
            self.policy.hf,
            self.renderer.tokenizer,
            self.policy.export_weights(),
        )
        self.summary = {
            "run": str(self.logger.directory),
            "sets": results,
            "steps": self.step,
            "seconds": time.monotonic() - self.started,
            **self.timers.summary(),
            "hardware": describe(),
            "warm_start": self.warm_start,
        }
        on_main(lambda: self.logger.write_summary(self.summary))
        self.console.evaluations("evaluation", results)
        self.console.say(f"run directory: {self.logger.directory}")
        self.console.say(f"to read it: {command_line(f'view {self.logger.directory}')}")

    def save(self, success: float | None = None) -> None:
        """Write a checkpoint in the background; `success` is that of an evaluation at this step.
        Collective.
        """
        if self.checkpoints.has(self.step):
            return
        self.logger.sync()
        if self._is_best(success):
            self.best_success = success
        state = {
            "monitor": self.monitor.state_dict(),
            "collapse_guard": self.collapse_guard.state_dict(),
            "totals": self.timers.state_dict(),
            "seconds": time.monotonic() - self.started,
            "warm_start": self.warm_start,
            "references": {name: asdict(reference) for name, reference in self.references.items()},
            "best_success": self.best_success,
            "weight_version": self.step_version,
            "nonfinite": self.guard.consecutive,
            "empty_steps": self.empty_steps,
            "score_average": self.score_average,
        }
        if self.samplers:
            self.samplers.flush()
            state["versions"] = self.samplers.state_dict()
        with self.timed("checkpoint"):
            self.checkpoints.save(
                self.step,
                self._stage,
                state,
                success,
                self.collapse_guard.pinned,
            )

    def _stage(self, directory: Path) -> Callable[[], Path]:
        """What a checkpoint copies at once and writes later: trainers, and what is still to be
        sampled under earlier weights.
        """
        write = checkpoint.stage(directory, trainers=self.trainers)
        ahead = self.samplers.staged() if self.samplers else {}

        def write_all() -> Path:
            for name, content in ahead.items():
                write_whole(directory / name, content)
            return write()

        return write_all

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, whatever layout it was written on. Collective. Raises ValueError
        if it does not fit.
        """
        checkpoint.load(saved.directory, self.trainers)
        state = saved.state
        self.step = self.checkpoints.saved_step = saved.step
        self.monitor.load_state_dict(state["monitor"])
        self.timers.load_state_dict(state["totals"])
        self.started = time.monotonic() - state["seconds"]
        self.warm_start, self.best_success = state["warm_start"], state["best_success"]
        self.engine.weight_version = self.step_version = state["weight_version"]
        self.guard.consecutive = dict(state.get("nonfinite", {}))
        self.empty_steps = state.get("empty_steps", 0)
        self.score_average = state.get("score_average")
        if "collapse_guard" in state:
            self.collapse_guard.load_state_dict(state["collapse_guard"])
        for trainer in self.trainers.values():
            trainer.set_lr_factor(self.collapse_guard.lr_factor)
        if self.samplers:
            self.samplers.load_state_dict(saved.step, saved.directory, state.get("versions", {}))
        self.console.say(f"resumed from {saved.directory}: {saved.step} steps are done")

    def __enter__(self) -> Self:
        self.screen.enter_context(self.console.open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, (Interrupted, LinkLost)):
                self.save()
                self.checkpoints.wait()
                self.console.say(f"stopped after {self.step} steps; --resume goes on from there")
            if isinstance(error, (FloatingPointError, PlugInError)):
                is_mistake = isinstance(error, PlugInError)
                change = "that mended" if is_mistake else "a lower --lr or --clip-grad"
                raise type(error)(f"{error}; {self.checkpoints.last(change)}") from error
        finally:
            is_stopped = isinstance(error, Interrupted)
            self.close(0 if error is None else self.stop.exit_code if is_stopped else 2)

    def close(self, exit_code: int = 0) -> None:
        """Stop the engine and flush all files; safe after any failure. Ranks that only sample end
        with this exit code.
        """
        self.screen.close()
        if self.samplers:
            self.samplers.close(exit_code)
        self.engine.shutdown()
        self.logger.close()
        if self.lock:
            self.lock.close()

    def _is_checkpoint_due(self, success: float | None) -> bool:
        config = self.config.checkpoint
        is_regular = bool(config.save_interval) and self.step % config.save_interval == 0
        return is_regular or (config.keep_best and self._is_best(success))

    def _is_best(self, success: float | None) -> bool:
        return success is not None and (self.best_success is None or success > self.best_success)


def count_sampled(groups: Sequence[TrajectoryGroup]) -> int:
    """Tokens that the policy sampled."""
    return sum(one.num_sampled_tokens for group in groups for one in group.trajectories)


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """A digest of the parameters of all ranks, in one pass over them. Collective."""
    local = hashlib.sha256(repr(checksum_each([*parameters])).encode()).hexdigest()
    return hashlib.sha256(repr(distributed.gather_objects(local)).encode()).hexdigest()
