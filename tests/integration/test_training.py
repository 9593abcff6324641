"""A few real steps end to end: files of a run, engine against trainer, the export in transformers,
its evaluation.
"""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_mega.commands import evaluate
from ragen_mega.config import parse
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.rollout import held_out
from ragen_mega.rollout.engine import EngineCounts, RolloutEngine
from ragen_mega.run import evaluation, placement
from ragen_mega.run.log import StepLog
from ragen_mega.run.placement import GIB
from ragen_mega.run.rollouts import Rollouts
from ragen_mega.train import train
from tests.support.runs import launch as launch_ranks
from tests.support.training import FLAGS, launch, read_metrics

pytestmark = pytest.mark.forks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("single"), 1)


def test_every_step_is_logged_and_engine_agrees_with_trainer(run: Path) -> None:
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["mismatch/logprob_max_abs_diff"] < 1e-4
        for key in (
            "rollout/success",
            "rollout/in_group_std",
            "actor/entropy",
            "actor/grad_norm",
            "critic/loss",
            "actor/clip_fraction_high",
            "actor/approx_kl",
            "time/rollout",
            "rollout/tokens_per_second",
            "rollout/valid_format_rate",
            "rollout/thought_length",
        ):
            assert row[key] is not None, key
        assert (
            0.5 < row["engine/cached_share"] < 1
            and row["engine/restarts"] == row["engine/reissued"] == 0
        )


def test_a_row_has_the_engine_of_its_rollout_and_the_memory_of_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations take eight times the memory here, and each loses a server; what the engine counts
    in a rollout is noted beside it.
    """
    sampled: list[EngineCounts] = []
    resident = [1]

    def sample(rollouts: Rollouts, step: int, log: StepLog) -> list[TrajectoryGroup]:
        engine = rollouts.sampling.engine
        engine.counts, before = EngineCounts(), engine.counts
        groups = original(rollouts, step, log)
        sampled.append(engine.counts)
        together = zip(astuple(engine.counts), astuple(before), strict=True)
        engine.counts = EngineCounts(*map(sum, together))
        return groups

    def evaluate_each(engine: RolloutEngine, *arguments: Any, **options: Any) -> Any:
        resident[0] = 8
        results = held_out.evaluate_each(engine, *arguments, **options)
        engine.counts.restarts += 1
        return results

    def memory() -> dict[str, int]:
        found, resident[0] = resident[0], 1
        return {"resident": found * GIB}

    original = Rollouts.sample
    monkeypatch.setattr(Rollouts, "sample", sample)
    monkeypatch.setattr(evaluation, "evaluate_each", evaluate_each)
    monkeypatch.setattr(placement, "device_memory", memory)
    flags = (*FLAGS, "--num-steps", "4", "--output", str(tmp_path), "--name", "run")
    train(parse(flags))
    rows = read_metrics(tmp_path / "run")
    shares = [each.cached_tokens / each.prompt_tokens for each in sampled]
    assert [row["engine/cached_share"] for row in rows] == pytest.approx(shares)
    # Before the first step, after two and after four.
    assert [row["engine/restarts"] for row in rows] == [1, 1, 0, 1]
    assert [row["memory/rollout_end_resident_gib"] for row in rows] == [8, 8, 1, 8]


def test_summary_puts_success_beside_random_and_optimum(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for name in ("bandit", "frozen_lake"):
        result = summary["sets"][name]
        assert result["ci_low"] <= result["success"] <= result["ci_high"]
        assert 0 < result["random"] < result["optimum"] <= 1 and result["num_prompts"] == 16
    assert (
        summary["steps"] == 3
        and summary["rollout_tokens_per_second"] > 0
        and summary["train_tokens_per_second"] > 0
    )
    assert json.loads((run / "config.json").read_text())["train"]["num_steps"] == 3


def test_export_loads_in_transformers_and_learned_to_answer(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "huggingface")
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    start = AutoModelForCausalLM.from_pretrained(run / "warm_start")
    user = [{"role": "user", "content": "The arms are Phoenix and Dragon.\n10 left"}]
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True) + "<think>"
    )
    answer = tokenizer.encode(" arms Phoenix Dragon</think><answer> Dragon</answer>")
    with torch.no_grad():
        logprobs = [
            m(torch.tensor([prompt + answer])).logits[0].log_softmax(-1) for m in (model, start)
        ]
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    trained, warm = (float(lp[positions, torch.tensor(answer)].mean()) for lp in logprobs)
    assert (
        trained > -2.0 and trained != warm
    )  # it speaks the format, and reinforcement learning moved it


def test_evaluate_reads_the_run(run: Path, tmp_path: Path) -> None:
    asked = [
        "--num-prompts",
        "8",
        "--samples-per-prompt",
        "2",
        "--json",
        str(tmp_path / "out.json"),
    ]
    evaluate.main(["--load", str(run), "--environment", "frozen_lake:1,", *asked])
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result["pass_at_k"]) == {"pass@1", "pass@2"} and result["num_prompts"] == 8


@pytest.mark.slow
def test_layouts_train_alike(run: Path, tmp_path: Path) -> None:
    """Two ranks, data- or tensor-parallel, log the first step of one rank: same trajectories, same
    losses.
    """
    first = read_metrics(run)[0]
    for flags in ((), ("--tensor-model-parallel-size", "2")):
        name = f"run{len(flags)}"
        start = ("--load", str(run / "warm_start"), "--num-steps", "1")
        other = read_metrics(launch_ranks(tmp_path, name, 2, *FLAGS, *start, *flags))[0]
        assert other["rollout/reward"] == pytest.approx(first["rollout/reward"], abs=1e-6)
        for key in ("critic/loss", "actor/loss", "actor/entropy", "actor/grad_norm"):
            assert other[key] == pytest.approx(first[key], rel=1e-3, abs=1e-4), key
