"""Flags of evaluations."""

from dataclasses import dataclass

from ragen_mega.config.sections.section import (
    Count,
    Natural,
    NonNegative,
    PathName,
    Section,
    Share,
)


@dataclass(frozen=True)
class EvaluationConfig(Section):
    """Evaluations of the policy: their steps, their initial states and their sampling."""

    eval_interval: Natural = 20
    """Steps between evaluations (0: only at the end)."""
    eval_prompts: Count = 256
    """Held-out initial states per evaluation."""
    eval_samples: Count = 8
    """Episodes from each of them in the last evaluation; evaluations on the way play one."""
    eval_temperature: NonNegative = 0.5
    """Sampling temperature of evaluation."""
    stop_at_success: Share | None = None
    """End the run after the evaluation on the way that reaches this mean success, e.g. 0.95
    (default: never). The last evaluation, the checkpoint and the export follow as after the last
    step.
    """
    boards: PathName | None = None
    """Boards file to evaluate on instead of the packaged one."""

    def is_reached(self, success: float | None) -> bool:
        """Return whether this success, if there is one, is enough for `stop_at_success`."""
        goal = self.stop_at_success
        return goal is not None and success is not None and success >= goal
