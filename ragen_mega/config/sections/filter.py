"""Flags of the filter, which chooses the initial states that a step trains on."""

import math
from dataclasses import dataclass

from ragen_mega.algorithm.tables import FILTERS, find_filter
from ragen_mega.config.sections.section import Section, Share


@dataclass(frozen=True)
class FilterConfig(Section):
    """Filter that chooses the initial states that a step trains on."""

    filter_strategy: str = "top_fraction"
    """Rule by which groups are kept, on the standard deviation of their returns (after --reward):
    top_fraction (StarPO-S), top_p_linear, top_p_softmax, top_k, min_p, percentile_range (a part of
    the ranking), within_group (the most different trajectories of every group) or none; or a filter
    of your own, my_module:my_filter.
    """
    filter_value: float | None = None
    """Fraction, probability mass or count of the strategy (default of top_fraction: 0.25)."""
    filter_start: Share = 0.0
    """Share of the ranking, largest standard deviation first, at which percentile_range begins; it
    ends at the filter value.
    """
    filter_keep_zero: bool = False
    """Keep groups whose trajectories all earned the same."""
    soft_reweighting: bool = False
    """Scale each kept group's advantages by its share of the largest standard deviation."""

    def check(self) -> None:
        name, declared = self.filter_strategy, find_filter(self.filter_strategy)
        FILTERS.check_call(name, declared.function, "returns", value=None, keep_zero=False)
        if declared.value == "none" and self.filter_value is not None:
            raise ValueError(
                f"filter_value {self.filter_value} does nothing with filter_strategy {name}; drop"
                " --filter-value or name another strategy"
            )
        if declared.value != "range" and self.filter_start > 0:
            raise ValueError(
                f"filter_start {self.filter_start} does nothing with filter_strategy {name}; drop"
                " --filter-start or set --filter-strategy percentile_range"
            )
        if self.filter_keep_zero and not declared.drops_constant:
            raise ValueError(
                f"filter_keep_zero does nothing with filter_strategy {name}, which keeps such"
                " groups; drop the flag"
            )

    def num_kept(self, num_groups: int) -> int | None:
        """Return the number of groups that are kept if none is constant, None where it depends on
        the returns.
        """
        value = self._last
        if value is None:
            return num_groups if self.filter_strategy == "none" else None
        if self.filter_strategy == "top_fraction":
            return max(1, math.floor(value * num_groups + 1e-9))
        if self.filter_strategy == "percentile_range":
            ends = (self.filter_start, value)
            first, last = (math.floor(share * num_groups + 1e-9) for share in ends)
            return last - first
        return int(value) if self.filter_strategy == "top_k" else None

    @property
    def value(self) -> float | tuple[float, float | None] | None:
        """Return the value of the filter: as set, else the default that the filter declares; for a
        range both of its ends.
        """
        is_range = find_filter(self.filter_strategy).value == "range"
        return (self.filter_start, self._last) if is_range else self._last

    @property
    def _last(self) -> float | None:
        """Return the value of the filter, for a range its end."""
        default = find_filter(self.filter_strategy).default
        return default if self.filter_value is None else self.filter_value
