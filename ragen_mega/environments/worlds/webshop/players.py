"""Reference players: the oracle, which knows the product, and the random shopper."""

import copy
import random
import re
from collections.abc import Callable
from typing import Any

from ragen_mega.environments.protocol import Budget, References, Solver
from ragen_mega.environments.worlds.webshop.catalogue import Goal
from ragen_mega.environments.worlds.webshop.pages import BACK, BUY, NEXT, PREVIOUS

_NO_KEYWORDS = frozenset(
    "a an and are for i in is it lower me my need of on or price than that the to want with".split()
)
_RANDOM_EPISODES = 8


def keywords(goal: Goal) -> list[str]:
    """Return the keywords of a request, without its price clause and stop words."""
    request = goal.instruction.rpartition(", and price lower than")[0] or goal.instruction
    return keywords_of(request)


def keywords_of(text: str) -> list[str]:
    """Return distinct words that are no stop words, in lower case and in order."""
    words = re.findall(r"[\w'-]+", text.lower())
    return list(dict.fromkeys(word for word in words if word not in _NO_KEYWORDS))


def optimal_actions(shopper: Any, actions_left: int) -> list[str]:
    """Choose the oracle's action: search the title, open the product, choose its options, buy."""
    facts = shopper.facts()
    goal, page, product, chosen = (facts[key] for key in ("goal", "page", "product", "chosen"))
    if page.kind == "done":
        return []
    if page.kind == "start":
        title = re.sub(r"[][]", " ", goal.title)  # brackets would end the action
        return [f"search[{title}]"]
    if page.kind == "results":
        if goal.asin in page.clickable:
            return [f"click[{goal.asin}]"]
        asins = [hit.asin for hit in facts["hits"]]
        ahead = (
            goal.asin in asins
            and page.products
            and asins.index(goal.asin) > asins.index(page.products[-1].asin)
        )
        return [f"click[{NEXT if ahead else BACK}]"]
    if product.asin != goal.asin or page.kind == "sub":
        return [f"click[{PREVIOUS}]"]
    values = [option if isinstance(option, str) else option[1] for option in goal.options]
    # By the name that a click chooses: options may share a value, and one of them is left as it is.
    wanted = {page.option_names[wish]: wish for wish in values if wish in page.option_names}
    for name, value in wanted.items():
        if chosen.get(name) != value and "[" not in value:  # a bracket would end the action
            return [f"click[{value}]"]
    return [f"click[{BUY}]"]


def play(shopper: Any, choose: Callable[[Any], str], num_actions: int) -> float:
    """Return the score that a player reaches from the open page; 0 if it buys nothing in time. The
    shopper itself is not changed.
    """
    shopper = copy.copy(shopper)  # a step replaces what it changes
    for _ in range(num_actions):
        if shopper.step(choose(shopper)).terminated:
            return shopper.score
    return 0.0


def references(shopper: Any, budget: Budget) -> References:
    """Return the oracle's success, and the success of eight random shoppers."""
    generator = random.Random(shopper.goal.instruction)
    num_actions = budget.action_budget
    bought = [
        play(shopper, lambda world: world.random_answer(generator), num_actions)
        for _ in range(_RANDOM_EPISODES)
    ]
    optimum = float(play(shopper, lambda world: optimal_actions(world, 0)[0], num_actions) >= 1.0)
    success = sum(score >= 1.0 for score in bought) / len(bought)
    return References(success, optimum, optimum, is_exact=False)


SOLVER = Solver(references, optimal_actions)
