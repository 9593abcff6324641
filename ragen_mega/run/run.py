"""One run: the objects that the loop works with, and its life around the steps - guards, schedules,
evaluation, checkpoints, the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, Self, TextIO

from ragen_mega.agents.repetition import begins_again
from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.diagnostics import EchoTrapMonitor, diagnose, moving_average, probes
from ragen_mega.algorithm.tables import PlugInError
from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import plays_alike
from ragen_mega.data.fields import ROUTES
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.environments.reference_players import Prompt
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.ranks.collectives import device, gather_objects, on_each, on_main
from ragen_mega.report.console import Console
from ragen_mega.report.hardware import describe
from ragen_mega.report.metrics import RunLogger
from ragen_mega.report.step_metrics import (
    collapse_signals,
    custom_metrics,
    engine_vs_policy,
    filter_metrics,
    group_weights,
    observe,
    staleness,
    update_metrics,
)
from ragen_mega.report.terminal import command_line, shown
from ragen_mega.rollout.all_ranks import engine_metrics
from ragen_mega.rollout.engine import Interrupted, RolloutEngine
from ragen_mega.rollout.held_out import mean_references
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import summarize
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.batches import Batches
from ragen_mega.run.checkpoints import Attribute, RunCheckpoints
from ragen_mega.run.evaluation import KnownBaselines, RunEvaluation
from ragen_mega.run.guards import (
    FAULTS,
    CollapseGuard,
    EmptySteps,
    RolloutGuard,
    UpdateGuard,
    cut_note,
    inversion_note,
    nothing_to_learn,
)
from ragen_mega.run.idleness import Usage, sentence, shares, summed
from ragen_mega.run.link import LinkLost
from ragen_mega.run.log import RunLog, StepLog
from ragen_mega.run.placement import Colocated
from ragen_mega.run.rollouts import Rollouts, count_sampled
from ragen_mega.run.sampling import Sampling
from ragen_mega.run.selection import choose_groups, members_of, shape_on_main
from ragen_mega.run.separate import Role
from ragen_mega.run.stop import StopSignal
from ragen_mega.run.teacher import Teacher
from ragen_mega.run.timers import Timers
from ragen_mega.storage.adapter_files import save_adapter
from ragen_mega.storage.checkpoints import BASE_MODEL, Checkpoint
from ragen_mega.storage.model_writers import export
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore
from ragen_mega.storage.run_directory import FINAL_ADAPTER, FINAL_EXPORT, WARM_START

_OF_TRAINING = (
    "rollout.temperature",
    "environment.curriculum",
    "environment.curriculum_success",
)
"""Settings that change the success of a rollout, beside those that `plays_alike` compares."""


@dataclass
class Run:
    """Everything that `train.starpo` uses. Methods that play or compute are collective.

    As a context manager it ends the run: with a checkpoint where it was interrupted, and with its
    files closed and its engine stopped in any case.
    """

    config: StarPOConfig
    policy: MegatronPolicy
    critic: MegatronCritic | None
    teacher: Teacher | None
    engine: RolloutEngine
    renderer: ChatRenderer
    tasks: TaskSampler
    prompts: InitVar[dict[str, list[Prompt]]]
    references: InitVar[KnownBaselines]
    logger: RunLogger
    console: Console
    placement: Colocated
    timers: Timers
    role: InitVar[Role] = Role(samples=False)
    lock: TextIO | None = None  # claims the run directory while it is open; rank 0
    models: InitVar[Mapping[str, str] | None] = None
    """Flag -> digest of the content of the model that it loads; on rank 0."""
    screen: ExitStack = field(default_factory=ExitStack)  # the console's, while training
    step: int = 0
    monitor: EchoTrapMonitor = field(default_factory=EchoTrapMonitor)
    stop: StopSignal = field(default_factory=StopSignal)
    spent: list[Usage] = field(default_factory=list)
    """Usage of all steps of this process by each rank, those that train first."""
    step_version: int = 0
    """The engine's weight version when the present step began; a step that is repeated starts from
    it.
    """
    reached: float | None = None
    """Success of the evaluation that ended the run by `--stop-at-success`."""
    score_average: float | None = None
    """Moving average of the diagnoses so far (collapse/score_average)."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The final results; empty until it has finished."""

    def __post_init__(
        self,
        prompts: dict[str, list[Prompt]],
        references: KnownBaselines,
        role: Role,
        models: Mapping[str, str] | None,
    ) -> None:
        config, directory, say = self.config, self.logger.directory, self.console.say
        self.log = RunLog(config, self.logger, self.console, self.timers, self.renderer)
        adapter = self.policy.export_adapter if config.lora.lora_sync == "adapter" else None
        export = partial(self.policy.export_weights, is_merged=adapter is None)
        self.sync = WeightSync(self.engine, export, self.placement.enter, adapter)
        sampling = Sampling(
            config,
            self.engine,
            self.renderer,
            self.tasks,
            self.console,
            say=say,
            interrupt=lambda: self.stop.interrupt(),
            stop_if_asked=self.stop_if_asked,
            send_again=self.sync.send_again,
        )
        self.rollouts = Rollouts(
            config,
            self.policy,
            sampling,
            role,
            RolloutStore(directory / ROLLOUTS),
            self.timers,
            oldest_needed=lambda: self.checkpoints.oldest_rollout(self.step),
            stop_if_asked=self.stop_if_asked,
            say=say,
        )
        self.guard = UpdateGuard(
            directory / FAULTS, max_consecutive=config.train.max_nonfinite_updates, report=say
        )
        self.collapse_guard = CollapseGuard(config.guard)
        self.rollout_guard = RolloutGuard(
            config.environment, partial(begins_again, config, self.renderer)
        )
        self.empty_steps = EmptySteps(config.train.max_empty_steps)
        self.evaluation = RunEvaluation(
            config,
            self.engine,
            self.renderer,
            prompts,
            references,
            self.rollout_guard.starts,
            lend_device=partial(self.placement.lend_device, self.engine),
            sync=self.sync,
            timers=self.timers,
            log=self.log,
            console=self.console,
        )
        self.batches = Batches(config, self.policy, self.renderer, self.console, self.timers)
        critic = {"critic": self.critic.trainer} if self.critic else {}
        self.trainers = {"actor": self.policy.trainer} | critic
        samplers = self.rollouts.samplers
        self.checkpoints = RunCheckpoints(
            directory,
            config,
            {
                "monitor": self.monitor,
                "nonfinite": Attribute(self.guard, "consecutive"),
                "warm_start": Attribute(self.evaluation, "warm_start"),
                "weight_version": Attribute(self, "step_version"),
                "empty_steps": Attribute(self.empty_steps, "count"),
                **{name: Attribute(self, name) for name in ("score_average", "reached")},
                "starts": self.rollout_guard.starts,
                "curriculum": self.tasks,
                "references": references,
                **({"versions": samplers} if samplers else {}),
            },
            models=models or {},
            trainers=self.trainers,
            samplers=samplers,
            guard=self.collapse_guard,
            timers=self.timers,
        )

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, until an evaluation reaches `--stop-at-success`."""
        while not self.is_last:
            yield self.step

    @property
    def is_last(self) -> bool:
        """Whether no step is left."""
        is_reached = self.config.evaluation.is_reached(self.reached)  # it may have been raised
        return is_reached or self.step >= self.config.train.num_steps

    def stop_if_asked(self) -> None:
        """Raise Interrupted, on all ranks, if any was asked to stop. Never called in the middle of
        a step's updates, so that the run can be resumed exactly.
        """
        if self.stop.agreed():
            raise Interrupted

    # The parts of a step

    def summarize(self, groups: Sequence[TrajectoryGroup], log: StepLog) -> None:
        """Log the metrics of a rollout, with the reference players on the evaluation boards beside
        them, and the notes about its failures.
        """
        for note in on_main(lambda: self.rollout_guard.notes(log.step, groups)):
            self.log.note(log.step, note)
        config = self.config
        if config.parallel.placement == "separate":
            log.add("rollout", on_main(lambda: staleness(log.step, groups)))
        log.add("rollout", on_main(lambda: summarize(groups)))
        if config.rollout.max_sampling_rounds > 1:
            log.add("rollout", sampling_rounds=len(groups) / config.rollout.num_groups)
        log.add("rollout", mean_references(self.evaluation.references, config.environment.shares))
        log.add("custom", on_main(lambda: custom_metrics(groups, config.logging.metric_names)))

    def shape_rewards(
        self, groups: Sequence[TrajectoryGroup], log: StepLog
    ) -> tuple[Sequence[TrajectoryGroup], Sequence[TrajectoryGroup]]:
        """Apply `--reward`. Returns all groups, and those to train on: without trajectories that an
        error has ended, which have no return.
        """
        groups, samples, metrics = shape_on_main(groups, self.config.advantage.reward_terms)
        log.add("reward", metrics)
        return groups, samples

    def filter(
        self, samples: Sequence[TrajectoryGroup], groups: Sequence[TrajectoryGroup], log: StepLog
    ) -> list[TrajectoryGroup]:
        """Apply the configured filter to raw returns, and after a rollback the guard's filter to
        the rest. `samples` are the `groups` without trajectories that lack a return.
        """
        share = self.collapse_guard.filter_share
        kept = choose_groups(samples, self.config, len(groups), share)
        log.add("filter", filter_metrics(samples, kept, len(groups)))
        if not count_sampled(kept):  # no initial state tells good from bad, or none was played
            log.empty = on_main(partial(nothing_to_learn, groups, samples, self.config))
            self.log.trace(log, groups)
        return kept

    def diagnose_if_due(self, groups: Sequence[TrajectoryGroup], log: StepLog) -> None:
        """Log how much thoughts depend on their prompts, under the weights that sampled them, with
        the moving average of the score (RAGEN-2).
        """
        interval = self.config.logging.diagnose_interval
        if not interval or log.step % interval:
            return
        with log.stage("diagnose"):
            found = diagnose(
                on_main(lambda: probes(groups)),
                # the engine has not routed a thought behind the prompt of another
                lambda batch: self.policy.logprobs(batch.without(ROUTES)),
                reasoning_length=self.renderer.thought_length,
            )
            if found:  # the average counts once the step is done, see `advance`
                found["score_average"] = moving_average(self.score_average, found["score"])
            log.add("collapse", found)

    def score(self, batch: TokenBatch, kept: Sequence[TrajectoryGroup], log: StepLog) -> TokenBatch:
        """Add what the loss needs of the models: old log-probabilities, values of the critic, the
        reference policy's log-probabilities, the teacher's log-ratios.
        """
        batch = self.batches.with_old_logprobs(batch, log)
        if self.critic:
            batch = batch.with_fields(values=self.critic.values(batch))
        if self.config.has_kl:
            batch = batch.with_fields(ref_logprobs=self.policy.reference_logprobs(batch))
        if self.teacher:
            batch = self.teacher.score(batch, members_of(kept), log)
        return batch

    def estimate_advantages(self, batch: TokenBatch, kept: Sequence[TrajectoryGroup]) -> TokenBatch:
        """Add advantages and returns. One rank alone may fail, for example for want of memory; all
        leave then.
        """
        trajectories = members_of(kept)
        weights = group_weights(kept, self.config.filter)
        estimate = partial(estimate_advantages, group_weights=weights, device=device())
        return on_each(partial(estimate, batch, trajectories, self.config.advantage))

    def learners(self, step: int) -> dict[str, MegatronPolicy | MegatronCritic]:
        """Return the learners of a step, in order; the actor only after `critic_warmup` steps."""
        critic = {"critic": self.critic} if self.critic else {}
        return critic | ({"actor": self.policy} if self.config.train.trains_actor(step) else {})

    def check_update(
        self, name: str, minibatch: TokenBatch, result: Mapping[str, Any], log: StepLog
    ) -> None:
        """Log an update that was made; the first one of the actor is compared with the engine that
        sampled. Raises FloatingPointError after too many updates that are not finite.
        """
        finite = self.guard.check(log.step, name, minibatch, result)
        log.add(name, update_metrics(finite, minibatch))
        if name == "actor":
            log.passes.append(self.policy.passed)
            if not log.has("mismatch"):  # these are under the weights that sampled
                log.add("mismatch", engine_vs_policy(minibatch, self.policy.passed[:, 0]))

    # The end of a step

    def advance(self, groups: Sequence[TrajectoryGroup], log: StepLog) -> None:
        """End the updates of a step: advance the schedules, the average of diagnoses, the starts
        that it has met and the curriculum by the success of the `groups`, and log the number of bad
        updates. A step that is interrupted before is repeated whole, so nothing of it may count
        earlier.
        """
        log.add("rollout", self.tasks.observe(groups))
        for name, (before, after) in self.tasks.moved.items():
            self.console.say(
                f"step {log.step}: states of {name} are drawn up to difficulty {after} from now on,"
                f" up to {before} before"
            )
        self.rollout_guard.starts.commit()
        for trainer in self.trainers.values():
            trainer.schedule.step(1)
        average = log.result().get("collapse/score_average")
        self.score_average = self.score_average if average is None else average
        log.add("update", nonfinite=self.guard.take_count())

    def roll_back_if_collapsed(self, log: StepLog) -> None:
        """Warn of an Echo Trap, and do what `--guard` says about it."""
        for warning in observe(self.monitor, log):
            self.log.note(log.step, str(warning))
        guard, step = self.collapse_guard, log.step
        if guard.config.guard == "off":
            return
        signals = on_main(lambda: collapse_signals(log))  # the same numbers on all ranks
        reason = guard.observe(signals, is_last=step + 1 == self.config.train.num_steps)
        if reason is not None and guard.may_react:
            try:
                saved = self.checkpoints.read(guard.pinned[0])
            except ValueError as error:  # on all ranks
                guard.good_step = None
                reason += f"; the run goes on, for its good checkpoint cannot be read: {error}"
            else:
                change = guard.go_back(step + 1)
                self.checkpoints.restore_weights(saved)
                levels = saved.state.get("curriculum", {})
                self.tasks.load_state_dict(levels if self._has_tasks_of(saved) else {})
                self.rollouts.go_back(step + 1)
                reason += f"; back to the weights after {saved.step} steps, {change}"
                log.went_back = True
                self.guard.consecutive.clear()  # of the weights that are left
        if reason is not None:
            self.log.note(step, f"collapse: {reason}")
        if step + 1 in self.config.environment.curriculum_steps or self.tasks.has_changed:
            guard.task_changed()
        log.add("guard", rollbacks=guard.rollbacks, filter_share=guard.filter_share)

    def report(self, log: StepLog) -> None:
        """Close the timers of a step and print its row; what follows is no part of its time."""
        samplers = self.rollouts.samplers
        ranks = gather_objects(self.timers.usage()) + (samplers.usage if samplers else [])
        text = sentence(ranks, self.config)
        self.spent = [summed(filter(None, pair)) for pair in zip_longest(self.spent, ranks)]
        log.add("share", shares(ranks))
        on_main(lambda: self.logger.idle(log.step, [rank.seconds for rank in ranks], text))
        self.timers.close_step(log)
        self.console.step(log.step, log.result())

    def close(self, log: StepLog) -> None:
        """Write the row of a step and, if it is due, a checkpoint. Raises Interrupted if the run is
        to stop, and ValueError after too many steps that trained nothing.
        """
        step = log.step
        if not self.rollouts.are_remote:
            log.add("engine", engine_metrics(self.engine))
        log.add("memory", self.placement.take_ledger())  # of its evaluation too
        result = log.result()
        for note in (inversion_note(result), cut_note(result, self.config.rollout)):
            if note is not None:
                self.log.note(step, note)
        if num_lost := round(result.get("engine/restarts", 0)):
            lost = f"{num_lost} rollout servers were lost and replaced; see the logs under sglang/"
            self.log.note(step, lost)
        on_main(lambda: self.logger.log(step, result))
        self.step, self.step_version = step + 1, self.engine.weight_version
        if log.empty:
            self.console.say(f"step {step}: trained on nothing: {log.empty}")
        too_many = self.empty_steps.add(None if log.went_back else log.empty)
        evaluation = self.config.evaluation
        if evaluation.is_reached(log.success):
            self.reached = log.success
            goal = f"--stop-at-success {evaluation.stop_at_success:g}"
            self.log.note(step, f"success {log.success:.1%} has reached {goal}")
        if not self.is_last:
            if is_due := log.went_back or self.checkpoints.is_due(self.step, log.success):
                self.collapse_guard.checkpoint_at(self.step)
            if is_due or too_many is not None:
                self.save(log.success)
            if too_many is not None:
                raise ValueError(f"{too_many}; {self.checkpoints.last('that changed')}")
        self.log.write_timeline(step)
        self.stop_if_asked()

    # The end, and what it can go on from

    def finish(self) -> None:
        """Evaluate, write the last checkpoint, export the policy for transformers, write the
        summary. Raises OSError after all of it if the checkpoint could not be written.
        """
        evaluation = self.evaluation
        evaluated = evaluation.last or evaluation.play(
            self.step, self.config.evaluation.eval_samples
        )
        self.save(evaluation.mean_success(evaluated))
        self.checkpoints.wait()  # safe before an export that may fill the disk
        results = {name: result.to_dict() for name, result in evaluated.items()}
        for name, result in evaluated.items():
            if result.random is not None and result.ci_high < result.random:
                self.log.note(
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
        if self.config.lora.rank:
            tensors = [*self.policy.export_adapter()]
            load = None if self.config.has_warm_start else self.config.model.load
            base = self.checkpoints.models.get(BASE_MODEL)
            on_main(
                lambda: save_adapter(
                    self.logger.directory / FINAL_ADAPTER,
                    tensors,
                    self.config.lora,
                    model=load or str(self.logger.directory / WARM_START),
                    base=base,
                )
            )
        self.summary = {
            "run": str(self.logger.directory),
            "sets": results,
            "steps": self.step,
            "reached": self.reached,
            "seconds": self.checkpoints.seconds,
            **self.timers.summary(),
            "idleness": sentence(self.spent, self.config),
            "hardware": describe(),
            "warm_start": evaluation.warm_start,
        }
        on_main(lambda: self.logger.write_summary(self.summary))
        self.console.evaluations("evaluation", results)
        self.console.say(f"time: {self.summary['idleness']}")
        directory = shown(self.logger.directory)
        self.console.say(f"run directory: {directory}")
        self.console.say(f"to read it: {command_line('view', directory)}")
        self.checkpoints.require()

    def save(self, success: float | None = None) -> None:
        """Write a checkpoint, see `RunCheckpoints.save_run`, unless there is one and no `success`,
        which that one may lack. Collective.
        """
        if success is None and self.checkpoints.has(self.step):
            return
        on_main(self.logger.sync)
        self.checkpoints.save_run(self.step, success)

    def restore(self, saved: Checkpoint) -> None:
        """Resume from a checkpoint of any layout. Collective. Raises ValueError if it cannot."""
        self.checkpoints.restore(saved)
        if not self._has_tasks_of(saved):
            self.collapse_guard.task_changed()
            self.tasks.load_state_dict({})
        self.step, self.engine.weight_version = saved.step, self.step_version
        self.console.resumed(saved.step)
        self.console.say(f"resumed from {saved.directory}: {saved.step} steps are done")

    def _has_tasks_of(self, saved: Checkpoint) -> bool:
        """Return whether the success of rollouts before a checkpoint can be compared with theirs
        now.
        """
        return plays_alike(saved.config, self.config.to_dict(), *_OF_TRAINING)

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
                self.checkpoints.require()
                self.console.say(f"stopped after {self.step} steps; --resume goes on from there")
            if isinstance(error, (FloatingPointError, PlugInError)):
                is_mistake = isinstance(error, PlugInError)
                change = "that mended" if is_mistake else "a lower --lr or --clip-grad"
                raise type(error)(f"{error}; {self.checkpoints.last(change)}") from error
        finally:
            is_stopped = isinstance(error, Interrupted)
            self.shutdown(0 if error is None else self.stop.exit_code if is_stopped else 2)

    def shutdown(self, exit_code: int = 0) -> None:
        """Stop the engine and flush all files; safe after any failure. Ranks that only sample end
        with this exit code.
        """
        self.screen.close()
        if samplers := self.rollouts.samplers:
            samplers.close(exit_code)
        self.engine.shutdown()
        self.logger.close()
        if self.lock:
            self.lock.close()
