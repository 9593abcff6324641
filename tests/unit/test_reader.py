"""What a run has written, as plain objects."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ragen_mega import parse, read_run
from ragen_mega.config import EnvironmentConfig
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.report.metrics import RunLogger
from ragen_mega.report.traces import TRACES, TraceWriter
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore


def test_a_conversation_comes_back_with_its_prompts_answers_and_rewards(tmp_path: Path) -> None:
    words = ["hello ", "left", "wrong ", "right"]
    one = Trajectory(group_id=3, environment="bandit", seed=7, truncated=True)
    one.append_observation([0])
    one.append_action(Completion([1], [-0.5], "stop")).reward = -0.25
    one.append_observation([2])
    one.append_action(Completion([3], [-0.5], "stop")).reward = 1.0
    config = parse(["--output", str(tmp_path), "--name", "run"])
    logger = RunLogger(tmp_path / "run", is_writer=True)
    logger.write_config(config.to_dict(), {})
    logger.log(0, {"rollout/success": 0.5})
    logger.note(0, "something")
    logger.close()
    groups = [TrajectoryGroup(3, [one])]
    writer = TraceWriter(
        tmp_path / "run" / TRACES,
        lambda ids: "".join(words[token] for token in ids),
        EnvironmentConfig(environments="bandit"),
        print,
    )
    lost = replace(one, turns=[], tokens=[], outcome_seed=1)  # beside it, and not trained on
    writer.write_step(0, [TrajectoryGroup(3, [one, lost])], groups)
    writer.write_evaluation(0, "bandit", groups, [None])
    RolloutStore(tmp_path / "run" / ROLLOUTS).write(0, groups, {})

    run = read_run(tmp_path / "run")
    assert run.summary is None and run.config["environment"]["environments"] == "frozen_lake"
    assert run.metrics == [{"step": 0, "rollout/success": 0.5}]
    assert run.events[0]["text"] == "something"
    assert [episode["kind"] for episode in run.episodes()].count("eval") == 1
    episode, not_trained = run.episodes("step")
    assert not_trained["kept"] is False
    assert (episode["group"], episode["seed"], episode["kept"]) == (3, 7, True)
    assert (episode["reward"], episode["success"], episode["ended"]) == (0.75, False, "budget")
    assert [(turn["prompt"], turn["answer"], turn["reward"]) for turn in episode["turns"]] == [
        ("hello ", "left", -0.25),
        ("wrong ", "right", 1.0),
    ]
    (trace,) = (tmp_path / "run" / TRACES).glob("step_*")
    old = json.loads(gzip.decompress(trace.read_bytes()))
    for member in old["groups"][0]["members"]:
        del member["kept"], member["truncated_by"]
    trace.write_bytes(gzip.compress(json.dumps(old).encode()))
    assert [each["kept"] for each in run.episodes("step")] == [True, True]  # the group's
    assert [each["ended"] for each in run.episodes("step")] == ["truncated", "truncated"]
    assert run.rollout(0)[0].trajectories[0].tokens == one.tokens
    with pytest.raises(FileNotFoundError, match="step 1, and those of 0 to 0; train with --keep-r"):
        run.rollout(1)
    with pytest.raises(ValueError, match="does not exist"):
        read_run(tmp_path / "none")
