"""WebShop: pages, actions and rewards against strings and numbers that were written down from the
original by hand, the user's files, and the players.
"""

import copy
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.protocol import Budget
from ragen_mega.environments.worlds.webshop.catalogue import (
    NO_LIMIT,
    Goal,
    Product,
    Request,
    make_goals,
    split_goals,
)
from ragen_mega.environments.worlds.webshop.data_folder import read_folder
from ragen_mega.environments.worlds.webshop.generated import generate_catalogue
from ragen_mega.environments.worlds.webshop.pages import results_page
from ragen_mega.environments.worlds.webshop.players import (
    optimal_actions,
    play,
    references,
)
from ragen_mega.environments.worlds.webshop.reward import reward, title_nouns, type_reward
from ragen_mega.environments.worlds.webshop.search import SearchEngine
from ragen_mega.environments.worlds.webshop.world import WebShop

ROOT = Path(__file__).parents[2]
SHOE = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
CORD = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
OTHER_CORD = (
    "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home"
    " Theater System"
)


def product(**changes: object) -> Product:
    """A product with the values of the original's golden tests."""
    values = {
        "asin": "B000000001",
        "title": SHOE,
        "description": "",
        "bullets": (),
        "query": "query 1",
        "product_category": "a \u203a b \u203a c",
        "attributes": ("tea tree", "essential oil", "natural ingredients"),
        "options": {},
        "price": 35.0,
        "price_text": "$35.0",
    }
    return Product(**values | changes)


GOAL = Goal(
    asin="B000000001",
    title=SHOE,
    query="query 1",
    product_category="a \u203a b \u203a c",
    instruction="",
    attributes=("tea tree", "essential oils", "natural ingredients"),
    options=(("color", "grey"), ("size", "XL")),
    price_limit=40.0,
)
CHOSEN = {"color": "grey", "size": "XL"}
BARE = product(
    attributes=(), description="Best shampoo on the market, made with natural ingredients"
)


# The original's tests of its reward (tests/web-agent-site/engine/test_goal.py).


def test_golden_rewards() -> None:
    assert reward(GOAL, product(), CHOSEN) == 1.0
    assert reward(GOAL, BARE, CHOSEN) == pytest.approx(2 / 3)
    more = replace(GOAL, options=(*GOAL.options, ("amount", "pack of 12")))
    assert reward(more, BARE, CHOSEN) == pytest.approx(0.5714, abs=1e-4)
    other_type = replace(BARE, title=OTHER_CORD, query="query 2", product_category="a \u203a d")
    assert reward(replace(more, title=CORD), other_type, CHOSEN) == pytest.approx(0.2857, abs=1e-4)


def test_people_ask_for_values_and_synthetic_goals_for_pairs() -> None:
    values = ("grey", "XL", "pack of 12")
    for options in (values, tuple(zip(("color", "size", "amount"), values, strict=True))):
        goal = replace(GOAL, attributes=("tea tree",), options=options)
        bought = [reward(goal, product(), dict(enumerate(values))) for values in (
            ("pack of 12", "grey", "XL"), ("pack of 12", "blue", "XL"), ()
        )]  # fmt: skip
        assert bought == pytest.approx([5 / 5, 4 / 5, 2 / 5])


def test_a_price_over_the_limit_and_other_colours_cost_their_share() -> None:
    assert reward(GOAL, product(price=40.0), CHOSEN) == 1.0
    assert reward(GOAL, product(price=40.01), CHOSEN) == pytest.approx(5 / 6)
    navy = replace(GOAL, options=("navy stripes",))
    assert reward(navy, product(), {"color": "navy dots"}) == 1.0  # both are navy
    assert reward(navy, product(), {"color": "red stripes"}) == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("goal_title", "title", "shared"),
    [
        ("adidas Unisex-Adult D.o.n. Issue 2 Basketball Shoe",
         "adidas Unisex-Adult D.o.n. Issue 2 Indoor Court Shoe", 0.85),
        (CORD + " Home Theater System Subwoofer", OTHER_CORD, 0.31),
        (CORD, OTHER_CORD, 0.17),
        ("Rusticware 921ORB Kitchen and Bath Cabinet Knob",
         "Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup"
         " Tweezers (Silver)", 0.0),
    ],
)  # fmt: skip
def test_nouns_share_what_the_original_measured(goal_title: str, title: str, shared: float) -> None:
    wanted = title_nouns(goal_title)
    assert len(set(wanted) & set(title_nouns(title))) / len(wanted) == pytest.approx(
        shared, abs=1e-2
    )


@pytest.mark.parametrize(
    ("query", "category", "title", "expected"),
    [
        ("query 1", "d", SHOE, 1.0),  # the same query
        ("query 2", "b \u203a c \u203a a", SHOE, 1.0),  # two parts of the category, in any order
        ("query 2", "a \u203a a \u203a d", SHOE, 1.0),  # one part, but the title is alike
        ("query 1", "a \u203a b \u203a c", "Kitchen Knob", 0.0),  # no noun is shared
    ],
)
def test_type_reward(query: str, category: str, title: str, expected: float) -> None:
    bought = product(query=query, product_category=category, title=title)
    assert type_reward(GOAL, bought) == expected


# Pages, as section 5 of the reference writes them down.

MUG = product(
    asin="B07XYZ1234",
    title="blue stone mug",
    description="A mug.",
    bullets=("holds tea", "dishwasher safe"),
    query="mug",
    attributes=("dishwasher safe",),
    options={"color": ("blue", "dark red"), "size": ("8 oz",)},
    price=12.5,
    price_text="$12.5",
)
HEAD = "Instruction: [SEP] i need a mug with color: blue, and size: 8 oz, and price lower than"


class OneShop:
    """A shop with one product and twelve others."""

    def __init__(self) -> None:
        others = [
            replace(MUG, asin=f"B0{number:08}", title=f"grey mug {number}", options={})
            for number in range(12)
        ]
        self.products = {one.asin: one for one in (MUG, *others)}
        self.engine = SearchEngine(list(self.products.values()))
        (goal,) = [
            goal
            for goal in make_goals(
                [(MUG, [Request("i need a mug", ("dishwasher safe",), None)])], seed=0
            )
            if goal.options == (("color", "blue"), ("size", "8 oz"))
        ]
        self.goal = goal
        self.limit = f"{goal.price_limit:.2f} dollars"


@pytest.fixture(scope="module")
def generated() -> WebShop:
    return WebShop(num_products=400, departments=2)


@pytest.fixture
def shopper(generated: WebShop) -> WebShop:
    """A shopper in front of the mugs."""
    shop = OneShop()
    environment = WebShop(num_products=400, departments=2)
    environment.shop = shop
    environment.enter(shop.goal)
    return environment


def head(shopper: WebShop) -> str:
    return f"{HEAD} {shopper.shop.limit} [SEP] "


def test_pages(shopper: WebShop) -> None:
    start = f"WebShop [SEP] {head(shopper)}Search"
    assert shopper.page.text == start
    results = shopper.step("search[blue stone mug]").observation
    assert results.startswith(
        f"{head(shopper)}Back to Search [SEP] Page 1 (Total results: 13) [SEP] Next > [SEP]"
        " B07XYZ1234 [SEP] blue stone mug [SEP] $12.5 [SEP] B000000000 [SEP] grey mug 0 [SEP] $12.5"
    )
    assert results.count("$12.5") == 10
    second = shopper.step("click[Next >]").observation
    assert second.startswith(
        f"{head(shopper)}Back to Search [SEP] Page 2 (Total results: 13) [SEP] < Prev [SEP] Next >"
        " [SEP] B0"
    )
    assert second.count("$12.5") == 3
    assert shopper.step("click[< Prev]").observation == results
    item = (
        f"{head(shopper)}Back to Search [SEP] < Prev [SEP] color [SEP] blue [SEP] dark red [SEP]"
        " size [SEP] 8 oz [SEP] blue stone mug [SEP] Price: $12.5 [SEP] Rating: N.A. [SEP]"
        " Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert shopper.step("click[b07xyz1234]").observation == item
    for button, text in (
        ("Description", " [SEP] A mug."),
        ("Features", " [SEP] holds tea [SEP] dishwasher safe"),
        ("Reviews", ""),
    ):
        opened = shopper.step(f"click[{button}]").observation
        assert opened == f"{head(shopper)}Back to Search [SEP] < Prev{text}"
        assert shopper.step("click[< Prev]").observation == item
    for value in ("dark red", "blue", "8 oz"):  # chosen options are not shown
        assert shopper.step(f"click[{value}]").observation == item
    done = shopper.step("click[Buy Now]")
    assert done.observation == (
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk"
        " interface.) [SEP] Purchased [SEP] asin [SEP] B07XYZ1234 [SEP] options [SEP]"
        ' {"color": "blue", "size": "8 oz"} [SEP] attrs [SEP] None [SEP] category [SEP] None [SEP]'
        " query [SEP] None [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options"
        " [SEP] attrs [SEP] price upper [SEP] instuction text [SEP] category [SEP] product category"
        " [SEP] query [SEP] Goal [SEP] None [SEP] Reward [SEP] Your score (min 0.0, max 1.0) [SEP]"
        " 1.0 [SEP] Reward Details [SEP] None"
    )
    assert (done.reward, done.terminated, done.info["success"]) == (1.0, True, True)
    with pytest.raises(RuntimeError, match="call reset"):
        shopper.step("click[Buy Now]")


def test_a_page_behind_the_last_is_empty() -> None:
    text = results_page(GOAL, [MUG], 2).text
    assert text.endswith("Page 2 (Total results: 1) [SEP] < Prev [SEP] Next >")


@pytest.mark.parametrize(
    "action",
    ["", "blue", "search", "search[]", "click[]", "click[search]", "click[buy now]", "buy[mug]"]
    + ["click[b07xyz1234]", "click[blue]", "click blue]", "[mug]", "search mug", "\n"],
)
def test_what_the_page_does_not_offer_changes_nothing(shopper: WebShop, action: str) -> None:
    before = shopper.page.text
    result = shopper.step(action)
    assert (result.observation, result.reward, result.terminated) == (before, 0.0, False)
    assert not result.info["is_action_valid"] and not result.info["is_action_effective"]


def test_actions_are_read_as_the_original_reads_them(
    shopper: WebShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern of its `parse_action`, which is quadratic in the brackets of an answer."""
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(shopper, "_do", lambda *parts: done.append(parts) or True)
    pieces = [*"[[]]a\n ", "search", "search[", "click["]
    drawn = random.Random(0)
    for _ in range(20_000):
        action = "".join(drawn.choices(pieces, k=drawn.randint(1, 8)))
        match = re.match(r"(.+)\[(.+)\]", action.strip())
        known = [match.groups()] if match and match[1] in ("search", "click") else []
        done.clear()
        assert shopper.step(action).info["is_action_valid"] == bool(known), action
        assert done == known, action
    for brackets in ("[" * 100_000, "search[" * 100_000, "click[" + "[]" * 100_000):
        assert not shopper.step(brackets).info["is_action_valid"]  # in milliseconds, not minutes


def test_the_grammar_is_greedy_and_takes_any_case(shopper: WebShop) -> None:
    assert not shopper.step("search[blue [stone] mug]").info["is_action_valid"]  # `search[blue `
    assert shopper.step(" SEARCH[blue stone mug] please").info["is_action_valid"]
    assert not shopper.step("search[mug]").info["is_action_valid"]  # from the start page alone
    assert shopper.step("click[B07XYZ1234]").info["is_action_valid"]
    assert shopper.step("CLICK[Dark Red]").info["is_action_effective"]
    assert not shopper.step("click[dark red]").info["is_action_effective"]  # chosen already
    assert shopper.facts()["chosen"] == {"color": "dark red"}
    assert shopper.step("click[description]").info["is_action_valid"]
    assert not shopper.step("click[buy now]").info["is_action_valid"]  # not on this page


def test_going_back_forgets_the_options(shopper: WebShop) -> None:
    shopper.step("search[stone mug]")
    for leave in ("click[< Prev]", "click[Back to Search]"):
        shopper.step("click[b07xyz1234]")
        shopper.step("click[blue]")
        assert shopper.facts()["chosen"] == {"color": "blue"}
        shopper.step(leave)
        assert shopper.facts()["chosen"] == {}
    assert shopper.page.kind == "start"
    assert shopper.step("search[nothing like it]").observation.endswith(
        "Page 1 (Total results: 0) [SEP] Next >"
    )


# Search.


def test_search_ranks_by_lucenes_formula() -> None:
    texts = ["red tea", "red red tea pot", "tea tea tea", "green kettle of the pots"]
    products = [
        product(asin=str(number), title=text, bullets=()) for number, text in enumerate(texts)
    ]
    found = [one.asin for one in SearchEngine(products).search("The Red POTS")]

    def score(words: list[str], frequencies: dict[str, int]) -> float:
        total = 0.0
        for word in ("red", "pot"):
            count, holding = words.count(word), frequencies[word]
            idf = np.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            length = len(words) / np.mean([2, 4, 3, 3])
            total += idf * count / (count + 0.9 * (1 - 0.4 + 0.4 * length))
        return total

    stems = [["red", "tea"], ["red", "red", "tea", "pot"], ["tea"] * 3, ["green", "kettl", "pot"]]
    frequencies = {word: sum(word in one for one in stems) for word in ("red", "pot")}
    scores = {str(number): score(one, frequencies) for number, one in enumerate(stems)}
    assert found == sorted((a for a in scores if scores[a] > 0), key=scores.get, reverse=True)


# Goals.


def test_goals_cover_every_combination_and_can_be_afforded() -> None:
    offers = product(options={"size": ("s", "m"), "color": ("red", "blue", "grey")}, price=29.0)
    goals = make_goals([(offers, [Request("i need it", ("x",), None)])], seed=0)
    assert {goal.options for goal in goals} == {
        (("color", color), ("size", size)) for color in ("red", "blue", "grey") for size in "sm"
    }
    (limit,) = {goal.price_limit for goal in goals}
    assert limit in (40.0, 50.0, 60.0)  # the larger of two of 30, 40, 50 and 60
    assert goals[0].instruction == (
        f"i need it with color: {goals[0].options[0][1]}, and size: {goals[0].options[1][1]}, and"
        f" price lower than {limit:.2f} dollars"
    )
    limits = {
        make_goals([(offers, [Request("it", ("x",), ())])], seed=seed)[0].price_limit
        for seed in range(50)
    }
    assert limits == {40.0, 50.0, 60.0}


def test_a_goal_that_costs_more_than_any_limit_states_none() -> None:
    for price, text, limit in ((985.0, "it", NO_LIMIT), (979.0, "it, and price lower than 990.00"
                               " dollars", 990.0)):  # fmt: skip
        (goal,) = make_goals([(product(price=price), [Request("it", ("x",), ())])], seed=0)
        assert (goal.instruction, goal.price_limit) == (text, limit)


def test_splits_are_ragens() -> None:
    goals = [replace(GOAL, asin=str(number)) for number in range(1600)]
    splits = split_goals(goals)
    assert splits.test == tuple(goals[:500])
    assert splits.validation == tuple(goals[500:1500])
    assert splits.train == tuple(goals[1500:])
    with pytest.raises(ValueError, match="1500 goals.*has 1500"):
        split_goals(goals[:1500])


def test_the_generated_catalogue_is_a_function_of_its_seed() -> None:
    first, again, other = (
        list(generate_catalogue(num_products=50, num_departments=3, seed=s)) for s in (1, 1, 2)
    )
    assert first == again != other
    assert len({one.asin for one, _ in first}) == len({one.title for one, _ in first}) == 50
    for bad in ({"num_products": 0}, {"num_products": 10**6}, {"num_departments": 7}):
        with pytest.raises(ValueError, match="not"):
            list(generate_catalogue(**{"num_products": 5, "num_departments": 1, "seed": 0} | bad))


# Players.


def test_the_random_player_searches_for_a_request_without_keywords(shopper: WebShop) -> None:
    shopper.enter(replace(shopper.goal, instruction="i need it"))
    assert shopper.random_answer(random.Random(0)) == "search[i need it]"


def test_the_oracle_needs_five_turns(generated: WebShop) -> None:
    generated.reset(0)
    before = generated.page
    assert references(generated, Budget(5, 1, 5)).optimum == 1.0
    assert references(generated, Budget(4, 1, 4)).optimum == 0.0
    assert generated.page is before


def test_a_longer_episode_needs_one_flag() -> None:
    shopper = WebShop(num_products=400, departments=2)
    for config, turns in ((EpisodeConfig(), 9), (EpisodeConfig(max_turns=15), 15)):
        assert config.budget(shopper).action_budget == turns


def test_the_oracle_searches_a_title_with_brackets(shopper: WebShop) -> None:
    shopper.enter(replace(shopper.goal, title="Blue [Stone] Mug"))
    assert play(shopper, lambda one: optimal_actions(one, 0)[0], 5) == 1.0


@pytest.mark.parametrize(
    ("options", "asked", "best"),
    [
        # Where two options share a value, a click chooses it for the later one.
        ({"color": ("red", "blue"), "trim": ("red", "green")}, {"color": "red", "trim": "red"}, 1),
        ({"color": ("red", "blue"), "trim": ("red", "green")}, {"color": "red", "trim": "green"},
         3 / 4),
        # `click[red [matte]]` chooses nothing.
        ({"color": ("red [matte]", "blue"), "size": ("xl",)}, {"color": "red [matte]",
         "size": "xl"}, 3 / 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_the_oracle_buys_where_not_all_options_can_be_chosen(
    shopper: WebShop, options: dict, asked: dict, best: float, kind: str
) -> None:
    """The best score belongs to the best of all purchases of this product, tried one by one."""
    wanted = tuple(asked.items()) if kind == "synthetic" else tuple(asked.values())
    mug = replace(MUG, options=options)
    shopper.shop.products[mug.asin] = mug
    shopper.shop.engine = SearchEngine(list(shopper.shop.products.values()))
    shopper.enter(replace(shopper.goal, options=wanted))
    assert play(shopper, lambda one: optimal_actions(one, 0)[0], 5) == pytest.approx(best)
    shopper.step("search[blue stone mug]")
    shopper.step(f"click[{mug.asin}]")
    values = [value for of in options.values() for value in of]
    scores = []
    for clicks in itertools.product(values, repeat=2):
        other = copy.copy(shopper)
        for value in clicks:
            other.step(f"click[{value}]")
        scores.append(other.score)
    assert max(scores) == pytest.approx(best)


def test_the_oracle_finds_its_way_from_anywhere(generated: WebShop) -> None:
    draw = random.Random(1)
    for seed in range(100):
        generated.reset(seed)
        for _ in range(draw.randrange(12)):
            action = generated.random_answer(draw)
            if "Buy" not in action:
                generated.step(action)
        assert play(generated, lambda one: optimal_actions(one, 0)[0], 15) == 1.0


def test_the_random_player_draws_from_the_page(generated: WebShop) -> None:
    generated.reset(3)
    draw = random.Random(0)
    for _ in range(300):
        action = generated.random_answer(draw)
        if "Buy" not in action:
            assert generated.step(action).info["is_action_valid"], action


def test_the_random_player_searches_for_all_keywords_or_some(shopper: WebShop) -> None:
    draw = random.Random(0)
    searches = [shopper.random_answer(draw) for _ in range(2000)]
    words = ["mug", "color", "blue", "size", "8", "oz"]
    assert 0.5 < searches.count("search[mug color blue size 8 oz]") / 2000 < 0.65
    queries = {tuple(search[len("search[") : -1].split()) for search in searches}
    assert len(queries) == 2 ** len(words) - 1
    assert all(query == tuple(word for word in words if word in query) for query in queries)


def test_the_thought_is_true_and_says_what_is_taken(shopper: WebShop) -> None:
    describe = shopper.narrator.describe
    assert describe(shopper, ["search[mug blue]"]) == "go: some"
    assert describe(shopper, ["search[mug color blue size 8 oz]"]) == "go: all"
    shopper.step("search[blue stone mug]")
    asins = [product.asin for product in shopper.page.products]
    for number, place in ((0, "first"), (1, "second"), (2, "third"), (3, "later"), (9, "later")):
        said = describe(shopper, [f"click[{asins[number]}]"])
        assert said == f"go: {place} {asins[number]}"
    assert describe(shopper, ["click[Next >]"]) == "go: page"
    shopper.step("click[b07xyz1234]")
    offered = "blue offered | 8 oz offered"
    assert describe(shopper, ["click[dark red]"]) == f"{offered} | go: other dark red"
    assert describe(shopper, ["click[8 oz]"]) == f"{offered} | go: offered 8 oz"
    shopper.step("click[blue]")
    bought = describe(shopper, ["click[Buy Now]"])
    assert bought == "blue chosen | 8 oz offered | go: buy"
    shopper.step("click[Features]")
    assert describe(shopper, ["click[< Prev]"]) == "go: page"


def test_the_thought_says_what_a_product_lacks(shopper: WebShop) -> None:
    shopper.step("search[grey mug]")
    shopper.step("click[b000000000]")
    lacking = "blue missing | 8 oz missing"
    assert shopper.narrator.describe(shopper, ["click[Reviews]"]) == f"{lacking} | go: page"


def test_the_thought_leaves_out_what_the_instruction_does_not_say(shopper: WebShop) -> None:
    """Of a person's request the values are known, but only what is visible is told."""
    request = "i need a blue mug, and price lower than 30.00 dollars"
    shopper.enter(replace(shopper.goal, instruction=request, options=("blue", "8 oz")))
    shopper.step("search[blue stone mug]")
    shopper.step("click[b07xyz1234]")
    said = shopper.narrator.describe(shopper, ["click[8 oz]"])
    assert said == "blue offered | go: other 8 oz"


def test_all_that_is_seen_and_said_has_few_tokens(generated: WebShop) -> None:
    """Whatever the size of a generated catalogue, its identifiers are pairs of the same texts."""
    larger = WebShop(num_products=2000, departments=2)
    own = {text for text in generated.vocabulary if len(text) == 5 and text.isalnum()}
    assert own <= set(larger.vocabulary)
    for asin in (*generated.shop.products, *larger.shop.products):
        assert len(asin) == 10 and {asin[:5], asin[5:]} <= own


# The user's files.

ITEM = {
    "asin": "B07XYZ1234",
    "name": "Blue Stone Mug",
    "category": "kitchen",
    "query": " Mug ",
    "product_category": "Home \u203a Kitchen",
    "full_description": None,
    "small_description": ["Holds tea"],
    "pricing": "$10.00 to $1,012.50",
    "customization_options": {
        "Color": [{"value": " Blue/White ", "image": "x"}, {"value": "RED"}],
        "Size": None,
    },
}
ABOUT = {
    "attributes": ["stone"],
    "instruction": "find me a stone mug",
    "instruction_attributes": ["stone"],
}


def write(folder: Path, items: list, about: dict, human: dict | None = None) -> Path:
    (folder / "items_shuffle_1000.json").write_text(json.dumps(items))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(about))
    if human is not None:
        (folder / "items_human_ins.json").write_text(json.dumps(human))
    return folder


def test_the_originals_files(tmp_path: Path) -> None:
    items = [ITEM, ITEM, ITEM | {"asin": "nan"}, ITEM | {"asin": "B1234567890"}]
    items.append(ITEM | {"asin": "B2", "pricing": None, "customization_options": None})
    write(tmp_path, items, {"B07XYZ1234": ABOUT})
    (first, requests), (second, none) = read_folder(tmp_path, goals="synthetic", seed=0)
    assert (first.title, first.query, first.description) == ("Blue Stone Mug", "mug", "")
    assert first.options == {"color": ("blue | white", "red")}
    assert first.price_text == "$10.0 to $1012.5" and 10 <= first.price <= 1012.5
    assert first.attributes == ("stone",)
    assert requests == [Request("find me a stone mug", ("stone",), None)]
    assert (second.price, second.price_text, second.options) == (100.0, "$100.0", {})
    assert second.attributes == ("DUMMY_ATTR",) and none == []


def test_what_people_asked_for(tmp_path: Path) -> None:
    asked = {
        "instruction": "a stone mug.",
        "instruction_attributes": ["stone"],
        "instruction_options": ["red"],
    }
    human = {"B07XYZ1234": [asked, asked | {"instruction_attributes": []}]}
    write(tmp_path, [ITEM], {"B07XYZ1234": ABOUT}, human)
    ((_, requests),) = read_folder(tmp_path, goals="human", seed=0)
    assert requests == [Request("a stone mug", ("stone",), ("red",))]


@pytest.mark.parametrize(
    ("items", "about", "message"),
    [
        ([{k: v for k, v in ITEM.items() if k != "name"}], {},
         "items_shuffle_1000.json, product 0: name .*None"),
        ([ITEM | {"pricing": "cheap"}], {}, "product 0: pricing"),
        ([ITEM | {"pricing": "$ten"}], {}, "product 0: pricing"),
        ([ITEM | {"customization_options": [1]}], {}, "customization_options must be"),
        ([ITEM], {"B07XYZ1234": {"instruction": "it"}}, "B07XYZ1234: instruction_attributes"),
        (["mug"], {}, "product 0: asin"),
        ([ITEM | {"full_description": ["a mug"]}], {}, "product 0: full_description"),
        ([ITEM | {"customization_options": {"Color": 3}}], {}, "options of Color must be"),
        ([ITEM], {"B07XYZ1234": None}, "_v2_1000.json, B07XYZ1234: the entry"),
        ([ITEM], {"B07XYZ1234": {"attributes": None}}, "B07XYZ1234: attributes"),
        ([ITEM], {"B07XYZ1234": ABOUT | {"instruction_attributes": "stone"}},
         "instruction_attributes must be .*, not 'stone'"),
        ({"B07XYZ1234": ITEM}, {}, "items_shuffle_1000.json must hold"),
        ([ITEM], [ABOUT], "items_ins_v2_1000.json must hold"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(
    tmp_path: Path, items: list, about: dict, message: str
) -> None:
    write(tmp_path, items, about)
    with pytest.raises(ValueError, match=message):
        list(read_folder(tmp_path, goals="synthetic", seed=0))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (None, "the entry .*None"),
        (["a mug"], "a request .*'a mug'"),
        ([{"instruction_options": "red"}], "instruction_options must be"),
        ([{"instruction_options": [1]}], "instruction_options must be"),
    ],
)
def test_a_mistake_in_what_people_asked_for_is_named(
    tmp_path: Path, asked: list | None, message: str
) -> None:
    whole = {"instruction": "a mug", "instruction_attributes": ["stone"]}
    requests = asked and [one if isinstance(one, str) else whole | one for one in asked]
    write(tmp_path, [ITEM], {}, {"B07XYZ1234": requests})
    with pytest.raises(ValueError, match=f"items_human_ins.json, B07XYZ1234: {message}"):
        list(read_folder(tmp_path, goals="human", seed=0))


def test_a_file_that_is_not_there_or_cut_off_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="items_shuffle_1000.json.*setup.sh.*princeton-nlp"):
        WebShop(data=str(tmp_path))
    write(tmp_path, [ITEM], {})
    with pytest.raises(ValueError, match="items_human_ins.json"):
        WebShop(data=str(tmp_path), goals="human")
    with pytest.raises(ValueError, match="name their folder"):
        WebShop(goals="human")
    for cut in ('[{"asin": "B1"', ""):
        (tmp_path / "items_shuffle_1000.json").write_text(cut)
        with pytest.raises(ValueError, match="items_shuffle_1000.json .* JSON"):
            WebShop(data=str(tmp_path))
