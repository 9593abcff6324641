"""Flags of checkpoints and of their retention."""

from dataclasses import dataclass

from ragen_mega.config.sections.section import Natural, Section


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Checkpoints from which a run can be resumed: when they are written, and which are kept."""

    save_interval: Natural = 10
    """Steps between checkpoints (0: only after the last step and on SIGTERM)."""
    keep_last: Natural = 2
    """Newest checkpoints that are kept (0: all)."""
    keep_best: bool = False
    """Write a checkpoint whenever an evaluation is the best so far, and keep that one too. Its
    success is the highest of several on the boards that chose it, so it flatters; judge it on
    others. The run's own result is the last evaluation.
    """
    keep_rollouts: Natural | None = None
    """Newest rollouts that stay on the disk (0: all; default: those since the oldest checkpoint
    that is kept, the one that the guard may go back to left aside; with placement separate never
    fewer than those).
    """
    resume: bool = False
    """Go on from the newest intact checkpoint of the run of this name; begin it if there is none.
    --resume RUN_DIR goes on with that run under the flags that it has recorded, and those given
    now.
    """
