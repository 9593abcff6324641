"""The endings of trajectories, the failures among them, and the messages about these.
docs/environments.md has the table of all endings.
"""

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from ragen_mega.config.rules import Sections
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import BY_REWARD, ERROR, FAILED_ACTION, TRUNCATED_BY
from ragen_mega.environments.pool import late_advice
from ragen_mega.rollout.collector import FAILED_ATTEMPTS

_SEVERAL = 8
"""Episodes from which on a failure of all of them is no accident."""
_MAX_REASON = 300
"""Most characters of a reason, so that the place of an error is among them."""
_MAX_ACTION = 60
_OF_VALUES = frozenset(
    kind.__name__
    for kind in (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
) | {"JSONDecodeError", "NotImplementedError", "ZeroDivisionError"}
"""Names of the kinds of errors that values cause, not a server."""
_AGAIN_AND_AGAIN = 3
"""Number of episodes that an action must have ended before the policy is said to cause it."""
_STEPS = 20
"""Number of steps with a failure in which these episodes are counted."""


def last_info(trajectory: Trajectory) -> Mapping[str, Any]:
    """Return the info of the last turn."""
    return trajectory.turns[-1].info if trajectory.turns else {}


def cause(trajectory: Trajectory) -> str | None:
    """Return the one of `episode.CAUSES` that cut a trajectory; None if its task ended."""
    return last_info(trajectory).get(TRUNCATED_BY, "budget") if trajectory.truncated else None


def environment_errors(groups: Iterable[TrajectoryGroup]) -> list[tuple[Trajectory, str]]:
    """Return the trajectories that were ended by an error or the time limit of their environment,
    each with the reason.
    """
    return [
        (trajectory, last_info(trajectory)[ERROR])
        for group in groups
        for trajectory in group.trajectories
        if ERROR in last_info(trajectory)
    ]


def failed_attempts(
    groups: Iterable[TrajectoryGroup],
) -> Iterator[tuple[Trajectory, Mapping[str, Any]]]:
    """Yield every episode that an error or a time limit ended, also if another attempt replaced it:
    the trajectory of which it was an attempt, and the info about its end.
    """
    for group in groups:
        for trajectory in group.trajectories:
            info = last_info(trajectory)
            for failure in info.get(FAILED_ATTEMPTS, ()):
                yield trajectory, failure
            if ERROR in info:
                yield trajectory, {**info, "outcome_seed": trajectory.outcome_seed}


def describe_errors(groups: Sequence[TrajectoryGroup], *, are_trained: bool = True) -> str | None:
    """Return the message about the episodes of `failed_attempts`, of groups that are trained on or,
    if not, evaluated; None if there are none.
    """
    failures = list(failed_attempts(groups))
    if not failures:
        return None
    num_trajectories = sum(len(group.trajectories) for group in groups)
    num_lost = len(environment_errors(groups))
    num_repeated = len(failures) - num_lost
    trajectory, failure = failures[0]
    what = "which count as not solved"
    if are_trained:
        what = (
            f"of which {num_repeated} were replaced by another attempt and {num_lost} have no part"
            " in training"
        )
    return (
        f"environment errors closed {len(failures)} of {num_trajectories + num_repeated} episodes,"
        f" {what}; the first: {trajectory.environment} with seed {trajectory.seed} and outcome seed"
        f" {failure['outcome_seed']}: {' '.join(failure[ERROR].split())[:_MAX_REASON]}"
        f"{late_advice(trajectory.environment, failure[ERROR])}"
    )


def check_ends(groups: Sequence[TrajectoryGroup]) -> None:
    """Raise ValueError if an error ended every one of several episodes: nothing is known about a
    policy, and the next ones would end alike.
    """
    num_episodes = sum(len(group.trajectories) for group in groups)
    errors = environment_errors(groups)
    if len(errors) < max(num_episodes, _SEVERAL):
        return
    trajectory, reason = errors[0]
    raise ValueError(
        f"{trajectory.environment} must finish an episode, and an error ended each of"
        f" {num_episodes}; mend it. The first, with seed {trajectory.seed}:"
        f" {' '.join(reason.split())[:_MAX_REASON]}"
    )


def unusable_answers(trajectories: Sequence[Trajectory], remedy: str) -> str | None:
    """Return why half of the answers or more could not be read, and what mends it: the limit of
    answers where it cut half of the unreadable ones, else `remedy`, for answers without the form.
    None if more answers were read.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    unread = [turn for turn in turns if not turn.info.get("is_format_valid")]
    cut = [turn.end - turn.start for turn in unread if turn.info.get("finish_reason") == "length"]
    if not turns or 2 * len(unread) < len(turns):
        return None
    if 2 * len(cut) >= len(unread):
        return (
            f"{len(cut)} of {len(turns)} answers were cut, at {max(cut)} tokens at most, and lack"
            " the form that counts; raise --max-response-length, and"
            " --max-context-length where that is full"
        )
    also = f" ({len(cut)} of them were cut)" if cut else ""
    return f"{len(unread)} of {len(turns)} answers do not have the form that counts{also}; {remedy}"


def why_solved(name: str, trajectories: Sequence[Trajectory]) -> str | None:
    """Say that partial credit counts as success; None where `name` says itself what does."""
    paid = [info[BY_REWARD] for info in map(last_info, trajectories) if BY_REWARD in info]
    if not paid:
        return None
    place = "beside the reward" if is_agent(name) else "in the info of the last step"
    return (
        f"any positive reward counts as success, such as {min(paid):.3g} here; give success {place}"
        " to say what does"
    )


def why_unsolved(trajectories: Sequence[Trajectory], remedy: str) -> str:
    """Return why no episode was solved; `remedy` is for answers without the form."""
    if why := unusable_answers(trajectories, remedy):
        return why
    causes = Counter(map(cause, trajectories))
    if 2 * causes["context"] > len(trajectories):
        return f"{causes['context']} of {len(trajectories)} episodes filled --max-context-length"
    if 2 * causes["budget"] > len(trajectories):
        return (
            f"{causes['budget']} of {len(trajectories)} episodes came to the end of --max-turns or"
            " --max-actions"
        )
    scores = [trajectory.total_reward for trajectory in trajectories]
    return (
        f"answers have the form and are wrong: scores from {min(scores):.3g} to {max(scores):.3g}"
    )


def teach_the_form(config: Sections) -> str:
    """Return the remedy for answers without the form, which a loaded model and a small one learn
    in different ways.
    """
    if config.model.load is None:
        return "raise --warm-start-steps, or lower --temperature"
    shown, imitated = config.environment.prompt_examples, config.warm_start.sft_steps
    if not config.environment.worlds:
        return "state it in the messages of the agent, or let the model imitate it by --sft-steps"
    return (
        f"show it by --prompt-examples {2 * shown or 4}, or let the model imitate it by --sft-steps"
        f" {2 * imitated or 200}"
    )


class PolicyErrors:
    """Finds the actions that end their environment again and again: at least three times in the
    last twenty steps with a failure, more often than they succeed and more than twice as often as
    all others, so that no server is to blame, or by an error of a kind that only values cause.
    """

    def __init__(self) -> None:
        self._steps: deque[_Doings] = deque(maxlen=_STEPS)
        self._told: set[tuple[str, str]] = set()

    def add(self, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Return a line for each environment and action, or kind of error, of which the groups of a
        step are the third witness, and nothing was said yet.
        """
        if not any(FAILED_ACTION in failure for _, failure in failed_attempts(groups)):
            return []
        self._steps.append(_Doings.of(groups))
        failures = [failure for step in self._steps for failure in step.failures]
        done = sum((step.done for step in self._steps), Counter())
        played = sum((step.played for step in self._steps), Counter())
        failed = Counter((name, action) for name, action, _ in failures)
        found: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for name, action, reason in failures:
            key = name, action
            if failed[key] >= _AGAIN_AND_AGAIN and _is_the_actions_own(key, failed, done):
                found.setdefault(key, []).append((f"the action {action}", reason))
            elif reason.removeprefix("RuntimeError: ").partition(":")[0] in _OF_VALUES:
                kind = name, reason.partition(":")[0]
                found.setdefault(kind, []).append((f"answers such as {action}", reason))
        new = {
            key: rows
            for key, rows in found.items()
            if len(rows) >= _AGAIN_AND_AGAIN and key not in self._told
        }
        self._told.update(new)
        return [
            f"the policy causes an error of {name} by {rows[0][0]}: {len(rows)} of the last"
            f" {played[name]} episodes ({rows[0][1][:_MAX_REASON]}); let the environment answer"
            " such an action with an observation and a finite reward, for example a penalty, for"
            " the policy learns nothing from episodes that fail"
            for (name, _), rows in new.items()
        ]


class _Doings(NamedTuple):
    """The actions of the policy in a step."""

    failures: list[tuple[str, str, str]]
    """Environment, action and reason of each failed step of an environment."""
    done: Counter[tuple[str, str]]
    """Environment and action -> steps that did not fail."""
    played: Counter[str]
    """Environment -> episodes."""

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> Self:
        attempts = list(failed_attempts(groups))
        members = [trajectory for group in groups for trajectory in group.trajectories]
        played = Counter(trajectory.environment for trajectory in members)
        played.update(trajectory.environment for trajectory, _ in attempts)
        played.subtract(trajectory.environment for trajectory, _ in environment_errors(groups))
        return cls(
            [
                (
                    trajectory.environment,
                    _name(failure[FAILED_ACTION]),
                    " ".join(failure[ERROR].split()),
                )
                for trajectory, failure in attempts
                if FAILED_ACTION in failure
            ],
            Counter(
                (trajectory.environment, _name(action))
                for trajectory in members
                for turn in trajectory.turns
                for action in turn.info.get("actions", ())
            ),
            played,
        )


def _is_the_actions_own(
    key: tuple[str, str], failed: Counter[tuple[str, str]], done: Counter[tuple[str, str]]
) -> bool:
    """Return whether the action fails more often than it succeeds, and the other actions of its
    environment fail less than half as often.
    """
    others = [
        sum(count for other, count in counts.items() if other[0] == key[0] and other != key)
        for counts in (failed, done)
    ]
    share = failed[key] / (failed[key] + done[key])
    return share > 0.5 and share > 2 * others[0] / max(1, sum(others))


def _name(action: Any) -> str:
    """Return the action in words; for a tool call the tool alone, since its arguments vary."""
    if isinstance(action, Mapping):
        action = action.get("name", json.dumps(action, default=str))
    return repr(str(action)[:_MAX_ACTION])
