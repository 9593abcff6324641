"""Three steps of training for agents on the frameworks that people have, with their real packages
and without a network.
"""

from pathlib import Path

import pytest

from ragen_mega.agents.call_tree import CALL
from ragen_mega.config import parse
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.agents import check_logprobs
from tests.support.runs import launch, metrics

FLAGS = """
    --agent-example tests.support.agents:example --no-think --num-groups 2 --group-size 4
    --minibatch-size 8 --filter-strategy none --max-response-length 24
    --warm-start-trajectories 64 --warm-start-first-turn-steps 4 --warm-start-steps 4
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2
    --num-query-groups 1 --eval-interval 0 --eval-prompts 2 --eval-samples 1 --keep-rollouts 0
    --num-steps 3
""".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "package", "context"),
    [
        pytest.param("plain", "openai", 800, id="openai"),
        pytest.param("streaming", "openai", 800, id="openai-stream"),
        pytest.param("sub_agent", "openai", 800, id="sub-agent"),
        pytest.param("compacting", "openai", 800, id="compacting"),
        pytest.param("openai_agents", "agents", 1200, id="openai-agents"),
        pytest.param("openai_agents_chat", "agents", 1200, id="openai-agents-by-chat"),
        pytest.param("anthropic", "anthropic", 800, id="anthropic"),
        pytest.param("langgraph", "langgraph", 1200, id="langgraph"),
        pytest.param("smolagents", "smolagents", 8000, id="smolagents"),
    ],
)
def test_three_steps(tmp_path: Path, agent: str, package: str, context: int) -> None:
    pytest.importorskip(package, reason="pip install -e '.[agent-frameworks]'")
    flags = ["--agent", f"tests.support.agents:{agent}", "--max-context-length", str(context)]
    run = launch(tmp_path, agent, 1, *FLAGS, *flags)
    rows = metrics(run)
    assert [row["rollout/environment_errors"] for row in rows] == [0.0] * 3
    assert all(row["mismatch/logprob_mean_abs_diff"] < 1e-4 for row in rows), rows[-1].keys()
    for step in range(3):
        played = [
            member
            for group in RolloutStore(run / "rollouts").read(step).groups
            for member in group.trajectories
        ]
        assert len(played) == 8
        for member in played:
            assert all(CALL in turn.info for turn in member.turns)
            assert sum(member.loss_mask) == sum(turn.end - turn.start for turn in member.turns)
        if step == 0:
            temperature = parse(FLAGS + flags).rollout.temperature
            assert check_logprobs(run / "warm_start", played, temperature) > 100
    if agent in ("sub_agent", "compacting"):
        assert all(member.breaks for member in played)
