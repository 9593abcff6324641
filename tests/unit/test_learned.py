"""The tool that says what runs have learned, and the benchmark of the trainer alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from ragen_mega.data.types import TokenBatch
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.published import model_config
from tools import learned
from tools.benchmarks import bench_update


def write(directory: Path, success: list[float | None], **columns: list[float]) -> Path:
    """A run whose steps take 30 s, 6 of them its rollout; without success every episode failed."""
    directory.mkdir()
    rows = [
        {"step": step, "time/step": 30.0, "time/rollout": 6.0}
        | ({} if rate is None else {"rollout/success": rate})
        | {name.replace("__", "/"): values[step] for name, values in columns.items()}
        for step, rate in enumerate(success)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)
    return directory


def say(tmp_path: Path, *arguments: Any) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "said.json"
    try:
        learned.main([*map(str, arguments), "--json", str(output)])
        code = 0
    except SystemExit as left:
        code = left.code
    return code, json.loads(output.read_text())


def test_the_goal_is_reached_in_so_many_minutes(tmp_path: Path) -> None:
    good = write(tmp_path / "good", [0.1, 0.5, 0.96, 0.94, 1.0], eval__success=[0, 0, 0, 0, 0.97])
    code, said = say(tmp_path, good)
    assert code == 0
    assert said["runs"]["good"] | {"mismatch": None} == {
        "last_success": 1.0, "held_out": 0.97, "minutes_to_goal": 1.5, "seconds_per_step": 30.0,
        "largest_mismatch": 0.0, "success": [0.1, 0.5, 0.96, 0.94, 1.0], "mismatch": None,
    }  # fmt: skip
    bad = write(tmp_path / "bad", [0.1, 0.5])
    code, said = say(tmp_path, good, bad)
    assert code == 1 and said["runs"]["bad"]["minutes_to_goal"] is None
    assert say(tmp_path, "--goal", 0.5, bad)[0] == 0
    lost = write(tmp_path / "lost", [None, 0.5, None])
    code, said = say(tmp_path, "--goal", 0.5, lost)
    assert code == 1 and said["runs"]["lost"]["success"] == [None, 0.5, None]
    assert said["runs"]["lost"]["minutes_to_goal"] == 1.0


def test_engine_and_trainer_may_not_be_far_apart(tmp_path: Path) -> None:
    far = write(tmp_path / "far", [1, 1], mismatch__logprob_mean_abs_diff=[0.02, 0.11])
    code, said = say(tmp_path, far)
    assert code == 1 and said["runs"]["far"]["mismatch"] == [0.02, 0.11]
    assert say(tmp_path, "--mismatch", 0.2, far)[0] == 0


def test_a_repetition_is_compared_without_its_clocks(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", [0, 0, 0], time__rollout=[9, 4, 4])
    once = write(tmp_path / "once", [0, 0, 0], actor__loss=[1, 2, 3], time__rollout=[9, 6, 7])
    twice = write(tmp_path / "twice", [0, 0, 0], actor__loss=[1, 2, 3], time__rollout=[8, 5, 5])
    _, said = say(tmp_path, "--repeats", plain, once, twice)
    assert said["repetition"] == {
        "first_differing_step": None, "repeats": True, "cost_percent": 25.0
    }  # fmt: skip
    other = write(tmp_path / "other", [0, 0, 0], actor__loss=[1, 2.0000001, 3])
    _, said = say(tmp_path, "--repeats", plain, once, other)
    assert said["repetition"]["first_differing_step"] == 1 and not said["repetition"]["repeats"]
    short = write(tmp_path / "short", [0, 0], actor__loss=[1, 2])
    _, said = say(tmp_path, "--repeats", plain, once, short)
    assert said["repetition"]["first_differing_step"] == 2 and not said["repetition"]["repeats"]


SHAPE = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
}  # fmt: skip


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_trainer_alone_is_timed(estimator: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    flags = f"--length 48 --trajectories 3 --repetitions 1 --json {tmp_path / 'out.json'}".split()
    estimate = ["--", "--advantage-estimator", estimator]
    bench_update.main(["--model", str(tmp_path), *flags, *estimate])
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["seconds"]) == ["actor", "critic"][: 1 + (estimator == "gae")]
    rate = 3 * 48 / report["seconds"]["actor"]["median"]
    assert report["tokens_per_second"] == pytest.approx(rate)
    cost = ModelShape.of(model_config(str(tmp_path))).cost
    assert report["teraflops"] == pytest.approx(rate * cost.flops(48) / 1e12)
    assert 0 < report["planned_gib"] < 2


def test_adapters_are_timed_beside_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    trained = list[int]()
    update = MegatronPolicy.update

    def record(policy: MegatronPolicy, batch: TokenBatch) -> dict[str, float]:
        trained.append(sum(p.numel() for p in policy.chunks[0].parameters() if p.requires_grad))
        return update(policy, batch)

    monkeypatch.setattr(MegatronPolicy, "update", record)
    flags = f"--length 48 --trajectories 3 --repetitions 1 --json {tmp_path / 'out.json'}".split()
    estimate = ["--", "--advantage-estimator", "gae", "--lora-rank", "2"]
    bench_update.main(["--model", str(tmp_path), *flags, *estimate])
    report = json.loads((tmp_path / "out.json").read_text())
    seconds = {name: of["median"] for name, of in report["seconds"].items()}
    assert list(seconds) == ["actor", "actor, all weights", "critic"]
    assert report["times_as_fast"] == seconds["actor, all weights"] / seconds["actor"]
    assert not {"memory_gib", "planned_gib"} & set(report)
    # rank 2 beside q (64 to 64), k and v (to 32), o, gate, up (to 128) and down, in two layers
    adapters = 2 * 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    assert trained[0::2] == [adapters] * 3 and min(trained[1::2]) > 512 * 64


def test_a_common_prompt_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four trajectories in one microbatch: 32 common positions, and 16 of each."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    batches = list[TokenBatch]()
    update = MegatronPolicy.update

    def record(policy: MegatronPolicy, batch: TokenBatch) -> dict[str, float]:
        batches.append(batch)
        metrics = update(policy, batch)
        assert metrics["computed_share"] == (32 + 4 * 16) / (4 * 48)
        return metrics

    monkeypatch.setattr(MegatronPolicy, "update", record)
    flags = f"--length 48 --trajectories 4 --prompt 32 --repetitions 1 --json {tmp_path / 'o.json'}"
    estimate = ["--", "--advantage-estimator", "grpo"]
    bench_update.main(["--model", str(tmp_path), *flags.split(), *estimate])
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["training_flags"] == estimate[1:] and len(batches) == 3
    assert batches[0].loss_mask.view(4, 48).sum(1).tolist() == [16 + 1] * 4
    cost, seconds = ModelShape.of(model_config(str(tmp_path))).cost, report["seconds"]
    assert report["tokens_per_second"] == pytest.approx(4 * 48 / seconds["actor"]["median"])
    whole = report["teraflops"] * 1e12 * seconds["actor"]["median"]
    pairs = 32**2 / 2 + 4 * sum(range(32, 48))  # but for half a pair of each position
    labels = 4 * 16 * cost.per_label
    by_hand = 96 * cost.per_token + labels + cost.per_pair * pairs
    assert whole == pytest.approx(by_hand, rel=2e-3)
