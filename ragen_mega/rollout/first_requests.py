"""The first requests of an agent's episodes: whether two members of a group begin alike, and
whether an episode that is played again begins as it did.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import Any

from ragen_mega.agents.call_tree import CALL, Call, RequestError
from ragen_mega.config.rules import Sections
from ragen_mega.data.types import Completion, SamplingParams, Trajectory
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
    """Return whether the agent of an episode asks the same first if it gets the task again. It gets
    no answer.
    """
    name = episode.environment
    maker = episode_maker(config.environment, name, step)
    task = Task(episode.group_id, name, episode.seed, episode.outcome_seed, None, maker)
    answers = _Refusals()
    settings = replace(play_settings(config, temperature=1.0, seed=0), answers=answers)
    with Collection(NoEngine(), renderer, [task], settings) as collection:
        collection.play()
    return _conversations(episode)[0] in answers.prompts


@dataclass(slots=True)
class _Refusals:
    """A source of answers that gives none and keeps the prompts; see `served_episode.Answers`."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        self.prompts.append(tuple(tokens))
        raise RequestError("the agent is only asked how it begins", code="rehearsal", param="")


def _conversations(
    episode: Trajectory,
) -> tuple[tuple[int, ...] | None, set[tuple[int, ...]]]:
    """Return the prompt of the first request, None if its answer is not trained, and the prompts of
    all that begin a conversation.
    """
    starts = [start for start, _ in episode.segments]
    prompts = {
        turn.info[CALL]["index"]: tuple(
            episode.tokens[starts[bisect_right(starts, turn.start) - 1] : turn.start]
        )
        for turn in episode.turns
        if CALL in turn.info and turn.info[CALL]["parent"] is None
    }
    return prompts.get(0), set(prompts.values())
