"""Success rates and their intervals, against simulation and enumeration."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ragen_mega.commands import evaluate, make_boards
from ragen_mega.config import parse
from ragen_mega.config.rules import Sections
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import TRUNCATED_BY, Episode, EpisodeConfig, failed_turn
from ragen_mega.environments.pool import EnvironmentFailed
from ragen_mega.environments.reference_players import Baselines, wilson_interval
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.held_out import HeldOut, _score, pass_at_k, success_interval
from ragen_mega.rollout.tasks import evaluation_prompts, held_out_note, play_settings
from ragen_mega.run import evaluation
from ragen_mega.run.evaluation import _foreign, _settings
from tests.support.door import ask, play
from tests.support.refusals import refused
from tests.support.small_policy import tiny_qwen2


@pytest.mark.parametrize("samples", [2, 8])
def test_interval_covers_the_expected_success_in_95_of_100_draws(samples: int) -> None:
    # Prompts drawn from a population of difficulties, then episodes from each: what an evaluation
    # does.
    random = np.random.default_rng(0)
    covered, widths = 0, []
    for _ in range(1000):
        chances = random.beta(0.8, 1.2, size=64)  # mean 0.4
        _, low, high = success_interval((random.random((samples, 64)) < chances).T.tolist())
        covered += low <= 0.4 <= high
        widths.append(high - low)
    assert 930 <= covered <= 970
    one_sample = np.subtract(*wilson_interval(0.4 * 64, 64)[::-1])
    assert np.mean(widths) < 0.95 * one_sample  # more samples tell more


def test_interval_of_one_sample_is_wilsons() -> None:
    successes = [[index < 100] for index in range(256)]
    assert success_interval(successes) == pytest.approx(
        (100 / 256, *wilson_interval(100, 256)), abs=2e-4
    )


@pytest.mark.parametrize("won", [False, True])
def test_interval_of_equal_outcomes_counts_prompts(won: bool) -> None:
    assert success_interval([[won] * 8] * 16) == (float(won), *wilson_interval(16.0 * won, 16))


def test_interval_of_one_prompt() -> None:
    """Two samples that differ say little more than one: a prompt is no evidence about others."""
    rate, low, high = success_interval([[True, False]])
    assert rate == 0.5 and (low, high) == pytest.approx(wilson_interval(0.5, 1), abs=0.03)


def width(successes: list[list[bool]]) -> float:
    _, low, high = success_interval(successes)
    return high - low


def test_width_has_no_jump() -> None:
    """Not with the number of prompts of equal rates, whatever the rounding of their mean, nor with
    one more success.
    """
    widths = [width([[True, False, False]] * n) for n in range(2, 65)]
    ratios = np.divide(widths[1:], widths[:-1])
    assert (ratios < 1).all() and (ratios > 0.8).all()
    won = [[[8 * n + k < m for k in range(8)] for n in range(16)] for m in range(129)]
    one_by_one = [width(successes) for successes in won]
    spread = [[[k * 16 + n < m for k in range(8)] for n in range(16)] for m in range(129)]
    evenly = [width(successes) for successes in spread]
    for found in (one_by_one, evenly):
        ratios = np.divide(found[1:], found[:-1])
        assert ratios.min() > 0.8 and ratios.max() < 1.25
    assert np.mean(evenly) < np.mean(one_by_one)


def beta_binomial(chance: float, correlation: float, samples: int) -> list[float]:
    """The probabilities of 0, 1, ... successes of one prompt; correlation is within a prompt."""
    if correlation == 1:
        return [1 - chance, *[0.0] * (samples - 1), chance]
    if correlation == 0:
        return [
            math.comb(samples, won) * chance**won * (1 - chance) ** (samples - won)
            for won in range(samples + 1)
        ]
    a, b = (share * (1 - correlation) / correlation for share in (chance, 1 - chance))

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    return [
        math.comb(samples, won) * math.exp(log_beta(a + won, b + samples - won) - log_beta(a, b))
        for won in range(samples + 1)
    ]


@pytest.mark.parametrize(("prompts", "samples"), [(40, 1), (30, 2), (10, 3), (8, 4)])
def test_coverage_by_enumeration_of_all_outcomes(prompts: int, samples: int) -> None:
    """How many prompts had 0, 1, ... successes, each with its probability. Wilson's interval of
    single samples is the yardstick: no correlation within prompts may cost more than it does.
    """
    outcomes = [
        np.diff([-1, *bars, prompts + samples]) - 1
        for bars in combinations(range(prompts + samples), samples)
    ]
    counts = np.array(outcomes)  # [outcomes, samples + 1]
    rows = [[k < won for k in range(samples)] for won in range(samples + 1)]
    intervals = np.array(
        [
            success_interval([row for row, count in zip(rows, found) for _ in range(count)])[1:]
            for found in outcomes
        ]
    )
    ways = [
        math.lgamma(prompts + 1) - sum(math.lgamma(count + 1) for count in found)
        for found in outcomes
    ]
    chances = np.linspace(0.02, 0.98, 49)

    def coverage(correlation: float) -> list[float]:
        covered = []
        for chance in chances:
            each = np.array(beta_binomial(chance, correlation, samples))
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.where(counts > 0, counts * np.log(each), 0.0).sum(1)
            probabilities = np.exp(np.add(ways, logs))
            assert probabilities.sum() == pytest.approx(1)
            low, high = intervals.T
            is_in = (low <= chance + 1e-12) & (chance <= high + 1e-12)
            covered.append(float(probabilities[is_in].sum()))
        return covered

    yardstick = coverage(1.0)  # samples of a prompt agree: Wilson's interval of the prompts
    assert 0.945 < np.mean(yardstick) < 0.965
    for correlation in (0.0, 0.1, 0.3, 0.7) if samples > 1 else ():
        found = coverage(correlation)
        assert np.mean(found) >= 0.955 and min(found) >= min(yardstick)


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    successes = [[True, False, False, False], [False] * 4, [True, True, False, True]]
    for k in (1, 2, 4):
        subsets = [[any(subset) for subset in combinations(row, k)] for row in successes]
        assert pass_at_k(successes)[f"pass@{k}"] == pytest.approx(
            np.mean([np.mean(row) for row in subsets])
        )


def test_an_evaluation_says_why_an_episode_failed() -> None:
    played = [Trajectory(group_id=0, environment="flaky", seed=3) for _ in range(2)]
    failure = failed_turn(EnvironmentFailed("KeyError: 'x' (in step, a.py:3)"))
    for trajectory, info in zip(played, ({"success": True}, failure.info), strict=True):
        trajectory.append_observation([1])
        trajectory.append_action(Completion([2], [-1.0], "stop")).info.update(info)
    unknown = held_out(parse([]))
    said = str(_score("flaky", [TrajectoryGroup(0, played)], 2, unknown))
    assert "errors closed 1 of 2" in said and said.endswith("KeyError: 'x' (in step, a.py:3)")
    assert "errors" not in str(_score("flaky", [TrajectoryGroup(0, played[:1])], 1, unknown))
    with pytest.raises(ValueError, match=r"flaky must finish .* each of 8; .* seed 3: KeyError"):
        _score("flaky", [TrajectoryGroup(0, played[1:] * 8)], 8, unknown)
    assert _score("flaky", [TrajectoryGroup(0, played[1:] * 7)], 7, unknown).success == 0


def held_out(config: Sections, foreign: str | None = None) -> HeldOut:
    play = play_settings(config, temperature=0.5, seed=0)
    unknown = SimpleNamespace(random=None, optimum=None)
    return HeldOut(config, play, [(0, None)], cast(Baselines, unknown), foreign)


def episode(*turns: Mapping[str, Any], cause: str | None = None, reward: float = 0.0) -> Trajectory:
    """An episode whose turns have these infos, and three tokens each."""
    trajectory = Trajectory(group_id=0, environment="bandit", seed=0)
    for info in turns:
        trajectory.append_observation([1])
        turn = trajectory.append_action(Completion([2] * 3, [-1.0] * 3, "stop"))
        turn.info.update(info)
    trajectory.turns[-1].reward = reward
    if cause:
        trajectory.truncated = True
        trajectory.turns[-1].info[TRUNCATED_BY] = cause
    return trajectory


READ, UNREAD = {"is_format_valid": True}, {"is_format_valid": False}
CUT = UNREAD | {"finish_reason": "length"}


@pytest.mark.parametrize(
    ("episodes", "said"),
    [
        ([episode(CUT)] * 7 + [episode(UNREAD)], "7 of 8 answers were cut.*--max-response-length"),
        ([episode(UNREAD)] * 7 + [episode(CUT)], "8 of 8 answers .*form.*prompt-examples 4"),
        ([episode(READ, cause="context")] * 3, "3 of 3 episodes filled --max-context-length"),
        ([episode(READ, cause="budget")] * 2, "2 of 2 episodes .*--max-turns or --max-actions"),
        (
            [episode(READ, reward=0.5)],
            "answers have the form and are wrong: scores from 0.5 to 0.5",
        ),
    ],
)
def test_a_success_of_zero_says_its_cause(episodes: list[Trajectory], said: str) -> None:
    config = parse(["--load", "own/my-model", "--environments", "bandit"])
    groups = [TrajectoryGroup(0, episodes)]
    result = _score("bandit", groups, len(episodes), held_out(config, "of another world"))
    assert result.why_unsolved is not None
    assert re.fullmatch(f".*{said}.*; of another world", result.why_unsolved)
    assert result.why_unsolved in str(result)
    if "cut" in said:
        assert "--prompt-examples" not in result.why_unsolved
    won = episode(READ | {"success": True}, reward=1.0)
    solved = _score(
        "bandit", [TrajectoryGroup(0, [*episodes, won])], len(episodes) + 1, held_out(config)
    )
    assert solved.why_unsolved is None
    assert f"readable {solved.valid_format_rate:.1%}  score {solved.reward:.3g}" in str(solved)


class Paid:
    """Ends with this reward and info."""

    def __init__(self, reward: float, info: dict[str, Any]) -> None:
        self.end = "over", reward, True, False, info

    def reset(self, seed: int) -> str:
        return "Say it."

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.end


@pytest.mark.parametrize("is_agent", [True, False])
@pytest.mark.parametrize(
    ("reward", "given", "is_said"),
    [
        (0.25, {}, True),
        (10.0, {}, True),
        (1.0, {}, False),
        (0.0, {}, False),
        (-0.5, {}, False),
        (0.25, {"success": False}, False),
        (0.25, {"success": True}, False),
    ],
)
def test_partial_credit_that_counts_as_success_is_said(
    is_agent: bool, reward: float, given: dict[str, Any], is_said: bool
) -> None:
    def run(task: dict[str, Any], client: Any) -> Any:
        ask(client, "go")
        return {"reward": reward} | given if given else reward

    if is_agent:
        (played,) = play(run)
    else:
        world = Episode(cast(Any, Paid(reward, given)), EpisodeConfig(think=False))
        world.start(7)
        result = world.respond("<answer>it</answer>")
        played = replace(episode(result.info, reward=result.reward), environment="paid")
    found = _score(played.environment, [TrajectoryGroup(0, [played])], 1, held_out(parse([])))
    assert found.success == given.get("success", reward > 0) and found.reward == reward
    assert (found.why_solved is not None) == is_said
    if found.why_solved:
        assert found.why_solved in str(found) and f"such as {reward:g} here" in found.why_solved
        assert ("beside the reward" if is_agent else "info of the last step") in found.why_solved


def test_episodes_that_their_environment_ended_tell_nothing_about_answers() -> None:
    """Six of ten could not start, or were lost in their first turn; the others were read."""
    config = parse(["--load", "own/my-model", "--environments", "bandit"])
    lost = failed_turn(EnvironmentFailed("OSError: gone")).info
    groups = [TrajectoryGroup(n, [episode(READ, reward=0.25)]) for n in range(4)]
    groups += [TrajectoryGroup(n, [episode(lost)]) for n in range(4, 10)]
    result = _score("bandit", groups, 1, held_out(config))
    assert result.valid_format_rate == 1.0 and result.reward == 0.25
    assert result.why_unsolved == "answers have the form and are wrong: scores from 0.25 to 0.25"
    assert result.num_prompts == 10 and result.environment_errors == 6 and result.success == 0


def test_a_set_that_a_run_does_not_know_is_played_under_its_limits(tmp_path: Path) -> None:
    recorded = parse(["--recipe", "bandit"]).to_dict()
    for name, rules, expected in (
        ("bandit", {}, None),
        ("lookup", {}, ["--max-turns 1", "--max-actions 1", "words of bandit alone"]),
        ("lookup", {"max_turns": 6, "max_actions": 6}, ["trained on bandit"]),
    ):
        config = _settings(recorded, name, rules)
        said = _foreign(recorded["environment"], name, config, rules)
        assert (said is None) == (expected is None)
        assert all(each in str(said) for each in expected or ())
        assert "--max-turns" not in str(said) or not rules


def test_flags_of_training_set_what_an_evaluation_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is evaluated as the run that these flags begin would evaluate it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(10)))
    given: dict[str, Any] = {}

    def note(load: str, names: list[str], **settings: Any) -> dict[str, Any]:
        given.update(settings, load=load, names=names)
        return {}

    monkeypatch.setattr(evaluation, "evaluate_sets", note)
    flags = ["--tasks", str(rows), "--score", "exact", "--no-think", "--bf16"]
    flags += ["--max-context-length", "700", "--prompt-examples", "1", "--eval-prompts", "4"]
    evaluate.main(["--load", "own/my-model", "--recipe", "smollm2_reverse", *flags])
    trained = parse(["--load", "own/my-model", "--recipe", "smollm2_reverse", *flags])
    assert given["names"] == trained.environment.evaluated == [f"tasks:{rows}"]
    assert (given["num_prompts"], given["samples_per_prompt"], given["temperature"]) == (4, 2, 1)
    played = _settings({}, given["names"][0], given["rules"])
    assert played.environment == trained.environment.located()
    assert (played.rollout, played.parallel) == (trained.rollout, trained.parallel)
    distilled = "--reward teacher --advantage-estimator none --filter-strategy none"
    model = ["--load", "own/my-model", "--environment", "bandit"]
    evaluate.main([*model, *distilled.split(), "--teacher-load", "own/teacher"])
    assert given["names"] == ["bandit"]
    with pytest.raises(SystemExit):
        evaluate.main([*model, "--agent-reward", "a:b"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--environments", "sokoban", "--eval-environments", "bandit,frozen_lake"],
        ["--environment", "sokoban,bandit,frozen_lake"],
    ],
)
def test_boards_are_for_trained_environments(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, played = saved_model(tmp_path / "model", spare_rows=8), {}
    (board,) = make_boards.draw_boards("sokoban", {}, 5000, 1)
    (tmp_path / "rooms.jsonl").write_text(json.dumps(board))

    def note(engine: object, renderer: object, console: object, sets: dict, **_: object) -> dict:
        return played.setdefault("sets", sets) and {}

    monkeypatch.setattr(evaluation, "evaluate_each", note)
    boards = ["--boards", str(tmp_path / "rooms.jsonl"), "--num-prompts", "2"]
    evaluate.main(["--load", str(directory), *boards, *flags])
    prompts = {name: each.prompts for name, each in played["sets"].items()}
    lake = evaluation_prompts(parse([]).environment, "frozen_lake", 2)
    assert [*prompts] == ["sokoban", "bandit", "frozen_lake"]
    assert [seed for seed, _ in prompts["sokoban"]] == [board["seed"]]
    assert [rows for _, rows in prompts["bandit"]] == [None, None]
    assert prompts["frozen_lake"] == lake and len(lake) == 2


def test_sets_beside_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(parse(["--recipe", "sokoban"]).to_dict()))
    played: list[str] = []

    def note(load: str, names: list[str], **settings: Any) -> dict[str, Any]:
        assert settings["boards"] == {"sokoban": None}
        return played.extend(names) or {}

    monkeypatch.setattr(evaluation, "evaluate_sets", note)
    evaluate.main(["--load", str(tmp_path), "--eval-environments", "bandit,frozen_lake"])
    assert played == ["sokoban", "bandit", "frozen_lake"]


def test_fewer_held_out_rows_than_asked_for_are_said(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(10)))
    name = f"tasks:{rows}"
    config = parse(["--tasks", str(rows)]).environment
    found = len(evaluation_prompts(config, name, 4))
    assert found == 1
    said = held_out_note(name, found, 4)
    assert said and f"{name}: 1 of the 4 asked for" in said and "validation_share" in said
    assert "--eval-prompts" not in said, "a flag of training alone, and evaluations ask too"
    assert held_out_note(name, 4, 4) is None


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--environment-options", "[]", "environment_options .* JSON object, not '\\[\\]'"),
        ("--environment-options", "{", "environment_options .* JSON object, not '{'"),
        ("--environment-options", '{"bandit": 1}', "environment_options must map"),
        (
            "--environment-options",
            '{"bandti": {"high_reward": 2}}',
            "environment_options names bandti, .*write bandit",
        ),
        ("--temperature", "-1", "temperature .*at least 0.* -1.0; set --temperature$"),
        ("--temperature", "nan", "temperature .*finite.* nan"),
        ("--num-prompts", "0", "num_prompts .*at least 1, not 0; set --num-prompts$"),
        ("--samples-per-prompt", "0", "samples_per_prompt .*not 0; set --samples-per-prompt$"),
        ("--eval-prompts", "0", "eval_prompts .*at least 1, not 0; set --eval-prompts$"),
    ],
)
def test_bad_flags_are_one_line(
    flag: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--load", str(tmp_path), "--environment", "bandit", flag, value)
    assert re.match(f"error: {said}", refused(capsys, evaluate.main, [*flags]))


def test_an_unknown_world_is_said_of_the_flag_that_named_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["--load", "own/my-model", "--environment", "bandit,banditt"])
    assert "error: --environment: unknown environment 'banditt'" in capsys.readouterr().err


def test_options_of_one_set_leave_the_others_those_of_the_run(tmp_path: Path) -> None:
    own = {"sokoban": {"observation": "cells"}, "frozen_lake": {"observation": "cells"}}
    names = ["--environments", "sokoban,frozen_lake"]
    config = parse([*names, "--environment-options", json.dumps(own)])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "huggingface").mkdir()
    given = {"environment_options": '{"frozen_lake": {"success_rate": 0.5}}'}
    recorded = config.to_dict()
    for rules, lake in (({}, own["frozen_lake"]), (given, {"success_rate": 0.5})):
        found = {name: _settings(recorded, name, rules).environment.options(name) for name in own}
        assert found == {"sokoban": own["sokoban"], "frozen_lake": lake}
    assert given == {"environment_options": '{"frozen_lake": {"success_rate": 0.5}}'}


@pytest.mark.parametrize("file", ["huggingface", "summary.json"])
def test_a_run_without_a_policy_is_told_how_to_get_one(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a run that goes on after its end, whose policy of before is there."""
    if file == "summary.json":
        (tmp_path / "huggingface").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(parse([]).to_dict()))
    with pytest.raises(SystemExit):
        evaluate.main(["--load", str(tmp_path)])
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert said.startswith(f"error: --load {tmp_path} is a run that has no policy yet ({file}")
    assert f"ragen-mega convert --from {tmp_path} --to" in said


def saved_model(directory: Path, *, spare_rows: int = 0, positions: int = 64) -> Path:
    tokenizer = train_tokenizer(["system user assistant first second third"])
    model = tiny_qwen2(len(tokenizer) + spare_rows)
    model.config.max_position_embeddings = positions
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def test_a_tokenizer_beyond_the_embedding_is_refused_before_anything_is_played(
    tmp_path: Path,
) -> None:
    directory = saved_model(tmp_path, spare_rows=-1)
    with pytest.raises(ValueError, match="the tokenizer of .* has the id .* copy the tokenizer"):
        evaluation.evaluate(directory, "bandit")


@pytest.mark.parametrize(("positions", "expected"), [(64, 64), (5000, 3600)])
def test_no_episode_is_longer_than_the_positions_of_the_model(
    positions: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, played = saved_model(tmp_path, spare_rows=8, positions=positions), {}

    def note(engine: object, renderer: object, console: object, sets: dict, **_: object) -> dict:
        return played.setdefault("sets", sets)

    monkeypatch.setattr(evaluation, "evaluate_each", note)
    evaluation.evaluate_sets(directory, ["bandit", "frozen_lake"], num_prompts=1)
    lengths = {each.settings.max_context_length for each in played["sets"].values()}
    assert lengths == {expected}
    said = f"episodes end at {positions} tokens, the positions of {directory}" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert said == (positions < 3600)
