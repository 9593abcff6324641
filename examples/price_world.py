r"""The task of price_agent.py as an environment: the same prices, tools and answers.

In this folder:

    ragen-mega train --environments price_world:Prices --no-think \
        --warm-start-skill 0.7 --warm-start-first-turn-steps 0 --warm-start-steps 600 \
        --warm-start-trajectories 2048 \
        --advantage-estimator grpo --filter-strategy none \
        --max-context-length 640 --max-response-length 48 --num-groups 16 \
        --group-size 8 --minibatch-size 128 --num-steps 100 --lr 3e-4 \
        --eval-interval 50 --eval-prompts 64 --eval-samples 4
"""

import json
import random

from price_agent import FRUITS, TOOLS

from ragen_mega.environments.protocol import References, Solver


def next_answer(asked: list[str], results: list[int]) -> str | dict:
    """Return the ideal answer after these results of tools: a call, or the sum."""
    if len(results) < 2:
        return {"name": "search", "arguments": {"fruit": asked[len(results)]}}
    if len(results) == 2:
        return {"name": "add", "arguments": dict(zip("ab", results, strict=True))}
    return str(results[2])


class Prices:
    """Look two prices up, add them, and say the sum."""

    tools = TOOLS
    max_turns = 6
    max_actions_per_turn = 1
    max_actions = 6
    format_penalty = 0.0

    def reset(self, seed: int) -> list[tuple[str, str]]:
        draw = random.Random(seed)
        self.prices = {fruit: draw.randint(1, 9) for fruit in FRUITS}
        self.asked = draw.sample(FRUITS, 2)
        self.results: list[int] = []
        return [("user", f"{self.asked[0]} and {self.asked[1]}?")]

    def parse(self, text: str) -> str | dict:
        """Read an answer: a call of a tool; any other text is the sum."""
        before, _, call = text.strip().partition("<tool_call>")
        try:
            return json.loads(call.removesuffix("</tool_call>")) if call else before
        except ValueError:
            return text

    def step(self, action: str | dict) -> tuple:
        if isinstance(action, str):
            is_right = action == str(sum(self.prices[fruit] for fruit in self.asked))
            return "", float(is_right), True, False, {"success": is_right}
        tools = {"search": lambda fruit: self.prices[fruit], "add": lambda a, b: int(a) + int(b)}
        try:
            self.results.append(tools[action["name"]](**action["arguments"]))
        except (KeyError, TypeError, ValueError):
            return [("tool", "error")], 0.0, False, False, {}
        return [("tool", str(self.results[-1]))], 0.0, False, False, {}

    def random_answer(self, draw: random.Random) -> str:
        """Return the ideal answer to this turn in another episode."""
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        answer = next_answer(draw.sample(FRUITS, 2), [a, b, a + b][: len(self.results)])
        return (
            answer
            if isinstance(answer, str)
            else f"<tool_call>\n{json.dumps(answer)}\n</tool_call>"
        )

    solver = Solver(
        references=lambda world, budget: References(None, 1.0, 1.0),
        optimal_actions=lambda world, left: [next_answer(world.asked, world.results)],
    )
