"""Flags of evaluations."""

from dataclasses import dataclass

from ragen_mega.config.sections.section import Count, Natural, NonNegative, PathName, Section


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
    boards: PathName | None = None
    """Boards file to evaluate on instead of the packaged one."""
