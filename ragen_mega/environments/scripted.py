"""Scripted players: true thoughts about the state, and actions that are uniformly random unless
`skill` says otherwise.

A thought states facts and relations that the state implies, as the environment's narrator tells
them; it never says which action is best. Reinforcement learning decides how to use the facts.
Without a narrator the thought repeats the observation, shortened.
"""

import textwrap
from collections.abc import Sequence

import numpy as np

from ragen_mega.environments.episode import Episode
from ragen_mega.environments.protocol import Action, Narrator, text_of
from ragen_mega.environments.random_player import is_drawn, random_steps, write_answer
from ragen_mega.environments.reference_players import find_solver

MAX_REPEATED = 120
"""Characters of an observation that a thought repeats."""
_BRACKETS = str.maketrans("<>", "()")  # a repeated tag would end the thought


def scripted_response(
    episode: Episode,
    generator: np.random.Generator,
    *,
    skill: float = 0.0,
    in_sentences: bool = False,
) -> str:
    """Write the scripted player's response in this turn, after a forced `<think>` where the episode
    asks for thoughts; its thought is `in_sentences` where the narrator has any.

    Each action is the optimal one with probability `skill`, else uniformly random.
    """
    environment, config = episode.environment, episode.config
    narrator: Narrator[Action] | None = getattr(environment, "narrator", None)
    # Without a narrator as many as use up the budget, as the random player does.
    per_turn = -(-episode.actions_left // episode.turns_left)
    if narrator is not None:
        per_turn = narrator.actions_per_turn
    count = min(per_turn, episode.budget.max_actions_per_turn, episode.actions_left)
    plan: Sequence[Action] = ()
    if skill > 0:
        plan = find_solver(environment).optimal_actions(environment, episode.actions_left)[:count]
    if skill == 1:  # a solver of a random world plans no further than the next action
        count = len(plan) or count
    actions: list[Action] = []
    for index in range(count if episode.takes_names else 1):
        if index < len(plan) and generator.random() < skill:
            actions.append(plan[index])
        else:
            actions += random_steps(episode, generator)
    answer = write_answer(episode, actions)
    if in_sentences:
        answer = answer.replace("<answer> ", "<answer>", 1)
    if not config.think:
        return answer
    if narrator is None:
        seen = text_of(episode.observation).translate(_BRACKETS)
        thought = f" {textwrap.shorten(seen, MAX_REPEATED, placeholder=' ...')}"
    elif in_sentences and narrator.explain:
        thought = narrator.explain(environment, actions)
    else:
        thought = narrator.describe(environment, actions)
    return f"{thought}</think>{answer}"


def narration_note(name: str, episode: Episode) -> str | None:
    """Return one line if the thoughts about an environment come from no narrator, else None."""
    if not episode.config.think or getattr(episode.environment, "narrator", None) is not None:
        return None
    drawn = "uniformly drawn actions" if is_drawn(episode) else "any word of the observation"
    return (
        f"warm start: {name} has no narrator; cloned are well-formed answers with {drawn}, whose"
        " thought repeats the observation"
    )
