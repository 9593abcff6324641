"""The table of per-token fields: what a trajectory records beside each token, and what a batch
knows about each label.

Packing, compacting, moving between ranks, storing and replaying iterate over the table. A row more,
of a name that no class declares, travels with the others: trajectories and batches keep its values
in `further_fields`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True, slots=True)
class TokenField:
    """A row of the table."""

    dtype: torch.dtype
    """Type in a batch, where a value belongs to `labels[t]`, or to `tokens[t]`: `is_of_inputs`."""
    filled_by: str
    """Part of the program that knows the value: `trajectory` (recorded while it is played), or the
    stage of a step that adds it to the batch.
    """
    recorded: DTypeLike | None = None
    """Type in a trajectory, where a value belongs to `tokens[t]`; None: trajectories have none."""
    shape: tuple[int, ...] = ()
    """Shape of one value."""
    default: float | tuple[int, ...] = 0
    """Value of a token for which nothing was recorded; a tuple is its last dimension."""
    is_of_inputs: bool = False
    """Whether a value in a batch belongs to `tokens[t]`, whose hidden state position t computes.
    Microbatches have such values by node.
    """
    is_sampled_only: bool = False
    """Whether tokens that the policy did not sample always have the default."""

    def array(self, values: Any) -> NDArray:
        """Return the recorded values of L tokens as an array [L, *shape]."""
        return np.asarray(values, self.recorded).reshape(-1, *self.shape)

    def defaults(self, count: int) -> NDArray:
        """Return the values [count, *shape] of tokens for which nothing was recorded."""
        return np.full((count, *self.shape), self.default, self.recorded)

    @property
    def least(self) -> float:
        """Least number of the type in a batch."""
        if self.dtype.is_floating_point:
            return -math.inf
        return 0 if self.dtype == torch.bool else torch.iinfo(self.dtype).min


TOKEN_FIELDS: dict[str, TokenField] = {
    "tokens": TokenField(torch.int64, "trajectory", np.int32, is_of_inputs=True),
    "labels": TokenField(torch.int64, "trajectory"),
    "position_ids": TokenField(torch.int64, "packing"),
    "loss_mask": TokenField(torch.bool, "packing", np.bool_, is_sampled_only=True),
    "turn_ids": TokenField(torch.int32, "packing"),
    "rewards": TokenField(torch.float32, "packing"),
    "rollout_logprobs": TokenField(torch.float32, "trajectory", np.float64, is_sampled_only=True),
    "old_logprobs": TokenField(torch.float32, "policy"),
    "entropies": TokenField(torch.float32, "policy"),
    "ref_logprobs": TokenField(torch.float32, "reference policy"),
    "teacher_log_ratios": TokenField(torch.float32, "teacher"),
    "values": TokenField(torch.float32, "critic"),
    "advantages": TokenField(torch.float32, "estimator"),
    "returns": TokenField(torch.float32, "estimator"),
    "weights": TokenField(torch.float32, "aggregation"),
}
"""Name -> row. The loss mask follows from the turns, which every rank has; so packing fills it."""
ROUTES = "routes"
"""Row of the experts that a mixture's routers chose, in runs that replay them (`add_routes`)."""


TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Rows of the tokens that a teacher finds likeliest in the place of a label, in runs with
--teacher-top-k (`add_likeliest`).
"""


def recorded_fields() -> dict[str, TokenField]:
    """Return the fields that trajectories record."""
    return {name: row for name, row in TOKEN_FIELDS.items() if row.recorded is not None}


def filled_by_trajectories() -> list[str]:
    """Return the names of batch fields whose values a rank lacks for trajectories that it does not
    hold.
    """
    return [name for name, row in TOKEN_FIELDS.items() if row.filled_by == "trajectory"]


def add_routes(num_layers: int, topk: int, num_experts: int, *, by_engine: bool = True) -> None:
    """Add the field of the experts that the router of each mixture layer chose for a token: a row
    [layers, k] holds the distinct experts of a layer in any order. Every rank calls this before it
    makes its first trajectory.

    `by_engine`: trajectories record them; else the policy adds them to a batch.
    """
    if num_experts > 256:
        raise ValueError(
            f"routing_replay keeps an expert in a byte and the model has {num_experts} experts, not"
            " at most 256; drop --routing-replay"
        )
    spread = tuple(i * num_experts // topk for i in range(topk))
    filled_by, recorded = ("trajectory", np.uint8) if by_engine else ("policy", None)
    TOKEN_FIELDS[ROUTES] = TokenField(
        torch.uint8, filled_by, recorded, (num_layers, topk), spread, is_of_inputs=True
    )


def add_likeliest(top_k: int) -> None:
    """Add the fields of a teacher's likeliest tokens. Every rank calls this."""
    TOKEN_FIELDS[TEACHER_IDS] = TokenField(torch.int32, "teacher", shape=(top_k,))
    TOKEN_FIELDS[TEACHER_LOGPROBS] = TokenField(torch.float32, "teacher", shape=(top_k,))


def routes_of_completion(
    routes: NDArray, num_sampled: int
) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    """Return the further fields and the prompt's fields of a completion for the routes [n, ...] of
    all its tokens but the last, and of prompt tokens before them. The last has gone through no
    expert yet: its routes come with the next completion.
    """
    start = len(routes) - (num_sampled - 1)
    sampled = np.concatenate([routes[start:], TOKEN_FIELDS[ROUTES].defaults(1)])
    return {ROUTES: sampled}, {ROUTES: routes[:start]}
