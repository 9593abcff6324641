"""Evaluation of a run on held-out initial states, under its present weights."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from ragen_mega.config import StarPOConfig
from ragen_mega.environments.reference_players import Baselines, Prompt
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import Metrics
from ragen_mega.report.step_metrics import evaluation_metrics
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.evaluate import EvaluationResult, HeldOut, evaluate_each
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.rollout.tasks import play_settings
from ragen_mega.run.log import RunLog
from ragen_mega.run.placement import Colocated


class Evaluations:
    """Play every evaluated environment with the weights of the moment. Methods are collective."""

    def __init__(
        self,
        config: StarPOConfig,
        prompts: Mapping[str, Sequence[Prompt]],
        references: Mapping[str, Baselines],
        engine: RolloutEngine,
        renderer: ChatRenderer,
        console: Console,
        placement: Colocated,
        sync: WeightSync,
        log: RunLog,
    ) -> None:
        """`prompts` and `references` have the held-out initial states of each environment and the
        reference players on them.
        """
        self._engine, self._renderer, self._console = engine, renderer, console
        self._placement, self._sync, self._log = placement, sync, log
        self._config, self._prompts, self._references = config, prompts, references

    def play(
        self, step: int, metrics: Metrics | None = None, samples: int = 1
    ) -> dict[str, EvaluationResult]:
        """Play `samples` episodes from every initial state, and add the results to `metrics`."""
        config, prompts = self._config, self._prompts
        temperature = config.evaluation.eval_temperature
        settings = play_settings(
            config.rollout,
            config.environment,
            temperature=temperature,
            seed=0,
            agent=config.agent,
        )
        sets = {
            name: HeldOut(config.environment, settings, prompts[name], self._references[name])
            for name in config.environment.evaluated
        }
        with self._placement.handover(), self._engine.awake():
            self._sync.send()
            results = evaluate_each(
                self._engine,
                self._renderer,
                self._console,
                sets,
                samples_per_prompt=samples,
                send_again=self._sync.send_again,
                watch=lambda name, groups: self._log.trace_evaluation(
                    step, name, groups, prompts[name]
                ),
            )
        for name, result in results.items():
            self._console.say(f"after {step} steps, {name}: {result}", "bold")
        if metrics is not None:
            numbers = {name: result.to_dict() for name, result in results.items()}
            metrics.add("eval", evaluation_metrics(numbers, [*config.environment.shares]))
        return results

    def mean_success(self, results: Mapping[str, EvaluationResult]) -> float:
        """Return the average success over the trained environments."""
        return fmean(results[name].success for name in self._config.environment.shares)
