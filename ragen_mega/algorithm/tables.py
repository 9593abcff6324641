"""Tables of the parts that users can extend: named advantage estimators, group filters, rewards,
metrics.

An entry is built in, an import path (`my_module:my_thing`, also of a file in the working
directory), an entry point of the table's group, or added by `register`. Nothing here imports torch,
so that the configuration can check names quickly. `docs/extending.md` has the signatures.
"""

import copy
import inspect
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from ragen_mega.extensions.registry import Registry, takes
from ragen_mega.system.addresses import check_addresses

OPTIONS = ("gamma", "lam", "turn_gamma", "turn_lam")
"""Flags that are passed to an advantage estimator with a parameter of that name."""

TEACHER = "teacher"
"""Term of --reward that is no reward of turns: the teacher's log-ratios, see `credit.taught`."""

_TERM = re.compile(
    r"\s*(?P<sign>[+-]?)\s*(?:(?P<weight>[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)\s*\*\s*)?"
    r"(?P<name>https?://[^\s+*]+|[A-Za-z_]\w*(?:\.\w+)*(?::\w+(?:\.\w+)*)?)\s*"
)


class PlugInError(ValueError):
    """A user's function failed or returned something invalid."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator, with the facts that the configuration needs.

    Attributes:
        function: `function(inputs: CreditInputs, *, option, ...) -> (advantages [T], returns [T] or
            None)`, or its import path.
        options: which of `OPTIONS` it takes.
        uses_critic: a critic is trained: `inputs.batch.values` exist, and returns are its targets.
        level: rewards that it uses: `turn` needs the reward of each turn, `trajectory` uses only
            total returns and ignores rewards of turns and tokens.
        min_group_size: the least number of trajectories per group.
        reads_logprobs: it uses `inputs.batch.old_logprobs`, which are then always computed.
        reads_tokens: it uses tokens, the engine's log-probabilities or, as `success` does, infos of
            turns, so that every rank needs this data of all trajectories that are trained on.
        needs_fresh_samples: what it computes is wrong for samples of earlier weights, so that
            --max-staleness must be 0.
    """

    function: Callable[..., Any] | str
    options: tuple[str, ...] = ()
    uses_critic: bool = False
    level: Literal["any", "turn", "trajectory"] = "any"
    min_group_size: int = 1
    reads_logprobs: bool = True
    reads_tokens: bool = True
    needs_fresh_samples: bool = False


@dataclass(frozen=True)
class Filter:
    """A group filter, with the facts that the configuration needs.

    Attributes:
        function: `function(returns, *, value, keep_zero) -> indices of the groups to keep`, or its
            import path; `returns` are P sequences of raw returns.
        value: what --filter-value means: nothing, a share in (0, 1], a number of groups, a range of
            shares (--filter-start, --filter-value), or anything that the filter accepts, including
            None.
        default: the value without --filter-value; a share or count without a default is required.
        drops_constant: groups whose trajectories all earned the same are dropped, unless
            --filter-keep-zero.
        within_groups: the function instead returns, for each group, the indices of its trajectories
            that stay.
    """

    function: Callable[..., Any] | str
    value: Literal["none", "share", "count", "range", "any"] = "any"
    default: float | None = None
    drops_constant: bool = True
    within_groups: bool = False

    def check(
        self, name: str, value: float | tuple[float, float | None] | None, num_groups: int
    ) -> None:
        """Raise ValueError unless `value` is valid for `num_groups` groups."""
        if self.value == "range" and isinstance(value, tuple):
            low, high = value
            # 0.6 - 0.5 is less than a tenth
            if high is None or not low < high <= 1.0 or (high - low) * num_groups < 1 - 1e-9:
                raise ValueError(
                    f"{name} keeps the groups between two shares of the ranking, filter_start <"
                    f" filter_value <= 1, at least one of {num_groups}, not {low} to {high}; the"
                    " middle half is --filter-start 0.25 --filter-value 0.75"
                )
        elif self.value in ("share", "count"):
            if value is None or isinstance(value, tuple):
                raise ValueError(f"filter_strategy {name} needs its value; add --filter-value")
            if self.value == "count" and (value != int(value) or not 1 <= value <= num_groups):
                raise ValueError(
                    f"{name} keeps a whole number of groups in 1..{num_groups}, not {value}; for a"
                    " share use top_fraction"
                )
            if self.value == "share" and not 0.0 < value <= 1.0:
                raise ValueError(
                    f"the value of {name} must be in (0, 1], not {value}; set --filter-value 0.25,"
                    " as StarPO-S does"
                )


_CREDIT = "ragen_mega.algorithm.credit"
_FILTERS = "ragen_mega.algorithm.filters"
_REWARDS = "ragen_mega.algorithm.rewards"

_estimator = partial(Estimator, reads_logprobs=False, reads_tokens=False)
ESTIMATORS = Registry(
    "advantage estimator",
    "--advantage-estimator",
    {
        "gae": _estimator(f"{_CREDIT}:gae", ("gamma", "lam"), uses_critic=True),
        "bilevel_gae": _estimator(
            f"{_CREDIT}:bilevel_gae", OPTIONS, uses_critic=True, level="turn"
        ),
        "grpo": _estimator(f"{_CREDIT}:grpo", level="trajectory", min_group_size=2),
        "dr_grpo": _estimator(f"{_CREDIT}:dr_grpo", level="trajectory", min_group_size=2),
        "rloo": _estimator(f"{_CREDIT}:rloo", level="trajectory", min_group_size=2),
        "reinforce_plus_plus": _estimator(
            f"{_CREDIT}:reinforce_plus_plus", ("gamma",), min_group_size=2
        ),
        "none": _estimator(f"{_CREDIT}:none"),
    },
    known_elsewhere={
        "ppo": "gae",
        "actor_critic": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce++": "reinforce_plus_plus",
        "leave_one_out": "rloo",
    },
)
FILTERS = Registry(
    "group filter",
    "--filter-strategy",
    {
        "none": Filter(f"{_FILTERS}:keep_all", "none", drops_constant=False),
        "top_fraction": Filter(f"{_FILTERS}:top_fraction", "share", default=0.25),
        "top_p_linear": Filter(f"{_FILTERS}:top_p_linear", "share"),
        "top_p_softmax": Filter(f"{_FILTERS}:top_p_softmax", "share"),
        "top_k": Filter(f"{_FILTERS}:top_k", "count"),
        "min_p": Filter(f"{_FILTERS}:min_p", "share"),
        "percentile_range": Filter(f"{_FILTERS}:percentile_range", "range"),
        "within_group": Filter(f"{_FILTERS}:within_group", "share", within_groups=True),
    },
)
REWARDS = Registry(
    "reward",
    "--reward",
    {
        "environment": f"{_REWARDS}:environment",
        "success": f"{_REWARDS}:success",
        "format": f"{_REWARDS}:well_formed",
        "response_length": f"{_REWARDS}:response_length",
        "overlong": f"{_REWARDS}:overlong",
        "repetition": f"{_REWARDS}:repetition",
        "action_effectiveness": f"{_REWARDS}:action_effectiveness",
        "grounded_thought": f"{_REWARDS}:grounded_thought",
        "turn_discounted": f"{_REWARDS}:turn_discounted",
        "group_relative": f"{_REWARDS}:group_relative",
    },
    remedy="change its parameters (docs/extending.md); a judge of answers to --tasks is given by"
    " --score, or has a parameter completions",
)
"""`reward(trajectory) -> rewards of its turns, or one number, which its last turn earns`; or
`reward(group) -> one such answer for each of its trajectories`.
"""
METRICS = Registry(
    "metric",
    "--metrics",
    {"distinct_responses": "ragen_mega.algorithm.diagnostics:distinct_responses"},
)
"""`metric(groups) -> a number, or name -> number`."""


def find_estimator(name: str) -> Estimator:
    """Return the estimator of that name; a plain function gets the options that it has parameters
    for.

    Raises ValueError if there is none.
    """
    found = ESTIMATORS.get(name)
    if isinstance(found, Estimator):
        return found
    parameters = call(ESTIMATORS, name, lambda: inspect.signature(found)).parameters
    return Estimator(found, tuple(option for option in OPTIONS if option in parameters))


def find_filter(name: str) -> Filter:
    """Return the group filter of that name. Raises ValueError if there is none."""
    found = FILTERS.get(name)
    return found if isinstance(found, Filter) else Filter(found)


def is_judge(name: str) -> bool:
    """Return whether a reward comes from a judge server: its name is the server's URL."""
    return name.startswith(("http://", "https://"))


def judges_tasks(name: str) -> bool:
    """Return whether a reward is a function of TRL's form, which tasks of files call themselves."""
    return not is_judge(name) and name != TEACHER and takes(REWARDS.check(name), "completions")


def _check_address(url: str) -> None:
    """Raise ValueError unless a judge can be asked there."""
    check_addresses(url)
    try:
        parts = urlsplit(url)
        reason = None if parts.hostname and parts.port != 0 else "no host or port"
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(
            f"reward {url} must be the address of a judge ({reason}); write e.g. --reward"
            ' "environment + 0.5*http://127.0.0.1:8000/score"'
        )


def parse_reward(text: str) -> dict[str, float]:
    """`environment + 0.1*format - my_module:my_reward` -> {"environment": 1.0, "format": 0.1, ...}.

    A term of weight 0 is logged but not trained on. Raises ValueError if `text` is no such sum or
    names an unknown reward.
    """
    terms: dict[str, float] = {}
    position = 0
    while position < len(text) or not terms:
        term = _TERM.match(text, position)
        weight = float(f"{term['sign']}1") * float(term["weight"] or 1) if term else math.nan
        is_apart = term and (not terms or term["sign"]) and term["name"] not in terms
        if not (term and is_apart and math.isfinite(weight)):
            raise ValueError(
                f"reward must be a sum of distinct terms, not {text!r} (at {text[position:]!r});"
                ' write e.g. --reward "environment + 0.1*format"'
            )
        if is_judge(term["name"]):
            _check_address(term["name"])
        elif term["name"] == TEACHER:
            if weight < 0:
                raise ValueError(
                    f"the weight of {TEACHER} must not be negative ({weight:g} would drive the"
                    ' policy away from it); write e.g. --reward "environment + 0.1*teacher"'
                )
        elif not judges_tasks(term["name"]):
            REWARDS.check_call(term["name"], REWARDS.check(term["name"]), "trajectory")
        terms[term["name"]] = weight
        position = term.end()
    return terms


def call(
    table: Registry, name: str, function: Callable[..., Any] | str, *args: Any, **options: Any
) -> Any:
    """Call a function of a table; one of the user's gets copies, since it may write into what it
    gets. Raises PlugInError, which says where it failed.
    """
    called = table.get(function) if isinstance(function, str) else function
    try:
        return called(*(args if table.is_packaged(name) else copy.deepcopy(args)), **options)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())
        raise PlugInError(
            f"{table.kind} {name} failed: {type(error).__name__}: {reason} ({place.filename}:"
            f"{place.lineno}); mend it or drop it from {table.flag}"
        ) from error
