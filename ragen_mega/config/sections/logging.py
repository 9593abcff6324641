"""Flags of a run's directory and of its logs."""

from dataclasses import dataclass

from ragen_mega.algorithm.tables import METRICS
from ragen_mega.config.sections.section import Natural, PathName, Section


@dataclass(frozen=True)
class LoggingConfig(Section):
    """Directory of a run, and its logs besides the usual numbers."""

    name: str | None = None
    """Name of the run; its files go to <output>/<name> (default: environment, estimator and seed).
    """
    output: PathName = "runs"
    """Directory of all runs."""
    recipe: str = "none"
    """The recipe that the flags began with, for the record."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    overwrite: bool = False
    """Delete an earlier run of the same name."""
    metrics: str = ""
    """Further metrics of rollouts, separated by commas: distinct_responses, or metrics of your own,
    my_module:my_metric. They are logged as custom/...
    """
    diagnose_interval: Natural = 10
    """Steps between estimates of how much reasoning depends on its input (collapse/...; 0: never).
    One costs the log-probabilities of up to 256 first turns.
    """
    trace_groups: Natural = 4
    """Groups of every step that are kept for ragen-mega view, token by token, beside eight prompts
    of every evaluation (0: nothing is).
    """
    timeline: bool = False
    """Record when each rank does what in timeline.json, which ui.perfetto.dev opens."""

    def check(self) -> None:
        for name in self.metric_names:
            METRICS.check_call(name, METRICS.check(name), "groups")
        if self.name is not None and self.name in ("", ".", "..") or "/" in (self.name or ""):
            raise ValueError(
                f"name must be that of one directory, not {self.name!r}; set --output for where it"
                " lies"
            )

    @property
    def metric_names(self) -> list[str]:
        """List the metrics, in order."""
        return [name for part in self.metrics.split(",") if (name := part.strip())]
