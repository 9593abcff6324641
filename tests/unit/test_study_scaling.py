"""Scaling studies: pages out of runs whose speed and learning are known, refusals, and the
predicted study of the recipes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_mega.commands import study as tool
from ragen_mega.config import parse
from ragen_mega.config.cli import RECIPES
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.answer import planned_gpus
from ragen_mega.planning.memory import GIB, Setting, plan
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import Play
from ragen_mega.studies import runs as study_runs
from ragen_mega.studies.definitions import Study
from ragen_mega.studies.scaling import Speed, number
from ragen_mega.warm_start.small_model import small_model

ROOT = Path(__file__).parents[2]
SIZES = {"small": 32, "middle": 64, "large": 128, "larger": 256}
STEPS, EVERY, TOKENS, SAMPLED = 24, 2, 50.0, 20.0
SECONDS = {"rollout": 2.0, "sync": 0.1, "advantages": 0.5, "update": 1.4}
FILE = """
title = "Known"
source = "nowhere"
target = 0.6
[small]
recipe = "none"
flags = '''--environments bandit --num-steps 24 --num-groups 8 --group-size 8
  --filter-strategy none --minibatch-size 16 --eval-interval 2 --eval-prompts 500'''
""" + "".join(
    f'[[models]]\nname = "{name}"\nflags = "--hidden-size {width} --ffn-hidden-size {2 * width}"\n'
    for name, width in SIZES.items()
)  # fmt: skip
LAYOUTS = """
[[layouts]]
name = "alone"
flags = ""
[[layouts]]
name = "strong"
flags = "--use-distributed-optimizer"
ranks = 2
seeds = 1
[[layouts]]
name = "weak"
flags = "--use-distributed-optimizer --num-groups 16"
ranks = 2
seeds = 1
"""


def run_study(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Exit code and output of the tool in this process."""
    try:
        code = tool.main([*map(str, argv)]) or 0
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def write_run(
    folder: Path, study: Study, arm: str, seed: int, *, slower: float = 1.0, noise: float = 0.01
) -> ModelShape:
    """A run as the trainer leaves it: success follows a sigmoid of the step from 0.2 to 0.9, and
    its phases take SECONDS times `slower`.
    """
    chosen = next(one for one in study.arms if one.name == arm)
    config = parse(study_runs.flags_of(study, chosen, "none"))
    hf, run = small_model(config.model, 512), folder / f"{arm}-seed{seed}"
    hf.save_pretrained(run / "huggingface")
    start = {"world_size": chosen.ranks, "first_step": 0, "changed": {}}
    (run / "config.json").write_text(json.dumps(config.to_dict() | {"provenance": [start]}))
    draw, played = np.random.default_rng(seed), config.rollout.num_groups * 8
    seconds = {name: slower * value for name, value in SECONDS.items()}
    lines = []
    for step in range(STEPS):
        row: dict[str, Any] = {f"time/{name}": value for name, value in seconds.items()}
        training = row["time/advantages"] + row["time/update"]
        row |= {
            "step": step, "time/step": sum(seconds.values()) + 0.5 * slower,
            "rollout/num_turns": 1.0, "rollout/sampled_tokens": played * SAMPLED,
            "rollout/num_trajectories": played, "filter/kept_groups": played / 8,
            "update/tokens_per_second": played * TOKENS / training,
            "actor/computed_share": 0.5, "engine/cached_share": 0.25,
            "memory/train_resident_gib": 1.5, "eval/initial_success": 0.2,
        }  # fmt: skip
        if (step + 1) % EVERY == 0:
            value = 0.2 + 0.7 / (1 + (8 / (step + 1)) ** 2) + noise * draw.standard_normal()
            row["eval/success"] = float(np.clip(value, 0.0, 1.0))
        lines.append(json.dumps(row))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    prompts = (draw.random(500) < 0.8).astype(float).tolist()
    told = {"success": float(np.mean(prompts)), "prompt_success": prompts}
    told |= {"random": 0.5, "optimum": 1.0}
    (run / "summary.json").write_text(json.dumps({"sets": {"bandit": told}, "seconds": 100.0}))
    return ModelShape.of(hf)


def flops_of(shape: ModelShape) -> tuple[float, float]:
    """FLOPs, forward and backward, of a token of model "large" in texts of 50, and of its head."""
    layer = 3 * 128**2 + 3 * 128 * 256 + 50 * 128
    return 6 * shape.num_layers * layer, 6 * 512 * 128


@pytest.fixture
def known(tmp_path: Path) -> tuple[Path, Study]:
    path = tmp_path / "known.toml"
    path.write_text(FILE + LAYOUTS)
    study = Study.read(path, "small")
    study_runs.claim_folder(tmp_path / "runs", study, "none", mixed=False)
    return path, study


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (999.4, "999"),
        (999.6, "1k"),
        (999_600, "1M"),
        (1234, "1.23k"),
        (0.05, "0.05"),
        (5e15, "5e+03T"),
    ],
)
def test_numbers_have_the_prefix_of_what_they_are_rounded_to(value: float, said: str) -> None:
    assert number(value) == said


def test_a_page_out_of_known_runs(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, study = known
    runs = tmp_path / "runs"
    shapes = {name: write_run(runs, study, f"{name}-alone", 0) for name in SIZES}
    for name in SIZES:
        for seed in (1, 2):
            write_run(runs, study, f"{name}-alone", seed)
    write_run(runs, study, "large-strong", 0, slower=0.625)
    write_run(runs, study, "large-weak", 0, slower=1.25)
    code, text = run_study(
        capsys, path, "--report", "--output", runs, "--reports", tmp_path / "out"
    )
    assert code == 0 and text.rstrip() == (tmp_path / "out" / "known.md").read_text().rstrip()
    assert (tmp_path / "out" / "known.svg").stat().st_size > 1000

    # a step of 4.5 s on 64 trajectories of 50 tokens, half of which the updates compute
    body, head = flops_of(shapes["large"])
    speed = re.search(r"^\| large-alone \|.*$", text, re.M)[0]
    cells = [cell.strip() for cell in speed.strip("|").split("|")]
    assert cells[2:6] == ["1", "1 x 1 x 1, 1", "8 x 8", "50 (20)"]
    assert cells[6:12] == ["2", "0.1", "0.5", "1.4", "0.5", "4.5"]
    assert cells[12:14] == [f"{64 * 50 / 4.5:.3g}", f"{64 * 20 / 2:.3g}"]
    actor, critic = (25 * body + 20 * head, 25 * body)
    assert cells[14] == f"{64 * (actor + critic) / 1.4 / 1e9:.3g}G"
    assert cells[15:] == ["-", "1.5"]
    # the same work in 0.625 of the time on two ranks; twice the work in 1.25 of it
    assert "| large | strong | 2 | strong | 80% |" in text
    assert "| large | weak | 2 | weak | 80% |" in text

    found = json.loads((tmp_path / "out" / "known.json").read_text())
    compute = found["curves"]["large"][0]["compute"]
    actor, critic = (50 * body + 20 * head, 50 * body)
    # rollout; updates of both models, whose old log-probabilities are the engine's; values
    flops = 64 * (actor / 3 + actor + critic + critic / 3)
    assert compute[0] == pytest.approx(EVERY * flops)
    law = found["sigmoids"]["large"]
    assert law["asymptote"]["value"] == pytest.approx(0.9, abs=0.03)
    assert law["exponent"]["value"] == pytest.approx(2, abs=0.3)
    assert law["midpoint"]["value"] == pytest.approx(8 * compute[0] / EVERY, rel=0.1)
    assert all(one["low"] < one["value"] < one["high"] for one in list(law.values())[:3])
    assert found["power_law"]["half_size"]["low"] < found["power_law"]["half_size"]["high"]
    # 0.2 + 0.7 / (1 + (8 / s)^2) is 0.55 at step 8 and 0.63 at step 10
    assert "| 3 | 50.0% | 100.0% | 45, 45, 45 |" in text


def test_ranks_that_only_sample_train_nothing(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of five ranks sample so fast that the one that trains never waits; and its layout of
    two by tensors need not divide the five.
    """
    apart = "--placement separate --max-staleness 3 --importance-cap 2 --updates-per-rollout 16"
    path = tmp_path / "apart.toml"
    path.write_text(
        'title = "t"\nsource = "s"\ntarget = 0.5\n[paper]\nrecipe = "qwen2.5_0.5b"\n'
        f'flags = "--filter-value 1 {apart}"\n[[models]]\nname = "a"\nflags = ""\nranks = 5\n'
        '[[layouts]]\nname = "one"\nflags = "--rollout-ranks 4"\n[[layouts]]\nname = "two"\n'
        'flags = "--rollout-ranks 3 --tensor-model-parallel-size 2"\n'
    )
    flags = ("--hardware", "H100", "--predict", "--reports", tmp_path)
    code, text = run_study(capsys, path, *flags)
    assert code == 0
    rows = [re.search(rf"^\| a-{name} \|.*$", text, re.M)[0] for name in ("one", "two")]
    one, two = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert one[2:4] == ["5", "1 x 1 x 1, 1"] and two[2:4] == ["5", "2 x 1 x 1, 1"]
    assert float(one[6]) == 0 and one[13] == "-"
    config = parse(["--recipe", "qwen2.5_0.5b"])
    shape = ModelShape.of(model_config(config.model.load))
    peak = max(
        sum(terms.values()) for terms in plan(shape, Setting.from_config(config, 1)).values()
    )
    assert float(one[16]) == pytest.approx(peak / GIB, rel=0.01), "of a rank that trains alone"

    study = Study.read(known[0], "small")
    write_run(tmp_path / "runs", study, "large-alone", 0)
    settings = tmp_path / "runs" / "large-alone-seed0" / "config.json"
    saved = json.loads(settings.read_text())
    saved["parallel"] |= {"placement": "separate", "rollout_ranks": 2}
    settings.write_text(json.dumps(saved))  # one rank trains, and says so of its group
    folders = ("--output", tmp_path / "runs", "--reports", tmp_path / "out")
    code, text = run_study(capsys, known[0], "--report", *folders)
    row = re.search(r"^\| large-alone \|.*$", text, re.M)[0]
    assert code == 0 and [cell.strip() for cell in row.split("|")][3:5] == ["3", "1 x 1 x 1, 1"]


def test_what_was_not_trained_on_is_no_compute(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A filter drops groups whose trajectories earned the same, and keeps fewer than it may."""
    path, study = known
    shape = write_run(tmp_path / "runs", study, "large-alone", 0)
    metrics = tmp_path / "runs" / "large-alone-seed0" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row["filter/kept_groups"] /= 4
        row["update/tokens_per_second"] /= 4
    metrics.write_text("\n".join(map(json.dumps, rows)) + "\n")
    folders = ("--output", tmp_path / "runs", "--reports", tmp_path / "out")
    code, text = run_study(capsys, path, "--report", *folders)
    body, head = flops_of(shape)
    rate = 16 * (2 * 25 * body + 20 * head) / 1.4  # 16 of 64 trajectories, in policy and critic
    assert code == 0 and f"| {rate / 1e9:.3g}G |" in text
    found = json.loads((tmp_path / "out" / "known.json").read_text())
    compute = found["curves"]["large"][0]["compute"]
    actor, critic = (50 * body + 20 * head, 50 * body)
    flops = 64 * actor / 3 + 16 * (actor + critic * (1 + 1 / 3))
    assert compute[0] == pytest.approx(EVERY * flops)


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ("", 0),  # the engine's, which computes as the trainer does
        ("--minibatch-size 64", 0),  # the update's own first pass
        ("--minibatch-size 64 --updates-per-rollout 2 --importance-cap 2", 1),
        ("--old-logprobs recompute", 1),
        ("--kl-coef 0.1 --kl-kind k1", 1),  # the reference's
    ],
)
def test_a_pass_counts_where_there_is_one(flags: str, passes: int) -> None:
    words = [*FILE.split("'''")[1].split(), *flags.split()]
    config = parse(["--recipe", "none", *words])
    shape = ModelShape.of(small_model(config.model, 512))
    speed = Speed(shape, config, 1, Play(1, 30.0, 20.0), {}, 0.0, 64)
    actor, critic = speed.flops(50.0), speed.flops(50.0, is_critic=True)
    updates = config.train.updates_per_rollout
    forward = (64 + 64 * passes) / 3
    flops = forward * actor + 64 * (updates * (actor + critic) + critic / 3)
    assert speed.step_flops == pytest.approx(flops)


def test_on_a_gpu_memory_is_the_peak_of_the_allocator(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, study = known
    write_run(tmp_path / "runs", study, "large-alone", 0)
    metrics = tmp_path / "runs" / "large-alone-seed0" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    kinds = {"allocated": 2.0, "reserved": 5.0, "peak": 4.25, "free": 70.0, "offloaded": 1.0}
    for row in rows:
        del row["memory/train_resident_gib"]
        row |= {f"memory/train_{kind}_gib": value for kind, value in kinds.items()}
        row["memory/sync_peak_gib"] = 3.0
    metrics.write_text("\n".join(map(json.dumps, rows)) + "\n")
    folders = ("--output", tmp_path / "runs", "--reports", tmp_path / "out")
    code, text = run_study(capsys, path, "--report", *folders)
    row = re.search(r"^\| large-alone \|.*$", text, re.M)[0]
    assert code == 0 and row.endswith("| 4.25 |")


def test_runs_of_other_layouts_alone_are_compared_with_none(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, study = known
    write_run(tmp_path / "runs", study, "large-strong", 0)
    folders = ("--output", tmp_path / "runs", "--reports", tmp_path / "out")
    code, text = run_study(capsys, path, "--report", *folders)
    assert code == 0 and "| large-strong |" in text
    assert "under layout `alone`, of which no run has finished; run it" in text
    assert "svg" not in text and not (tmp_path / "out" / "known.svg").exists()
    found = json.loads((tmp_path / "out" / "known.json").read_text())
    assert found["curves"] == {} and "not 0; add models" in found["power_law"]


def test_nothing_is_fitted_to_too_little(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, study = known
    for name in ("small", "large"):
        write_run(tmp_path / "runs", study, f"{name}-alone", 0)
        metrics = tmp_path / "runs" / f"{name}-alone-seed0" / "metrics.jsonl"
        metrics.write_text("\n".join(metrics.read_text().splitlines()[:10]) + "\n")
    folders = ("--output", tmp_path / "runs", "--reports", tmp_path / "out")
    code, text = run_study(capsys, path, "--report", *folders)
    assert code == 0 and "No sigmoid for small: a sigmoid needs at least 6 points" in text
    assert "No power law over sizes: a power law over sizes needs at least 3" in text
    metrics.write_text("\n".join(metrics.read_text().splitlines()[:2]) + "\n")
    code, text = run_study(capsys, path, "--report", *folders)
    assert code == 2 and "large-alone-seed0 must have a step that trained" in text
    assert text.count("\n") == 1
    for argv, said in (
        ((path, "--models", "tiny"), "--models names tiny; study known has small, middle, large"),
        ((path, "--layouts", "alone,tp"), "--layouts names tp; study known has alone, strong"),
        (("filter", "--models", "small"), "study filter has no models and layouts"),
        ((path, "--predict"), "--predict needs to know the GPU; add --hardware"),
        ((path, "--predict", "--hardware", "H9"), "--hardware must be one of"),
        ((path, "--predict", "--hardware", "H100"), "the size of the model is not known"),
    ):
        code, text = run_study(capsys, *argv, *folders)
        assert code == 2 and said in text and text.count("\n") == 1


def test_models_and_layouts_choose_what_runs(
    known: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = known
    lines = tmp_path / "lines.txt"
    flags = ("--slurm", lines, "--output", tmp_path / "runs", "--seeds", 2)
    run_study(capsys, path, *flags)
    names = re.findall(r"--name (\S+)", lines.read_text())
    assert names == [f"{name}-alone-seed{seed}" for seed in (0, 1) for name in SIZES]
    run_study(capsys, path, *flags, "--models", "large", "--layouts", "all")
    words = lines.read_text().splitlines()
    assert [re.search(r"--name (\S+)", one)[1] for one in words] == [
        "large-alone-seed0", "large-strong-seed0", "large-alone-seed1", "large-weak-seed0",
    ]  # fmt: skip
    assert ["--nproc-per-node 2" in one for one in words] == [False, True, False, True]


def test_a_study_may_get_more_arms_and_another_text(known: tuple[Path, Study]) -> None:
    path, study = known
    folder = path.parent / "runs"
    more = path.read_text().replace("nowhere", "somewhere")
    more += '[[layouts]]\nname = "more"\nflags = ""\nranks = 4\n'
    path.write_text(more)
    assert not study_runs.claim_folder(folder, Study.read(path, "small"), "none", mixed=False)
    path.write_text(more.replace("--hidden-size 32", "--hidden-size 40"))
    with pytest.raises(ValueError, match="other study"):
        study_runs.claim_folder(folder, Study.read(path, "small"), "none", mixed=False)


def test_a_report_keeps_the_code_of_the_runs(known: tuple[Path, Study]) -> None:
    path, study = known
    identity = path.parent / "runs" / study_runs.IDENTITY
    state = json.loads(identity.read_text()) | {"code": "older"}
    identity.write_text(json.dumps(state))
    assert study_runs.recorded(identity.parent, study, None, mixed=False)[2] is False
    assert json.loads(identity.read_text()) == state


@pytest.mark.parametrize("name", ["qwen", "pretrained"])
def test_the_predicted_page_is_what_the_tool_writes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run_study(
        capsys, name, "--preset", "paper", "--hardware", "H100", "--predict", "--reports", tmp_path
    )
    assert code == 0
    page = (ROOT / "docs" / "results" / f"{name}_predicted.md").read_text()
    assert (tmp_path / f"{name}_predicted.md").read_text() == page


def test_the_study_of_qwen_has_all_its_recipes() -> None:
    study = Study.read(tool.STUDIES / "qwen.toml", "paper")
    recipes = {path.stem for path in RECIPES.glob("qwen*.flags")}
    assert {arm.model: arm.ranks for arm in study.arms if arm.layout == "recipe"} == {
        name: planned_gpus(name) for name in recipes
    }


def test_the_pretrained_study_is_the_papers() -> None:
    """Model, batch, lengths and arms of arXiv:2504.20073, on a GPU that they fit on."""
    study = Study.read(tool.STUDIES / "pretrained.toml", "paper")
    games, kinds = ("bandit", "sokoban", "frozen_lake"), ("ppo", "grpo", "starpo-s")
    assert [arm.name for arm in study.arms] == [f"{g}-{kind}" for g in games for kind in kinds]
    for arm in study.arms:
        game, _, kind = arm.name.partition("-")
        config = parse(study_runs.flags_of(study, arm, "none"))
        rollout, train, loss = config.rollout, config.train, config.loss
        assert config.model.load == "Qwen/Qwen2.5-0.5B-Instruct" and config.parallel.bf16
        assert (rollout.num_groups, rollout.group_size, train.minibatch_size) == (8, 16, 32)
        assert (train.num_steps, train.updates_per_rollout, train.lr) == (200, 1, 1e-6)
        assert [*config.environment.shares] == [game] and loss.entropy_coef == 0.001
        one_shot = game == "bandit"
        assert rollout.expected_response_length == (500 if one_shot else 400)
        assert config.environment.expected_turns == (1 if one_shot else 5)
        assert config.advantage.uses_critic == (kind != "grpo")
        robust = kind == "starpo-s"
        assert config.filter.num_kept(8) == (2 if robust else 8)
        assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.2, 0.28 if robust else 0.2)
        terms = (config.advantage.kl_reward_coef, loss.kl_coef)
        assert terms == {"ppo": (0.001, 0), "grpo": (0, 0.001), "starpo-s": (0, 0)}[kind]
        shape = ModelShape.of(model_config(config.model.load))
        phases = plan(shape, Setting.from_config(config, 1)).values()
        assert max(sum(terms.values()) for terms in phases) < 72 * GIB, "of an H100's 80"


def test_the_price_of_a_study_counts_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, seeds, and evaluations at the rollout's pace: two of 32 episodes, the last of 64."""
    path = tmp_path / "priced.toml"
    path.write_text(
        'title = "t"\nsource = "s"\n[paper]\nrecipe = "qwen2.5_0.5b"\n'
        'flags = "--num-steps 30 --eval-interval 20 --eval-prompts 32 --eval-samples 2"\n'
        '[[arms]]\nname = "a"\nflags = ""\n[[arms]]\nname = "b"\nflags = "--filter-value 0.5"\n'
    )
    code, text = run_study(
        capsys, path, "--hardware", "H100", "--predict", "--seeds", 4, "--reports", tmp_path
    )
    assert code == 0 and "4 seeds of each" in text

    def cells(start: str, at: int) -> list[str]:
        row = [line for line in text.splitlines() if line.startswith(f"| {start} |")][at]
        return [cell.split(" (")[0].strip() for cell in row.strip("|").split("|")]

    hours = []
    for arm in ("a", "b"):
        rollout, step = float(cells(arm, 0)[6]), float(cells(arm, 0)[11])
        expected = 4 * (30 * step + (32 + 32 + 64) / 128 * rollout) / 3600
        hours.append(float(cells(arm, 1)[2]))
        assert hours[-1] == pytest.approx(expected, rel=0.01)  # three digits are printed
        assert float(cells(arm, 1)[3]) == pytest.approx(3 * expected, rel=0.01)
    assert float(cells("in all", 0)[2]) == pytest.approx(sum(hours), rel=0.01)
