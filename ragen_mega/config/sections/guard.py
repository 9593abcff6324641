"""Flags of the guard against collapse."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ragen_mega.config.sections.section import Bounds, Count, OnlyWith, Section

_REACTS = OnlyWith("guard", "--guard react", values=("react",))
_Factor = Annotated[float, Bounds("above 0, at most 1", 0, 1, is_open=True)]


@dataclass(frozen=True)
class GuardConfig(Section):
    """Reaction of a run to a collapse of its success, as in the Echo Trap."""

    guard: Literal["off", "warn", "react"] = "off"
    """Reaction: none (off); a warning (warn); or also a return to the checkpoint with the best
    success, from which the run continues on a lower learning rate and with a stronger filter
    (react).
    """
    guard_rollbacks: Annotated[Count, _REACTS] = 3
    """Times that a run may go back, at most."""
    guard_lr: Annotated[_Factor, _REACTS] = 0.5
    """Factor of both learning rates at every rollback."""
    guard_filter: Annotated[_Factor, _REACTS] = 0.5
    """Share of the groups that the filter keeps, those whose returns vary most, which is trained on
    after a rollback; again of these at every further one.
    """
