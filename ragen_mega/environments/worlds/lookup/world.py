"""Lookup: ask one person after another until somebody knows a code, and say the code.

    What is the code? Ann may know.         Ann
    Ann says: Tom knows more.               Tom
    Tom says: the code is 407.              407

Success takes several turns, and a later turn depends on what an earlier one brought to light. The
names and the code differ from episode to episode, so that no answer can be learned by heart.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

from ragen_mega.environments.actions import same_word
from ragen_mega.environments.protocol import (
    Budget,
    References,
    Solver,
    StepResult,
    check_seed,
    stable_seed,
)

PEOPLE = (
    "Ann",
    "Tom",
    "Mia",
    "Ben",
    "Zoe",
    "Sam",
    "Eva",
    "Max",
    "Lea",
    "Jon",
    "Ida",
    "Leo",
    "Amy",
    "Kim",
    "Pat",
    "Roy",
)
_EXAMPLE_PEOPLE = ("Bob", "Una", "Kai", "Joy", "Gus", "Fay", "Lou", "Meg", "Ned", "Sue")
_CODES = (100, 999)


@dataclass(frozen=True, slots=True)
class Hint:
    """Answer of one person of the chain."""

    named: tuple[str, ...]
    """People who are said to know more, in the order in which they are named."""
    knows: str
    """Person among them who does."""


def references(environment: "Lookup", budget: Budget) -> References:
    """Return the rates of a player who says any name or number that was heard, drawn uniformly, and
    of one who asks those that were named and not asked yet.

    A person who does not know costs the latter a turn, in half of the cases for each link that
    names one.
    """
    turns, sizes = budget.action_budget, [len(link.named) for link in environment.chain]
    reached = [1.0] + [0.0] * (len(sizes) + 1)  # by the number of right answers so far
    for _ in range(turns):
        for place in reversed(range(len(sizes) + 1)):
            heard = sum(sizes[: place + 1]) + (place == len(sizes))
            moves = reached[place] / heard
            reached[place] -= moves
            reached[place + 1] += moves
    forks, spare = sum(size > 1 for size in sizes), turns - len(sizes) - 1
    best = sum(math.comb(forks, wrong) for wrong in range(min(forks, spare) + 1)) / 2**forks
    return References(random=reached[-1], optimum=best, optimum_closed_loop=best)


def optimal_actions(environment: "Lookup", actions_left: int) -> list[str]:
    """Return the first person who was named last and not asked yet, or the code once it was heard;
    nothing once it was said.
    """
    facts = environment.facts()
    if environment.is_over:
        return []
    if facts["code"] in facts["heard"]:
        return [facts["code"]]
    link = environment.chain[environment.num_told]
    return [name for name in link.named if name not in facts["asked"]][:1]


class Lookup:
    """Asking people in the order of the chain reveals the code; saying it ends the episode.

    Each person who is asked for the first time and knows something pays `piece_reward`, the code
    pays 1. The budget of turns leaves one mistake.
    """

    is_instant = True
    is_hidden = True
    max_turns: int
    max_actions: int
    max_actions_per_turn = 1
    solver = Solver(references, optimal_actions)
    # Nobody who is asked in an episode, and a chain that shows the form alone.
    example_options = (
        {"people": _EXAMPLE_PEOPLE, "min_people": 1, "max_people": 1, "dead_ends": 0},
    )

    def __init__(
        self,
        *,
        min_people: int = 3,
        max_people: int = 3,
        dead_ends: int = 0,
        piece_reward: float = 0.3,
        people: tuple[str, ...] = PEOPLE,
    ) -> None:
        """`min_people`, `max_people`: length of the chain, drawn uniformly. `dead_ends`: people in
        an episode who are named beside the right one and do not know, at most one a link.

        Raises ValueError for an impossible chain and for too few people.
        """
        if not 1 <= min_people <= max_people:
            raise ValueError(
                "a chain needs 1 <= min_people <= max_people, not"
                f" min_people {min_people} and max_people {max_people}"
            )
        if not 0 <= dead_ends <= min_people:
            raise ValueError(
                f"dead_ends ({dead_ends}) must be from 0 to min_people ({min_people}), at most one"
                " beside each person who knows"
            )
        if len(set(map(same_word, people))) < max(len(people), max_people + dead_ends):
            raise ValueError(
                f"people must be at least max_people + dead_ends = {max_people + dead_ends}"
                f" different names, not {', '.join(people)}"
            )
        self._lengths, self._dead_ends = (min_people, max_people), dead_ends
        self._people, self._piece_reward = people, piece_reward
        self.max_turns = self.max_actions = max_people + dead_ends + 2
        self.instruction = (
            "Find out a secret code. People know who knows it. Answer with the name of a person to"
            " ask, or with the code once you have heard it."
        )
        self.chain: list[Hint] = []
        self.is_over = True
        """Whether no episode is running."""
        self._code = ""
        self._asked: set[str] = set()

    @property
    def difficulty(self) -> int:
        """Number of people to ask, and of those who do not know."""
        return sum(len(link.named) for link in self.chain)

    def reset(self, seed: int) -> str:
        draw = random.Random(stable_seed(check_seed(seed), "lookup"))
        length = draw.randint(*self._lengths)
        names = draw.sample(self._people, length + self._dead_ends)
        forks = set(draw.sample(range(length), self._dead_ends))
        self.chain = []
        for place in range(length):
            named = [names.pop() for _ in range(2 if place in forks else 1)]
            self.chain.append(Hint(tuple(draw.sample(named, len(named))), named[0]))
        self._code = str(draw.randint(*_CODES))
        self._asked, self.is_over = set(), False
        return f"What is the code? {self._hint(0, 'may know')}"

    def step(self, action: str) -> StepResult:
        if self.is_over:
            raise RuntimeError("the code has been said; call reset before the next step")
        said = same_word(action).strip(" .!")
        if said == self._code and self.num_told == len(self.chain):
            self.is_over = True
            return self._result("Right.", 1.0, success=True)
        for place, link in enumerate(self.chain[: self.num_told + 1]):
            for name in link.named:
                if said == same_word(name):
                    return self._ask(place, name)
        return self._result(f"Nobody called {action.strip()[:20]} is here.", 0.0)

    def _ask(self, place: int, name: str) -> StepResult:
        link, is_new = self.chain[place], name not in self._asked
        self._asked.add(name)
        if name != link.knows:
            return self._result(f"{name} says: I do not know.", 0.0)
        says = f"the code is {self._code}."
        if place + 1 < len(self.chain):
            says = self._hint(place + 1, "knows more")
        return self._result(f"{name} says: {says}", self._piece_reward if is_new else 0.0)

    def _hint(self, place: int, verb: str) -> str:
        named = " or ".join(self.chain[place].named)
        return f"{named} {verb if len(self.chain[place].named) == 1 else 'may know'}."

    def _result(self, text: str, reward: float, *, success: bool = False) -> StepResult:
        info = {"success": success, "is_action_effective": reward > 0}
        return StepResult(text, reward, terminated=success, info=info)

    @property
    def num_told(self) -> int:
        """Number of people of the chain who have told what they know."""
        return sum(link.knows in self._asked for link in self.chain)

    @property
    def heard(self) -> list[str]:
        """Names that were named, and the code once it was."""
        found = [name for link in self.chain[: self.num_told + 1] for name in link.named]
        return found + [self._code] * (self.num_told == len(self.chain))

    def random_answer(self, draw: random.Random) -> str:
        """Return a name or a number that the conversation has brought up, drawn uniformly."""
        return draw.choice(self.heard)

    def facts(self) -> dict[str, Any]:
        """`heard`, `asked` (lists of names) and `code`."""
        return {"heard": self.heard, "asked": sorted(self._asked), "code": self._code}
