"""The configuration of a run: its sections, the values that follow from several sections, and its
JSON.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ragen_mega.config.rules import Sections, check_rules, section_types


@dataclass(frozen=True)
class StarPOConfig(Sections):
    """Train a language-model agent by StarPO (arXiv:2504.20073) on megatron-core."""

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def seed_of_warm_start(self) -> int:
        """Return the seed of the warm start: its own, else the seed of the run."""
        own = self.warm_start.warm_start_seed
        return self.train.seed if own is None else own

    @property
    def has_warm_start(self) -> bool:
        """Return whether the policy imitates play before reinforcement learning."""
        return self.model.load is None or self.warm_start.sft_steps > 0

    @property
    def warm_starts_critic(self) -> bool:
        """Return whether the warm start makes a critic too."""
        is_given = self.model.critic_load is not None
        steps = self.warm_start.warm_start_critic_steps
        return self.advantage.uses_critic and steps > 0 and not is_given

    def old_logprobs_from(self, num_updates: int) -> Literal["update", "engine", "pass"]:
        """Name the source of a step's old log-probabilities, for this many optimizer steps of the
        actor: the update's first pass, the engine, or a separate pass.
        """
        if self.loss.loss_mask == "legacy" or self.loss.old_logprobs == "recompute":
            return "pass"
        if self.loss.old_logprobs == "engine":
            return "engine"
        is_needed_before = (
            self.advantage.kl_in_reward != "none"
            or self.advantage.has_teacher
            or self.advantage.estimator.reads_logprobs
        )
        if num_updates == 1 and not is_needed_before:
            return "update"
        return "engine" if self._samples_as_trained else "pass"

    @property
    def _samples_as_trained(self) -> bool:
        """Return whether the engine's log-probabilities are the trainer's up to rounding in
        float32.
        """
        rollout = self.rollout
        is_same_policy = rollout.max_staleness == 0 and self.loss.importance_cap is None
        return rollout.rollout_engine == "embedded" and not self.parallel.bf16 and is_same_policy

    @property
    def fetches_weights(self) -> bool:
        """Return whether a process group carries weights to ranks that only sample."""
        return self.parallel.placement == "separate" and self.rollout.rollout_engine == "sglang"

    def senders(self, trainers: int) -> list[int]:
        """Return the ranks, of those that train, which send weights to ranks that only sample; far
        apart, so that they are of several nodes.
        """
        count = self.parallel.weight_senders
        return [index * trainers // count for index in range(count)]

    @property
    def shares_prefixes(self) -> bool:
        """Return whether trajectories may share their beginnings."""
        return self.train.shared_prefixes != "off" and self.parallel.fp8 == "none"

    @property
    def context_per_rank(self) -> int:
        """Return the tokens of the longest trajectory that each context-parallel rank computes."""
        return -(-self.rollout.max_context_length // self.parallel.context_parallel_size)

    @property
    def has_kl(self) -> bool:
        """Return whether a KL to the reference policy takes part."""
        return self.loss.kl_kind != "none" or self.advantage.kl_in_reward != "none"

    @property
    def teachers(self) -> dict[str, str | None]:
        """Return a map: environment -> model of its teacher, None where that is what the policy
        starts from.
        """
        given, start = self.model.teachers, None if self.has_warm_start else self.model.load
        named = {name: given.get(name, given.get("")) for name in self.environment.shares}
        return {name: None if model == start else model for name, model in named.items()}

    @property
    def loaded_teachers(self) -> dict[str, list[str]]:
        """Return a map: model of a teacher -> the environments that it teaches; models other than
        what the policy starts from.
        """
        taught: dict[str, list[str]] = {}
        for name, model in self.teachers.items():
            if model is not None:
                taught.setdefault(model, []).append(name)
        return taught

    @property
    def needs_reference(self) -> bool:
        """Return whether a frozen copy of what the policy starts from takes part."""
        return self.has_kl or (self.advantage.has_teacher and None in self.teachers.values())

    def planned_evaluations(self, num_engines: int) -> dict[int, int]:
        """Map a number of finished steps to the episodes that one of `num_engines` engines then
        plays.
        """
        plan, num_steps = self.evaluation, self.train.num_steps
        episodes = plan.eval_prompts * len(self.environment.evaluated) // num_engines
        regular = range(plan.eval_interval, num_steps, plan.eval_interval or num_steps or 1)
        return {step: episodes for step in regular if step} | {
            num_steps: episodes * plan.eval_samples
        }

    @property
    def at_trainers(self) -> Self:
        """Return the settings of ranks that train: with placement separate the engines that the
        user has started are for the ranks that sample.
        """
        if self.parallel.placement == "colocated":
            return self
        own = dataclasses.replace(self.rollout, engine_addresses=None)
        return dataclasses.replace(self, rollout=own)

    @property
    def run_directory(self) -> Path:
        # A slash, as of a URL, would make two folders of the name.
        environments = self.environment.environments.translate(str.maketrans(",/", "+.", ":"))
        estimator = self.advantage.advantage_estimator.replace(":", ".")
        default = f"{environments}-{estimator}-seed{self.train.seed}"
        return Path(self.logging.output) / (self.logging.name or default)

    def to_dict(self) -> dict[str, Any]:
        """Return section name -> field name -> value, as JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StarPOConfig":
        """Invert `to_dict`; entries of a config.json about a run's provenance are left out. Unknown
        keys raise ValueError.
        """
        values = {name: entries for name, entries in values.items() if name != "provenance"}
        sections = section_types()
        known = {
            name: {item.name for item in dataclasses.fields(part)}
            for name, part in sections.items()
        }
        for section, entries in values.items():
            if unknown := set(entries) - known.get(section, set()):
                raise ValueError(
                    f"config has unknown keys {sorted(unknown)} in {section!r}; load it with the"
                    " version that wrote it"
                )
        parts: dict[str, Any] = {name: sections[name](**own) for name, own in values.items()}
        return cls(**parts)
