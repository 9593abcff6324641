"""Flags of rewards and of how they become advantages."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ragen_mega.algorithm.tables import (
    ESTIMATORS,
    TEACHER,
    Estimator,
    find_estimator,
    parse_reward,
)
from ragen_mega.config.sections.section import Natural, OnlyWith, Section, Share, flag_of

_OPTIONS = {"turn_gamma": "bilevel_gae", "turn_lam": "bilevel_gae", "gamma": "gae", "lam": "gae"}
"""Option of some estimators -> one that has it."""
_CANCELLED = (
    ("grpo", "reward_normalization", ("mean", "mean_std")),
    ("dr_grpo", "reward_normalization", ("mean",)),
    ("rloo", "reward_normalization", ("mean",)),
    ("reinforce_plus_plus", "whiten_advantages", (True, False)),
)
"""Estimator, and values of a setting that its own normalisation cancels."""


@dataclass(frozen=True)
class AdvantageConfig(Section):
    """Rewards, and the estimator that turns them into advantages."""

    reward: str = "environment"
    """Earnings of a trajectory: a weighted sum of environment, success, format, response_length,
    overlong, repetition, action_effectiveness, grounded_thought, turn_discounted, group_relative,
    judges by their URLs and rewards of your own, e.g. "environment + 0.1*format +
    my_module:my_reward". The term teacher adds the log-ratios of a teacher (--teacher-load,
    --teacher-prompt-examples, --teacher-system-prompt) to the advantage of each token, e.g.
    "environment + 0.1*teacher", or teacher alone with the estimator none.
    """
    teacher_top_k: Natural = 0
    """Tokens of the teacher's distribution that are taught in the place of each sampled token: the
    term teacher is then a loss, KL(teacher || policy) over the tokens that the teacher finds
    likeliest, and so teaches what the policy never samples. E.g. 16 (0: it is the advantage of the
    sampled token).
    """
    advantage_estimator: str = "gae"
    """gae and bilevel_gae train a critic (PPO); grpo, dr_grpo, rloo and reinforce_plus_plus compare
    trajectories of a group or batch; none is for --reward teacher; or an estimator of your own,
    my_module:my_estimator. grpo divides by the deviation of a group, and so prefers safe actions
    where wins are rare.
    """
    gamma: Share = 1.0
    """Discount per token (gae, bilevel_gae and reinforce_plus_plus)."""
    lam: Share = 1.0
    """GAE lambda per token (gae and bilevel_gae)."""
    turn_gamma: Share | None = None
    """Discount per turn (bilevel_gae only; default 0.95)."""
    turn_lam: Share | None = None
    """GAE lambda per turn (bilevel_gae only; default 1)."""
    reward_placement: Literal["trajectory", "turn"] = "trajectory"
    """Tokens at which reward enters: the whole return at the last token, or each turn's reward at
    the turn's end.
    """
    reward_normalization: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Normalisation of returns before the estimator (placement `trajectory` only)."""
    reward_normalization_scope: Annotated[
        Literal["group", "environment", "batch"],
        OnlyWith("reward_normalization", "--reward-normalization mean"),
    ] = "group"
    """Trajectories that are normalised together."""
    whiten_advantages: bool | None = None
    """Normalise advantages over the batch (default: with a critic)."""
    kl_in_reward: Literal["none", "k1", "k2", "k3"] = "none"
    """KL to the reference policy subtracted from the reward of each token. Of these, k1 has the
    gradient of KL(policy || reference); k2 and k3 weigh tokens differently.
    """
    kl_reward_coef: float = 0.0
    """Coefficient of the KL in the rewards."""

    def check(self) -> None:
        self._check_teacher()
        name, declared = self.advantage_estimator, self.estimator
        options = dict.fromkeys(declared.options, 1.0)
        ESTIMATORS.check_call(name, declared.function, "inputs", **options)
        for option, other in _OPTIONS.items():
            default = getattr(AdvantageConfig, option)
            if getattr(self, option) != default and option not in declared.options:
                raise ValueError(
                    f"{option} does nothing with advantage_estimator {name}; drop it or set"
                    f" --advantage-estimator {other}"
                )
        for estimator, setting, values in _CANCELLED:
            if name == estimator and (value := getattr(self, setting)) in values:
                raise ValueError(
                    f"{setting} {value} does nothing with advantage_estimator {name}, which"
                    f" normalises so that it cancels; drop {flag_of(setting)}"
                )
        if declared.level == "turn" and self.reward_placement != "turn":
            raise ValueError(f"{name} discounts turn rewards; add --reward-placement turn")
        if declared.level == "trajectory" and self.reward_placement == "turn":
            raise ValueError(
                f"{name} compares whole returns, so reward_placement turn does nothing; drop"
                " --reward-placement"
            )
        if self.reward_normalization != "identity" and self.reward_placement == "turn":
            raise ValueError(
                "reward_normalization acts on whole returns; drop it or --reward-placement turn"
            )
        if (self.kl_in_reward == "none") != (self.kl_reward_coef == 0.0):
            raise ValueError(
                f"kl_in_reward ({self.kl_in_reward}) and kl_reward_coef ({self.kl_reward_coef})"
                " need each other; set both or none"
            )
        if self.kl_in_reward != "none" and declared.level == "trajectory":
            raise ValueError(
                f"{name} uses whole returns, so a per-token KL reward does nothing; use --kl-kind"
                " instead"
            )

    def _check_teacher(self) -> None:
        """Check that an estimator has rewards, and that a teacher alone has none to estimate."""
        name, is_alone = self.advantage_estimator, not self.reward_terms
        if self.teacher_top_k and not self.has_teacher:
            raise ValueError(
                f"teacher_top_k does nothing with reward {self.reward}; drop --teacher-top-k, or"
                ' set --reward "environment + 0.1*teacher"'
            )
        if is_alone and name != "none":
            raise ValueError(
                f"reward {self.reward} leaves advantage_estimator {name} no rewards; set"
                ' --advantage-estimator none, or --reward "environment + 0.1*teacher"'
            )
        for setting, default in (
            ("kl_in_reward", "none"),
            ("reward_normalization", "identity"),
            ("reward_placement", "trajectory"),
            ("whiten_advantages", None),
        ):
            if name == "none" and getattr(self, setting) != default:
                raise ValueError(
                    f"{setting} {getattr(self, setting)} does nothing with advantage_estimator"
                    f" none, which reads no rewards; drop {flag_of(setting)}; a KL in the loss is"
                    " --kl-kind"
                )
        if name == "none" and not is_alone:
            raise ValueError(
                f"advantage_estimator none makes nothing of the rewards {self.reward}; set --reward"
                " teacher, or another --advantage-estimator"
            )

    @property
    def estimator(self) -> Estimator:
        """Return the declaration of the estimator."""
        return find_estimator(self.advantage_estimator)

    @property
    def reward_terms(self) -> dict[str, float]:
        """Return name of a reward -> its weight, without the teacher."""
        terms = parse_reward(self.reward)
        return {name: weight for name, weight in terms.items() if name != TEACHER}

    @property
    def has_teacher(self) -> bool:
        """Return whether a teacher scores the sampled tokens."""
        return TEACHER in parse_reward(self.reward)

    @property
    def teacher_weight(self) -> float:
        """Return the weight of the teacher's log-ratios; 0 without a teacher."""
        return parse_reward(self.reward).get(TEACHER, 0.0)

    @property
    def teacher_coef(self) -> float:
        """Return the weight in the loss of a teacher's likeliest tokens; 0 without them."""
        return self.teacher_weight if self.teacher_top_k else 0.0

    @property
    def uses_critic(self) -> bool:
        return self.estimator.uses_critic

    @property
    def whitens(self) -> bool:
        return self.uses_critic if self.whiten_advantages is None else self.whiten_advantages
