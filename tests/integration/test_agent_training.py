"""Runs that train an agent with tools, a sub-agent and an edited history: what is recorded, resumed
and repeated.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from ragen_mega import evaluate
from ragen_mega.agents.call_tree import CALL
from ragen_mega.agents.runner import AGENTS
from ragen_mega.commands.replay import main as replay
from ragen_mega.config import parse
from ragen_mega.data.types import Trajectory
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.agents import check_logprobs
from tests.support.runs import launch, metrics
from tests.support.sglang_server import PYTHON, needs_sglang

pytestmark = pytest.mark.forks
AGENT = '''
import json
import re

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
        },
    }
]


def run(task, client):
    """Ask for a sum by the tool, let a sub-agent check it, and go on with a shorter history."""
    question = f"{task['seed'] % 7} + {task['outcome_seed'] % 5}"
    messages = [{"role": "user", "content": question}]
    said = client.chat.completions.create(model="main", messages=messages, tools=TOOLS)
    message = said.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "use add"})
    client.chat.completions.create(model="main", messages=messages, tools=TOOLS, max_tokens=8)
    check = [{"role": "user", "content": f"check {question}"}]
    client.chat.completions.create(model="checker", messages=check, n=2, max_tokens=4)
    messages = [{"role": "user", "content": "in short: 5"}]
    last = client.chat.completions.create(model="main", messages=messages, tools=TOOLS)
    return {"reward": len(last.choices[0].message.content or "") % 3, "calls": {0: 0.5}}


def example(messages, tools):
    numbers = re.findall(r"\\d+", messages[-1]["content"])
    if tools and messages[-1]["role"] == "user" and len(numbers) == 2:
        call = {"name": "add", "arguments": {"a": numbers[0], "b": numbers[1]}}
        return {"content": "", "tool_calls": [call]}
    return "yes"
'''


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "my_agent_of_test.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return (
        "--agent my_agent_of_test:run --agent-example my_agent_of_test:example --no-think"
        " --num-groups 2 --group-size 4 --minibatch-size 8 --filter-strategy none"
        " --max-context-length 400 --max-response-length 24 --warm-start-trajectories 64"
        " --warm-start-first-turn-steps 4 --warm-start-steps 4 --num-layers 2 --hidden-size 32"
        " --ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 1"
        " --eval-interval 0 --eval-prompts 2 --eval-samples 1 --keep-rollouts 0"
        " --save-interval 1 --lr-decay constant"
    ).split()


def played(run: Path, step: int) -> list[Trajectory]:
    groups = RolloutStore(run / "rollouts").read(step).groups
    return [member for group in groups for member in group.trajectories]


def test_an_agent_is_trained_resumed_and_recorded_to_the_token(
    tmp_path, flags, monkeypatch, capsys
):
    whole = launch(tmp_path, "whole", 1, *flags, "--num-steps", "2")
    parts = tmp_path / "parts"
    shutil.copytree(whole, parts)
    (parts / "summary.json").unlink()  # as if it had been killed in its second step
    shutil.rmtree(parts / "checkpoints" / "step_00000002")
    for file in (parts / "rollouts").glob("step_00000001*"):
        file.unlink()
    launch(tmp_path, "parts", 1, *flags, "--num-steps", "2", "--resume")
    assert metrics(whole) == metrics(parts)
    tokens, others = (
        [
            (list(member.tokens), list(member.rollout_logprobs), member.breaks)
            for member in played(run, 1)
        ]
        for run in (whole, parts)
    )
    assert tokens == others

    # Under the weights that sampled them, the recorded tokens have the recorded log-probabilities.
    temperature = parse(flags).rollout.temperature
    assert check_logprobs(whole / "warm_start", played(whole, 0), temperature) > 200
    for trajectory in played(whole, 0):
        records = [turn.info[CALL] for turn in trajectory.turns]
        assert len(records) == 5 and {record["role"] for record in records} == {"main", "checker"}
        sampled = sum(turn.end - turn.start for turn in trajectory.turns)
        assert sampled == sum(trajectory.loss_mask)

    # An evaluation has the reference players that the run has computed.
    name = "agent:my_agent_of_test:run"
    known = json.loads((whole / "summary.json").read_text())["sets"][name]
    found = evaluate(whole, name, num_prompts=2, samples_per_prompt=1).to_dict()
    assert all(found[player] == known[player] for player in ("random", "optimum", "num_prompts"))
    assert None not in (found["random"], found["optimum"])

    # The agent, answered from the record, does what it has done; another agent does not.
    said = ["--run", str(whole), "--step", "1", "--agent-calls"]
    assert not replay(said)  # the exit code 0
    other = AGENT.replace('f"check {question}"', '"check that"')
    (tmp_path / "my_agent_of_test.py").write_text(other)
    monkeypatch.delitem(sys.modules, "my_agent_of_test")
    AGENTS._known.clear()
    with pytest.raises(SystemExit, match="1"):
        replay(said)
    assert "the record has no answer" in capsys.readouterr().out


@pytest.mark.slow
def test_agents_play_alike_on_several_ranks(tmp_path, flags):
    """From the same weights two ranks sample the tokens that one samples, each at its own door."""
    flags = [*flags, "--num-query-groups", "2"]
    one = launch(tmp_path, "one", 1, *flags, "--num-steps", "1")
    model, expected = one / "warm_start", played(one, 0)
    for name, layout in {"data": "", "tensor": "--tensor-model-parallel-size 2"}.items():
        more = f"--num-steps 2 --load {model} {layout}".split()
        two = launch(tmp_path, name, 2, *flags, *more)
        assert all(row["mismatch/logprob_max_abs_diff"] < 1e-4 for row in metrics(two))
        assert all(row["rollout/environment_errors"] == 0 for row in metrics(two))
        found = played(two, 0)
        assert [member.tokens for member in found] == [member.tokens for member in expected]
        assert [member.breaks for member in found] == [member.breaks for member in expected]
        assert check_logprobs(model, found, parse(flags).rollout.temperature) > 200


@needs_sglang[0]
@needs_sglang[1]
@pytest.mark.slow
def test_agents_play_with_the_real_sglang_server(tmp_path, flags):
    server = f"--rollout-engine sglang --sglang-python {PYTHON} --num-steps 2"
    run = launch(tmp_path, "sglang", 1, *flags, *server.split())
    assert all(row["mismatch/logprob_max_abs_diff"] < 1e-4 for row in metrics(run))
    assert all(row["rollout/environment_errors"] == 0 for row in metrics(run))
    found = played(run, 0)
    assert all(len(member.turns) == 5 for member in found)
    temperature = parse(flags).rollout.temperature
    assert check_logprobs(run / "warm_start", found, temperature) > 200
