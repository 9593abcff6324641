"""Plug-ins as a user has them: a module in the working directory that flags name, with nothing of
the package touched.
"""

import json
import shlex
from pathlib import Path

import pytest

from ragen_mega.train import main
from tests.support.forked_ranks import on_ranks

ROOT = Path(__file__).parents[2]
FLAGS = """
    --recipe none --environments bandit --prompt-style compact --max-turns 2 --num-steps 2
    --max-response-length 8 --max-context-length 120 --hidden-size 16 --ffn-hidden-size 32
    --num-layers 1 --num-groups 4 --group-size 4 --minibatch-size 4 --lr 1e-3 --eval-prompts 2
    --eval-samples 1 --eval-interval 0 --warm-start-first-turn-steps 2 --warm-start-steps 2
    --warm-start-trajectories 8 --diagnose-interval 1
""".split()
MODULE = '''
"""What a user of the trainer writes."""
import torch


def centred(inputs, *, gamma):
    """Returns less the mean of the batch."""
    assert gamma == 0.9
    return inputs.per_token(inputs.scores - inputs.scores.mean()), None


def first_two(returns, *, value, keep_zero):
    assert len(returns) == 4 and all(len(group) == 4 for group in returns)
    return [0, 1]


def token_sum(trajectory):
    return [sum(trajectory.tokens[turn.start : turn.end]) % 5 for turn in trajectory.turns]


def turns(groups):
    counts = [len(one.turns) for group in groups for one in group.trajectories]
    return {"turns_mean": torch.tensor(counts).double().mean(), "turns_max": max(counts)}


def no_pair(inputs):
    return inputs.scores


def nameless(groups):
    return {"turns": float("nan")}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's: a module, and the working directory."""
    (tmp_path / "of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.forks
def test_a_module_in_the_working_directory_fills_every_table(folder: Path) -> None:
    plugged = """
        --advantage-estimator of_mine:centred --gamma 0.9 --filter-strategy of_mine:first_two
        --filter-keep-zero --metrics of_mine:turns,distinct_responses
    """.split()
    reward = "environment + 0.5*format + 2*of_mine:token_sum - 0.01*response_length"
    on_ranks(lambda: main([*FLAGS, *plugged, "--reward", reward]), 2)
    run = folder / "runs" / "bandit-of_mine.centred-seed0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["filter/kept_groups"] == 2
        assert row["custom/turns_mean"] == row["rollout/num_turns"] <= row["custom/turns_max"] <= 2
        assert 0 < row["custom/distinct_responses"] <= 1
        parts = [row[f"reward/{name}"] for name in
                 ("environment", "format", "of_mine:token_sum", "response_length")]  # fmt: skip
        assert row["reward/total"] == pytest.approx(sum(parts))
        assert parts[0] == row["rollout/reward"] and 0 < parts[2] <= 2 * 2 * 4
        assert parts[3] == pytest.approx(-0.01 * row["rollout/sampled_tokens"] / 16)
        assert row["rollout/success"] is not None and row["collapse/max_mutual_information"] >= 0
        assert row["actor/loss"] is not None and "critic/loss" not in row
    config = json.loads((run / "config.json").read_text())
    assert config["advantage"]["reward"] == reward


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--advantage-estimator of_mine:gone", "cannot import of_mine:gone"),
        ("--advantage-estimator of_mine:no_pair", "of_mine:no_pair must return (advantages"),
        ("--metrics of_mine:nameless", "of_mine:nameless must return"),
    ],
)
def test_a_bad_plug_in_ends_the_run_with_one_line(
    folder: Path, flags: str, message: str, capfd: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as left:
        main([*FLAGS, "--filter-strategy", "none", *flags.split()])
    assert left.value.code == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0]
    assert "--lr" not in errors[0], "nothing has diverged"


def test_the_page_about_extending_says_what_works(folder: Path, capfd) -> None:
    """Module and flags of docs/extending.md, as they stand there."""
    page = (ROOT / "docs/extending.md").read_text()
    module = page.partition("<<'PYTHON'\n")[2].partition("\nPYTHON\n")
    (folder / "mine.py").write_text(module[0])
    command = module[2].partition("```")[0].replace("\\\n", " ")
    script, *flags = shlex.split(command.removeprefix("bash "))
    assert (ROOT / script).exists()
    main([*FLAGS, *flags, "--name", "page"])
    rows = (folder / "runs/page/metrics.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    assert first["custom/most_turns"] in (1, 2) and first["reward/mine:few_turns"] < 0
