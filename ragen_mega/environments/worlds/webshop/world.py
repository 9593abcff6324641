"""WebShop: given an instruction, search a shop's catalogue, open a product, choose its options and
buy it; the purchase is scored by how well it fits.

Source: WebShop (arXiv:2207.01206) in its text mode, as RAGEN plays it: one action per turn,
searches only from the start page; an action that the page does not offer changes nothing.
"""

import random
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from ragen_mega.environments.protocol import StepResult, check_seed
from ragen_mega.environments.worlds.webshop import pages
from ragen_mega.environments.worlds.webshop.catalogue import Goal, Product
from ragen_mega.environments.worlds.webshop.data_folder import GoalKind
from ragen_mega.environments.worlds.webshop.narrator import NARRATOR
from ragen_mega.environments.worlds.webshop.pages import Page
from ragen_mega.environments.worlds.webshop.players import SOLVER, keywords
from ragen_mega.environments.worlds.webshop.reward import reward
from ragen_mega.environments.worlds.webshop.shop import Shop, folder_shop, generated_shop
from ragen_mega.system.paths import expanded

Split = Literal["train", "validation", "test"]

_ACTION = re.compile(r"(search|click)\[(.+)\]")


class WebShop:
    """An episode ends with a purchase; success is a score of 1."""

    is_instant = True
    narrator = NARRATOR
    solver = SOLVER
    splits = get_args(Split)
    max_turns = 9
    answer_format = "<answer> [search[words] or click[what the page shows]] </answer>"
    instruction = (
        "You are shopping in a web shop. Find a product that fits the instruction, choose the"
        " options that it asks for, and buy it.\nYour available actions are:\nsearch[words], on the"
        " page that you start from; click[x], where x is a button, the identifier of a product or"
        " the value of an option, as the page shows it. click[Buy Now] ends the shopping."
    )

    def __init__(
        self,
        *,
        data: str | None = None,
        goals: GoalKind = "synthetic",
        num_products: int = 2000,
        departments: int = 6,
        catalogue_seed: int = 0,
        reward: Literal["score", "success"] = "score",
        split: Split = "train",
    ) -> None:
        """`data`: folder of WebShop's files; without it the catalogue is generated, with
        `num_products` of the first `departments` departments. `reward`: the score of a purchase, or
        1 for a full score and 0 otherwise.
        """
        if data is not None:
            self.shop: Shop = folder_shop(expanded(data), goals, catalogue_seed)
        elif goals == "human":
            raise ValueError("goals human are in WebShop's own files; name their folder in data")
        else:
            self.shop = generated_shop(num_products, departments, catalogue_seed)
        self._goals: tuple[Goal, ...] = getattr(self.shop.goals, split)
        self.num_tasks = len(self._goals)
        self._pays_score = reward == "score"
        self._goal: Goal | None = None
        self._hits: Sequence[Product] = ()
        self._number = 1
        self._product: Product | None = None
        self._chosen: dict[str, str] = {}
        self._page: Page | None = None

    def reset(self, seed: int) -> str:
        return self.enter(self._goals[check_seed(seed) % self.num_tasks])

    def enter(self, goal: Goal) -> str:
        """Start an episode with this goal."""
        self._goal = goal
        return self._open_start().text

    def step(self, action: str) -> StepResult:
        page, chosen = self.page, self._chosen
        if page.kind == "done":
            raise RuntimeError("the purchase is made; call reset before the next step")
        match = _ACTION.match(action.strip().lower())
        # The original's (.+)\[(.+)\] takes the last pair, in time that is quadratic in brackets.
        is_valid = match is not None and "[" not in match[2][:-1] and self._do(*match.groups())
        is_done = self.page.kind == "done"
        score = self.score if is_done else 0.0
        is_success = score >= 1.0
        info = {
            "success": is_success,
            "score": score,
            "is_action_valid": is_valid,
            "is_action_effective": self.page != page or self._chosen != chosen,
        }
        paid = score if self._pays_score else float(is_success)
        return StepResult(self.page.text, paid, is_done, False, info)

    def random_answer(self, generator: random.Random) -> str:
        """Draw one of the clicks that the open page offers; on the start page, a search for all
        keywords or, as likely, for a random part of the keywords.
        """
        if self.page.kind != "start":
            return f"click[{generator.choice(self.page.clickable)}]"
        words = keywords(self.goal) or [self.goal.instruction]
        if generator.random() < 0.5:
            places = sorted(generator.sample(range(len(words)), generator.randint(1, len(words))))
            words = [words[place] for place in places]
        return f"search[{' '.join(words)}]"

    @property
    def vocabulary(self) -> list[str]:
        """Texts that are one token each for the small model: the parts that make up the pages."""
        return self.shop.vocabulary

    def facts(self) -> dict[str, Any]:
        """`goal`, `page`, `product` (None: none is open), `chosen` options and `hits`."""
        return {
            "goal": self.goal,
            "page": self.page,
            "product": self._product,
            "chosen": dict(self._chosen),
            "hits": self._hits,
        }

    @property
    def goal(self) -> Goal:
        """The goal of this episode."""
        if self._goal is None:
            raise RuntimeError("no goal yet; call reset first")
        return self._goal

    @property
    def page(self) -> Page:
        """The page that is open."""
        if self._page is None:
            raise RuntimeError("no page is open yet; call reset first")
        return self._page

    @property
    def product(self) -> Product:
        """The product that is open."""
        if self._product is None:
            raise RuntimeError("no product is open; click one first")
        return self._product

    @property
    def score(self) -> float:
        """The score of buying the open product with the options chosen so far."""
        return reward(self.goal, self.product, self._chosen)

    def _do(self, kind: str, argument: str) -> bool:
        """Do an action; False, without a change, if the page does not offer it."""
        page = self.page
        if kind == "search" and page.kind == "start":
            self._hits = self.shop.engine.search(argument)
            self._open_results(1)
        elif kind == "click" and (button := _spelled(argument, page.buttons)):
            self._press(button)
        elif kind == "click" and (
            asin := _spelled(argument, [product.asin for product in page.products])
        ):
            self._product = self.shop.products[asin]
            self._open_item()
        elif kind == "click" and page.option_names and argument in page.option_names:
            self._chosen = self._chosen | {page.option_names[argument]: argument}
            self._open_item()
        else:
            return False
        return True

    def _press(self, button: str) -> None:
        kind = self.page.kind
        if button == pages.BACK:
            self._open_start()
        elif button == pages.BUY:
            self._page = pages.done_page(self.product, self._chosen, self.score)
        elif button in pages.SUB_PAGES:
            self._page = pages.sub_page(self.goal, self.product, button)
        elif kind == "sub":
            self._open_item()
        elif kind == "item":
            self._open_results(self._number)
        else:
            self._open_results(self._number + (1 if button == pages.NEXT else -1))

    def _open_start(self) -> Page:
        self._hits, self._product, self._chosen = (), None, {}
        self._page = pages.start_page(self.goal)
        return self._page

    def _open_results(self, number: int) -> None:
        self._number, self._product, self._chosen = number, None, {}
        self._page = pages.results_page(self.goal, self._hits, number)

    def _open_item(self) -> None:
        self._page = pages.item_page(self.goal, self.product)


def _spelled(argument: str, names: Sequence[str]) -> str | None:
    """Return the name that lower-case `argument` spells."""
    return next((name for name in names if name.lower() == argument), None)
