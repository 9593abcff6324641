"""Reference players of an agent whose ideal answers are known."""

from pathlib import Path

import pytest

from ragen_mega.agents.examples import example_references
from ragen_mega.config import parse
from ragen_mega.rollout.tasks import evaluation_prompts
from ragen_mega.run.check import check_environments

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


def wrong(task, client):
    return {"reward": run(task, client)}["wieght"]


def fragile(task, client):
    if task["seed"] % 2:
        raise RuntimeError("tails is lost")
    return run(task, client)


def test_an_agent_that_always_raises_ends_its_run_at_the_first_example() -> None:
    name = f"{__name__}:wrong"
    config = parse(["--agent", name, "--agent-example", f"{__name__}:ideal", "--no-think"])
    place = rf"KeyError: 'wieght' \(in wrong, {__file__}:{wrong.__code__.co_firstlineno + 1}\)"
    with pytest.raises(ValueError, match=rf"{name} must finish an episode, .*: {place}"):
        example_references(config, f"agent:{name}", [(123, None)])


def test_errors_of_an_agent_with_an_example_are_said() -> None:
    name = f"{__name__}:fragile"
    config = parse(["--agent", name, "--agent-example", f"{__name__}:ideal", "--no-think"])
    prompts = evaluation_prompts(config.environment, f"agent:{name}", 8, None)
    found = example_references(config, f"agent:{name}", prompts)
    assert found.optimum == 0.5 and "16 of 32 random episodes" in found.errors_say
    assert "RuntimeError: tails is lost (in fragile, " in found.errors_say


def test_imports_of_an_agent_are_not_timed_as_its_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_agent.py").write_text(
        "import time\n\ntime.sleep(2.5)\n\n\ndef run(task, url, key):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--agent", "late_agent:run", "--agent-example", f"{__name__}:ideal"]
    config = parse([*flags, "--environment-timeout", "2"])
    check_environments(config.environment)


def patient(task, client):
    sides = [run(task, client) for _ in range(3)]
    return float(all(sides))


@pytest.mark.parametrize(("limit", "is_said"), [(2, True), (3, False)])
def test_answers_that_an_agent_needs_and_may_not_have_are_said(limit: int, is_said: bool) -> None:
    name = f"{__name__}:patient"
    flags = ["--agent-example", f"{__name__}:ideal", "--max-turns", str(limit), "--no-think"]
    config = parse(["--agent", name, *flags])
    prompts = evaluation_prompts(config.environment, f"agent:{name}", 4, None)
    found = example_references(config, f"agent:{name}", prompts)
    assert found.optimum == (0.0 if is_said else 1.0)
    assert (found.turns_say is not None) == is_said
    if found.turns_say:
        assert "--max-turns 2 is too few" in found.turns_say and found.turns_say.endswith("needs 3")
