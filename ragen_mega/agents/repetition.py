"""Repetitions of agents' episodes without an engine: whether an agent begins as it did, and whether
it does all that it did once it gets the recorded answers.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any

from ragen_mega.agents.call_tree import Call, RequestError
from ragen_mega.agents.served_episode import Answers
from ragen_mega.config.rules import Sections
from ragen_mega.data.types import CALL, Completion, SamplingParams, Trajectory
from ragen_mega.environments.episode import ERROR
from ragen_mega.rollout.collector import Collection
from ragen_mega.rollout.engine import NoEngine
from ragen_mega.rollout.player import Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker, play_settings


def begin_alike(one: Trajectory, other: Trajectory) -> bool:
    """Return whether the first request of either episode is one of the other's conversations, or is
    unknown. An agent may begin several conversations at once, in any order.
    """
    (first, roots), (others_first, others_roots) = map(_conversations, (one, other))
    return None in (first, others_first) or first in others_roots or others_first in roots


def begins_again(config: Sections, renderer: ChatRenderer, episode: Trajectory, step: int) -> bool:
    """Return whether the agent of an episode of a step asks the same first if it gets the task
    again. It gets no answer.
    """
    answers = _Refusals()
    _play_again(config, renderer, episode, step, answers)
    return _conversations(episode)[0] in answers.prompts


def find_difference(
    config: Sections, renderer: ChatRenderer, episode: Trajectory, step: int
) -> str | None:
    """Play an episode of a step with its recorded answers. Returns how it differs in its tokens,
    branches or rewards; None if it does not.
    """
    again = _play_again(config, renderer, episode, step, RecordedAnswers(episode))
    if all(
        list(each(episode)) == list(each(again))
        for each in (
            lambda trajectory: trajectory.tokens,
            lambda trajectory: trajectory.breaks,
            lambda trajectory: (turn.reward for turn in trajectory.turns),
        )
    ):
        return None
    return str(again.turns[-1].info.get(ERROR, "it asks or earns something else"))


def _play_again(
    config: Sections, renderer: ChatRenderer, episode: Trajectory, step: int, answers: Answers
) -> Trajectory:
    """Play the task of an episode of a step with answers from elsewhere."""
    name = episode.environment
    maker = episode_maker(config.environment, name, step)
    task = Task(episode.group_id, name, episode.seed, episode.outcome_seed, None, maker)
    settings = play_settings(config, temperature=config.rollout.temperature, seed=0)
    settings = replace(settings, answers=answers)
    with Collection(NoEngine(), renderer, [task], settings) as collection:
        collection.play()
        (played,) = collection.trajectories()
    return played


@dataclass(slots=True)
class _Refusals:
    """A source of answers that gives none and keeps the prompts; see `served_episode.Answers`."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        self.prompts.append(tuple(tokens))
        raise RequestError("the agent is only asked how it begins", code="rehearsal", param="")


class RecordedAnswers:
    """Trained answers of an episode that was recorded, found by their prompts."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._answers: defaultdict[tuple[int, ...], deque[Completion]] = defaultdict(deque)
        trained = [turn for turn in trajectory.turns if CALL in turn.info]
        for turn in sorted(trained, key=lambda turn: turn.info[CALL]["answer"]):
            span = slice(turn.start, turn.end)
            self._answers[trajectory.prompt(turn)].append(
                Completion(
                    list(trajectory.tokens[span]),
                    list(trajectory.rollout_logprobs[span]),
                    turn.info["finish_reason"],
                )
            )

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        """Return the next answer that was recorded for the prompt; see `Answers`. Raises
        RequestError if there is none.
        """
        if not (left := self._answers.get(tuple(tokens))):
            raise RequestError(
                "the record has no answer to this prompt, so that the agent does not ask what it"
                " asked",
                code="not_recorded",
            )
        return left.popleft(), {}


def _conversations(
    episode: Trajectory,
) -> tuple[tuple[int, ...] | None, set[tuple[int, ...]]]:
    """Return the prompt of the first request, None if its answer is not trained, and the prompts of
    all that begin a conversation.
    """
    prompts = {
        turn.info[CALL]["index"]: episode.prompt(turn)
        for turn in episode.turns
        if CALL in turn.info and turn.info[CALL]["parent"] is None
    }
    return prompts.get(0), set(prompts.values())
