"""Runs that train an agent with tools, a sub-agent and an edited history: what is recorded, resumed
and repeated.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_mega.agents.call_tree import CALL
from ragen_mega.commands.replay import main as replay
from ragen_mega.config import parse
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.runs import launch, metrics

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


def test_an_agent_is_trained_resumed_and_recorded_to_the_token(tmp_path, flags):
    whole = launch(tmp_path, "whole", 1, *flags, "--num-steps", "3")
    launch(tmp_path, "parts", 1, *flags, "--num-steps", "2")
    parts = launch(tmp_path, "parts", 1, *flags, "--num-steps", "3", "--resume")
    rows = [
        [{key: row[key] for key in row if not key.startswith("eval/")} for row in metrics(run)]
        for run in (whole, parts)  # each start evaluates after its last step
    ]
    assert rows[0] == rows[1]
    files = [RolloutStore(run / "rollouts") for run in (whole, parts)]
    for step in range(3):
        tokens, others = (
            [
                (list(member.tokens), list(member.rollout_logprobs), member.breaks)
                for group in run.read(step).groups
                for member in group.trajectories
            ]
            for run in files
        )
        assert tokens == others

    # Under the weights that sampled them, the recorded tokens have the recorded log-probabilities.
    model = AutoModelForCausalLM.from_pretrained(whole / "warm_start", dtype=torch.float32)
    temperature = parse(flags).rollout.temperature
    num_checked = 0
    for group in files[0].read(0).groups:
        for trajectory in group.trajectories:
            records = [turn.info[CALL] for turn in trajectory.turns]
            assert len(records) == 5 and {record["role"] for record in records} == {
                "main",
                "checker",
            }
            assert sum(turn.end - turn.start for turn in trajectory.turns) == sum(
                trajectory.loss_mask
            )
            for start, end in trajectory.segments:
                tokens = torch.tensor([trajectory.tokens[start:end]])
                logits = model(tokens).logits[0, :-1] / temperature
                exact = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
                recorded = torch.tensor(trajectory.rollout_logprobs[start + 1 : end])
                mask = torch.tensor(trajectory.loss_mask[start + 1 : end])
                assert (exact - recorded)[mask].abs().max() < 1e-4
                num_checked += int(mask.sum())
    assert num_checked > 200

    # The agent, answered from the record, does what it has done; another agent does not.
    said = ["--run", str(whole), "--step", "1", "--agent-calls"]
    assert replay(said) == 0
    other = AGENT.replace('f"check {question}"', '"check that"')
    (tmp_path / "my_agent_of_test.py").write_text(other)
    done = subprocess.run(
        [sys.executable, "-m", "ragen_mega.commands.program", "replay", *said],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "the record has no answer" in done.stdout
