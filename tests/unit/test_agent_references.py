"""Reference players of an agent whose ideal answers are known."""

import pytest

from ragen_mega.config import parse
from ragen_mega.rollout.tasks import evaluation_prompts
from ragen_mega.warm_start.agent_play import example_references

SIDES = ("heads", "tails")


def run(task, client):
    side = SIDES[task["seed"] % 2]
    messages = [{"role": "user", "content": f"say {side}"}]
    reply = client.chat.completions.create(model="policy", messages=messages)
    return float(reply.choices[0].message.content == side)


def ideal(messages, tools):
    return messages[0]["content"].removeprefix("say ")


def stubborn(messages, tools):
    return "heads"


@pytest.mark.parametrize("example", ["ideal", "stubborn"])
def test_references_of_an_agent_are_its_example_and_answers_of_other_episodes(example: str) -> None:
    name = f"{__name__}:run"
    limits = ["--no-think", "--max-response-length", "4"]  # tokens of the policy's, not letters
    config = parse(["--agent", name, "--agent-example", f"{__name__}:{example}", *limits])
    prompts = evaluation_prompts(config.environment, f"agent:{name}", 64, None)
    found = example_references(config, f"agent:{name}", prompts)
    num_heads = sum(seed % 2 == 0 for seed, _ in prompts)
    assert found.optimum == (1.0 if example == "ideal" else num_heads / 64)
    # 256 answers, each right with probability 1/2: six standard deviations.
    assert found.random == pytest.approx(0.5, abs=6 * 0.5 / 256**0.5)
    assert found.random_ci_low < found.random < found.random_ci_high
