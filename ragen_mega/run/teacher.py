"""On-policy distillation: a teacher scores the tokens that the policy has sampled, behind the
policy's prompts or behind other ones.

GKD (arXiv:2306.13649) with the reverse KL on the policy's samples. Its own prompts differ in worked
examples or in the system prompt: what the policy reads there moves into its weights (context
distillation, arXiv:2112.00861).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ragen_mega.config import EnvironmentConfig, StarPOConfig
from ragen_mega.data.fields import ROUTES, TEACHER_IDS, TEACHER_LOGPROBS
from ragen_mega.data.packing import pack
from ragen_mega.data.types import TokenBatch, Trajectory
from ragen_mega.environments.pool import EnvironmentFailed, briefly
from ragen_mega.ranks.collectives import on_each, on_main
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TRAINING_SEEDS, episode_maker
from ragen_mega.run.log import StepLog

State = tuple[str, int, int]
"""Environment, seed and outcome seed: what an episode begins with."""
Prompts = tuple[tuple[int, ...], tuple[int, ...]]
"""First prompt of an episode, and the prompt that the teacher has in its place."""


class Model(NamedTuple):
    """A model that teaches."""

    scores: Callable[[TokenBatch], Tensor]
    """Batch -> [T, 2 + 2 K] as `Scorer.scores` gives them, at the policy's temperature."""
    max_positions: int


class Teacher:
    """The teachers of a run, one for each environment. Its methods are collective."""

    def __init__(
        self, config: StarPOConfig, models: Mapping[str, Model], renderer: ChatRenderer
    ) -> None:
        """`models`: environment -> its teacher. Raises ValueError if a context and the teacher's
        longer prompt have more positions than the teacher.
        """
        self._config, self._models, self._renderer = config, models, renderer
        self.notes: list[str] = []
        """Lines about its prompts."""
        longest = dict.fromkeys(models, config.rollout.max_context_length)
        if config.model.restates_prompts:
            first = [(name, TRAINING_SEEDS[0], TRAINING_SEEDS[0]) for name in models]
            found = on_main(partial(self._prompts, first, 0))
            for name, (prompt, restated) in zip(models, found):
                longest[name] += max(0, len(restated) - len(prompt))
                self.notes.append(
                    f"teacher: its first prompt of {name} has {len(restated)} tokens, and the"
                    f" policy's {len(prompt)}"
                )
        for name, model in models.items():
            if longest[name] > model.max_positions:
                raise ValueError(
                    f"the teacher of {name} reads up to {longest[name]} tokens (max_context_length"
                    f" and what its prompt has more) and has {model.max_positions} positions; lower"
                    " --max-context-length or --teacher-prompt-examples"
                )

    def score(
        self, batch: TokenBatch, trajectories: Sequence[Trajectory], log: StepLog
    ) -> TokenBatch:
        """`batch`, which packs `trajectories`, with the log-ratios of teacher and policy, and with
        --teacher-top-k the tokens that the teacher finds likeliest. Raises ValueError if a world
        does not begin again as it began.
        """
        seen = batch
        if self._config.model.restates_prompts:
            seen = pack(self._restated(trajectories, log.step), batch.here)
        mask, old = batch.loss_mask, batch.old_logprobs
        assert old is not None  # a run with a teacher has them before
        seen, top_k = seen.without(ROUTES), self._config.advantage.teacher_top_k
        found = torch.zeros(batch.num_positions, 2 + 2 * top_k)
        for model in dict.fromkeys(self._models.values()):
            ids = [
                place
                for place, trajectory in enumerate(trajectories)
                if self._models[trajectory.environment] is model
            ]
            if ids:
                # The sampled tokens are the same ones in the same order, whatever the prompt.
                part, positions = seen.select(ids), batch.positions(ids)
                found[positions[mask[positions]]] = model.scores(part)[part.loss_mask]
        ratios = torch.where(mask, found[:, 0] - old, 0)
        log.add("teacher", kl=-float(ratios[mask].double().mean()))
        batch = batch.with_fields(teacher_log_ratios=ratios)
        if not top_k:
            return batch
        logprobs, tokens = found[:, 2:].split(top_k, dim=1)
        log.add("teacher", top_k_mass=float(logprobs[mask].double().exp().sum(1).mean()))
        return batch.with_fields(**{TEACHER_IDS: tokens, TEACHER_LOGPROBS: logprobs})

    def _restated(self, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the trajectories behind the teacher's prompts."""
        states = [(each.environment, each.seed, each.outcome_seed) for each in trajectories]
        found = on_main(partial(self._prompts, states, step))

        def restate() -> list[Trajectory]:
            pairs = [*zip(trajectories, found, strict=True)]
            for member, (prompt, _) in pairs:
                if member.is_held and member.first_prompt != prompt:
                    raise ValueError(
                        f"{member.environment} does not begin again as it began from seed"
                        f" {member.seed}, and a teacher needs that for its own prompts; let reset"
                        " depend on its seed alone, or drop --teacher-prompt-examples and"
                        " --teacher-system-prompt"
                    )
            return [member.behind(restated) for member, (_, restated) in pairs]

        return on_each(restate)

    def _prompts(self, states: Sequence[State], step: int) -> list[Prompts]:
        """Start every state again, under the options of a training `step`. Not collective."""
        config, model = self._config.environment, self._config.model
        other = teacher_environment(
            config,
            model.teacher_prompt_examples,
            model.teacher_prompt_examples_file,
            model.teacher_system_prompt,
        )
        known: dict[State, list[tuple[int, ...]]] = {state: [] for state in states}
        for name in dict.fromkeys(name for name, *_ in known):
            for world in (config, other):
                make = episode_maker(world, name, step)
                with briefly(name, make, config.environment_timeout) as (worker, episode):
                    for state, prompts in known.items():
                        if state[0] != name:
                            continue
                        start = partial(episode.start, state[1], outcome_seed=state[2])
                        try:
                            messages = worker.wait(start)
                        except EnvironmentFailed as error:
                            raise ValueError(
                                f"{name} cannot start again from seed {state[1]} for the teacher's"
                                f" prompt: {error}"
                            ) from error
                        prompts.append(tuple(self._renderer.start(messages, episode.tools)))
        return [(known[state][0], known[state][1]) for state in states]


def teacher_environment(
    config: EnvironmentConfig, examples: int | None, file: str | None, system_prompt: str | None
) -> EnvironmentConfig:
    """Return the settings by which the teacher's prompts are written."""
    if examples is not None:
        config = replace(config, prompt_examples=examples, prompt_examples_file=file)
    if system_prompt is not None:
        config = replace(config, system_prompt=system_prompt)
    return config


def check_tokens(
    name: str,
    teacher: tuple[PreTrainedTokenizerBase, PretrainedConfig],
    policy: tuple[PreTrainedTokenizerBase, PretrainedConfig],
) -> None:
    """Raise ValueError, which names the first difference, unless a teacher has the policy's tokens,
    and a row for every token that the policy may sample.
    """
    theirs, ours = (
        {token: text for text, token in tokenizer.get_vocab().items()}
        for tokenizer, _ in (teacher, policy)
    )
    for token in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token) != ours.get(token):
            raise ValueError(
                f"teacher_load {name} must have the policy's tokens, and token {token} is"
                f" {theirs.get(token)!r} there and {ours.get(token)!r} here; load a teacher of the"
                " same family"
            )
    rows, needed = teacher[1].vocab_size, policy[1].vocab_size
    if rows < needed:
        raise ValueError(
            f"teacher_load {name} has {rows} rows for tokens, and the policy may sample {needed}"
            " (vocab_size in config.json); load a teacher with as many"
        )
