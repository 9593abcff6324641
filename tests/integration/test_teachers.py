"""Runs with a teacher for each environment and its likeliest tokens in the loss: neither one model
at a time on the device nor a step repeated from the disk changes anything.
"""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_mega.commands import replayed_step
from ragen_mega.config import parse
from ragen_mega.report.traces import TRACES, traces
from ragen_mega.run.build import build
from ragen_mega.run.run import Run
from ragen_mega.warm_start.small_model import write_small_model
from tests.support.faulty_runs import replay_arguments
from tests.support.runs import finish, metrics, state

FLAGS = (
    """
    --environments bandit,frozen_lake --environment-options {"frozen_lake":{"observation":"cells"}}
    --prompt-style compact --max-turns 2 --max-response-length 8 --max-context-length 200
    --hidden-size 16 --ffn-hidden-size 32 --num-layers 1 --num-groups 2 --group-size 2
    --minibatch-size 2 --filter-strategy none --lr 1e-2 --critic-lr 1e-3 --num-steps 2
    --eval-prompts 2 --eval-interval 0 --save-interval 2 --keep-rollouts 0 --diagnose-interval 0
    --teacher-top-k 4
""".split()
    + ["--reward", "environment + 0.5*teacher"]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `start` and of two teachers with other weights."""
    folder = tmp_path_factory.mktemp("models")
    write_small_model(parse([*FLAGS, "--teacher-prompt-examples", "1"]), folder / "start")
    for seed, name in enumerate(("one", "two")):
        shutil.copytree(folder / "start", folder / name)
        model = AutoModelForCausalLM.from_pretrained(folder / "start")
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        model.save_pretrained(folder / name)
    return folder


def open_run(models: Path, name: str, *flags: str) -> Run:
    teachers = {"bandit": str(models / "one"), "frozen_lake": str(models / "two")}
    given = ["--load", str(models / "start"), "--teacher-load", json.dumps(teachers)]
    return build(parse([*FLAGS, *given, "--output", str(models), "--name", name, *flags]))


def test_teachers_take_turns_and_steps_are_repeated_to_the_bit(models: Path) -> None:
    straight = finish(open_run(models, "straight"))
    rows = metrics(straight)
    assert all(row["actor/teacher_kl"] > 0.05 and row["teacher/kl"] > 0.05 for row in rows)
    assert all(0 < row["teacher/top_k_mass"] < 1 for row in rows)
    run = open_run(models, "turns", "--offload", "turns")
    assert sum(name.startswith("teacher of ") for name in run.placement._models) == 2
    turns = finish(run)
    assert metrics(turns) == rows
    torch.testing.assert_close(state(straight, 2), state(turns, 2), rtol=0, atol=0)
    for folder in (straight, turns):
        result = replayed_step.replay(replay_arguments(folder, 1))
        assert result["equal"] and result["largest_difference"] == 0.0
        assert "actor/teacher_kl" in result["keys"]


def test_the_viewer_has_the_log_ratio_of_each_sampled_token(models: Path) -> None:
    run = finish(open_run(models, "viewed"))
    name = next(path for path, kind, step, _ in traces(run / TRACES) if (kind, step) == ("step", 1))
    members = [
        member
        for group in json.loads(gzip.decompress(name.read_bytes()))["groups"]
        for member in group["members"]
    ]
    ratios = [ratio for each in members for ratio in each["channels"]["teacher log-ratio"]]
    sampled = sum(turn["end"] - turn["start"] for each in members for turn in each["turns"])
    assert len(ratios) == sampled and 0.0 not in ratios
    assert -sum(ratios) / sampled == pytest.approx(metrics(run)[1]["teacher/kl"], abs=1e-3)


def test_a_teacher_is_learned(models: Path) -> None:
    """With the teacher alone its divergence falls, though the policy samples few of its tokens."""
    flags = ["--reward", "teacher", "--advantage-estimator", "none", "--num-steps", "12"]
    rows = metrics(finish(open_run(models, "alone", *flags)))
    divergences = [row["actor/teacher_kl"] for row in rows]
    assert sum(divergences[-3:]) < 0.7 * sum(divergences[:3])
