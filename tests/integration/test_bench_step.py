"""The step benchmark, run for real on a tiny shape: its workload is exactly what it says, and its
phases are the whole step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_mega.planning.published import model_config
from ragen_mega.report.metrics import read_metrics
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.refusals import refused
from tools.benchmarks import bench_step
from tools.benchmarks.random_models import write_checkpoint

ROOT = Path(__file__).parents[2]
SHAPE = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
TURNS, RESPONSE = 5, 8


def write_shape(directory: Path, **changes: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE | changes))
    return directory


def bench(*flags: str | Path) -> None:
    bench_step.main([*map(str, flags)])


@pytest.mark.slow
def test_a_quarter_of_fixed_trajectories_is_timed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shape = write_shape(tmp_path / "tiny")
    bench(
        "--model", shape, "--num-groups", "4", "--group-size", "2", "--response-length", RESPONSE,
        "--keep", "0.25", "--steps", "4", "--rollout-engine", "embedded",
        "--json", tmp_path / "out.json", "--output", tmp_path / "runs",
        "--", "--max-context-length", "1000",
    )  # fmt: skip
    said = capfd.readouterr().out
    run = json.loads((tmp_path / "out.json").read_text())
    directory = tmp_path / "runs" / "run"
    rows = read_metrics(directory / "metrics.jsonl")[:4]  # of a fifth step only what was in time
    store = RolloutStore(directory / "rollouts")
    for step, row in enumerate(rows):
        groups = store.read(step).groups
        assert [len(group.trajectories) for group in groups] == [2] * 4
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            assert [turn.end - turn.start for turn in trajectory.turns] == [RESPONSE] * TURNS
        trained = row["update/tokens_per_second"] * (row["time/advantages"] + row["time/update"])
        assert round(trained) == sum(
            len(trajectory.tokens) - 1 for trajectory in groups[0].trajectories
        )
    assert len(rows) == 4 and len(run["all_seconds"]) == len(run["rows"]) == 2
    assert not any("eval/success" in row for row in rows), "the final evaluation is not timed"
    assert run["sampled_tokens_per_trajectory"] == TURNS * RESPONSE
    assert (run["num_trajectories"], run["trained_trajectories"]) == (8, 2)

    # Wall clock outside the program against its own timers.
    phases = {name: phase["seconds"] for name, phase in run["phases"].items()}
    assert {
        "rollout",
        "sync",
        "advantages",
        "update",
        "rollout_files",
        "handover",
        "other",
    } <= phases.keys()
    assert sum(phases.values()) == pytest.approx(run["seconds"])
    assert phases["other"] > -0.1, "timers lie within their step"
    untimed = [
        (gap - sum(seconds for key, seconds in row.items() if bench_step.is_phase(key)), gap)
        for row, gap in zip(run["rows"], run["all_seconds"], strict=True)
    ]
    # of one step at least: beside other work any may have to wait between its timers
    assert any(rest < 0.1 + 0.2 * gap for rest, gap in untimed), untimed
    assert all(seconds >= 0 for name, seconds in phases.items() if name != "other")
    assert "8.0 sampled" not in said and "40.0 sampled tokens" in said
    assert "25% of 8 trajectories" in said
    assert (
        not (directory / "checkpoints").exists() and not (tmp_path / "runs" / "checkpoint").exists()
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_random_model_never_stops(tmp_path: Path, is_tied: bool) -> None:
    """In transformers: stop tokens are impossible after any word, and the other words stay about
    equally likely.
    """
    hf = model_config(str(write_shape(tmp_path / "shape", tie_word_embeddings=is_tied)))
    count = write_checkpoint(hf, "sokoban", tmp_path / "model", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model.num_parameters() == count
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    stop = tokenizer.eos_token_id
    words = [index for index in range(hf.vocab_size) if index != stop]
    prompt = tokenizer.encode("<|im_start|>user\nUp<|im_end|>\n<|im_start|>assistant\n<think>")
    batch = torch.tensor([[*prompt, word] for word in words])
    with torch.inference_mode():
        logprobs = model(batch).logits[:, -1].log_softmax(-1)
    assert float(logprobs[:, stop].max()) < -50
    assert float(logprobs[:, words].min()) > -20
    assert tokenizer.decode([words[-1], *tokenizer.encode("Up"), len(tokenizer)]) == "Up"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model Qwen9",
            "size of Qwen9 .* --load",
        ),
        ("--steps 2", "--steps must be at least 3"),
        ("--keep 0", "--keep must be a share above 0"),
    ],
)
def test_what_cannot_be_timed_is_one_line(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, bench_step.main, [*flags.split(), "--output", str(tmp_path)])
    assert re.search(message, error)


def test_a_run_that_fails_shows_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shape = write_shape(tmp_path / "tiny")
    with pytest.raises(SystemExit) as left:
        bench("--model", shape, "--output", tmp_path / "runs", "--", "--lr", "0")
    said = f"{left.value} {capfd.readouterr().err}"
    assert left.value.code not in (0, 2) and "ended with status 2" in said and "set --lr" in said
