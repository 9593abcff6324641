"""The tables of names: what they list, what a user may put in their place, and how a bad one is
refused; rewards, filters and metrics of the user's.
"""

import inspect
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ragen_mega.algorithm.filters import filter_groups
from ragen_mega.algorithm.rewards import shape_rewards, shape_trajectory
from ragen_mega.algorithm.tables import (
    ESTIMATORS,
    FILTERS,
    METRICS,
    OPTIONS,
    REWARDS,
    Estimator,
    Filter,
    PlugInError,
    find_estimator,
    parse_reward,
)
from ragen_mega.config import AdvantageConfig, FilterConfig, LoggingConfig, StarPOConfig, parse
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.report.step_metrics import custom_metrics, filter_metrics
from ragen_mega.run.check import check_environments

SHIPPED = {
    ESTIMATORS: "gae bilevel_gae grpo dr_grpo rloo reinforce_plus_plus none",
    FILTERS: "none top_fraction top_p_linear top_p_softmax top_k min_p",
    REWARDS: "environment success format response_length",
    METRICS: "distinct_responses",
}
TABLES = tuple(SHIPPED)
ROOT = Path(__file__).parents[2]


def play(group_id, *turns, success=False):
    """One trajectory of (reward, sampled tokens, well-formed) turns."""
    trajectory = Trajectory(group_id, environment="bandit")
    for reward, size, is_valid in turns:
        trajectory.append_observation([0, 0])
        turn = trajectory.append_action(Completion([1] * size, [-1.0] * size, "stop"))
        turn.reward, turn.info = reward, {"is_format_valid": is_valid, "success": False}
    trajectory.turns[-1].info["success"] = success
    return trajectory


def groups():
    return [
        TrajectoryGroup(
            3,
            [
                play(3, (1.0, 2, True), (-0.1, 4, False), success=True),
                play(3, (0.0, 3, True)),
            ],
        ),
        TrajectoryGroup(4, [play(4, (0.5, 1, False)), play(4, (0.5, 5, True), (2.0, 1, True))]),
    ]


def test_names_are_checked_without_torch():
    script = """
import sys
from ragen_mega.config import parse
parse("--advantage-estimator bilevel_gae --reward-placement turn --filter-strategy min_p".split()
      + ["--filter-value", "0.5", "--reward", "environment + 0.1*format",
         "--metrics", "distinct_responses"])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120)
    assert done.returncode == 0


def test_everything_listed_can_be_had_and_declares_its_options():
    for name in SHIPPED[ESTIMATORS].split():
        declared = find_estimator(name)
        parameters = inspect.signature(ESTIMATORS.get(declared.function)).parameters.values()
        options = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        assert set(declared.options) == set(options) & set(OPTIONS), name
    for name in SHIPPED[FILTERS].split():
        assert callable(FILTERS.get(FILTERS.get(name).function))
    for table in (REWARDS, METRICS):
        assert all(callable(table.get(name)) for name in SHIPPED[table].split())


def test_help_lists_what_ships(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    printed = capsys.readouterr().out
    for table, names in SHIPPED.items():
        assert table.flag in printed
        for name in names.split():
            assert name in table.names() and name in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--advantage-estimator", "gea"), "did you mean gae"),
        (("--filter-strategy", "best"), "group filter:? 'best'.* top_fraction"),
        (("--reward", "environment + fromat"), "did you mean format"),
        (("--metrics", "distinct_response"), "did you mean distinct_responses"),
        (("--advantage-estimator", "no.such.module:thing"), "cannot import no.such.module:thing"),
        (("--filter-strategy", "numpy:thing"), "cannot import numpy:thing .* has no attribute"),
        (("--metrics", "numpy:sqrt,:"), "cannot import :"),
        (("--metrics", "numpy:pi"), "numpy:pi must be a function or class, not 3.14"),
        (("--reward", "numpy:pi"), "numpy:pi must be a function or class"),
        (("--reward", "os:system"), "os:system must be of a module of yours"),
        (("--metrics", "psutil:os.system"), "and posix is Python's own"),
        (("--environments", "subprocess:Popen"), "subprocess is Python's own"),
        (("--reward", ""), "a sum of distinct terms"),
        (("--reward", "environment environment"), "a sum of distinct terms"),
        (("--reward", "environment + environment"), "a sum of distinct terms"),
        (("--reward", "2*3*format"), "a sum of distinct terms"),
        (("--reward", "1e999*format"), "a sum of distinct terms"),
        (("--reward", "environment +"), "a sum of distinct terms"),
        (("--reward", "http://127.0.0.1:port/score"), "address of a judge .Port could not be"),
        (("--reward", "environment - http://[::1/score"), "address of a judge .Invalid IPv6 URL"),
        (("--reward", "http:///score"), "address of a judge .no host or port"),
        (
            ("--filter-strategy", "top_k", "--filter-value", "9"),
            r"whole number of groups in 1\.\.8",
        ),
        (("--filter-strategy", "top_k", "--filter-value", "1.5"), "whole number of groups"),
        (("--filter-strategy", "min_p", "--filter-value", "1.5"), r"must be in \(0, 1\], not 1.5"),
        (("--filter-strategy", "none", "--filter-keep-zero"), "filter_keep_zero does nothing"),
    ],
)
def test_bad_names_are_one_line(flags, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_environments(parse(list(flags)).environment)
    assert "\n" not in str(caught.value)


def test_parse_reward():
    assert parse_reward("environment") == {"environment": 1.0}
    terms = parse_reward(" environment+.5 *format - 1e-3*response_length + -2*success ")
    assert terms == {"environment": 1, "format": 0.5, "response_length": -1e-3, "success": -2}
    REWARDS.register("test_none", lambda trajectory: 0.0)
    assert parse_reward("-test_none + 0*environment") == {"test_none": -1.0, "environment": 0.0}


def test_a_declared_plug_in_gets_the_rules_of_its_declaration():
    ESTIMATORS.register("test_critic", Estimator(lambda inputs: None, uses_critic=True))
    assert parse(["--advantage-estimator", "test_critic", "--critic-warmup", "2"])
    ESTIMATORS.register("test_whole", Estimator(lambda inputs: None, level="trajectory"))
    for flags, message in (
        ("--critic-warmup 2", "has no critic"),
        ("--reward-placement turn", "compares whole returns"),
        ("--kl-in-reward k1 --kl-reward-coef 1", "uses whole returns"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(["--advantage-estimator", "test_whole", *flags.split()])
    single = ["--group-size", "1", "--filter-strategy", "none"]
    assert parse(["--advantage-estimator", "test_whole", *single])
    FILTERS.register("test_share", Filter(lambda returns, **_: [], value="share"))
    with pytest.raises(ValueError, match="needs its value"):
        parse(["--filter-strategy", "test_share"])


def test_entry_points_fill_the_tables(tmp_path, monkeypatch):
    """A package that is installed beside ours: its metadata name what its module holds."""
    (tmp_path / "neighbour.py").write_text(
        "def mine(inputs):\n    return inputs.rewards, None\n"
        "def last(returns, *, value, keep_zero):\n    return [len(returns) - 1]\n"
        "def turns(trajectory):\n    return -len(trajectory.turns)\n"
        "def count(groups):\n    return {'groups': len(groups)}\n"
    )
    installed = tmp_path / "neighbour-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: neighbour\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[ragen_mega.advantage_estimators]\nnear = neighbour:mine\n"
        "[ragen_mega.group_filters]\nnear = neighbour:last\n"
        "[ragen_mega.rewards]\nnear = neighbour:turns\n"
        "[ragen_mega.metrics]\nnear = neighbour:count\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert all("near" in table.names() for table in TABLES)
    config = parse(
        "--advantage-estimator near --filter-strategy near --reward near --metrics near".split()
    )
    assert not config.advantage.uses_critic and config.advantage.estimator.options == ()
    kept = filter_groups(groups(), strategy="near", value=None, keep_zero=False)
    assert [one.group_id for one in kept] == [4]
    shaped, logged = shape_rewards(groups(), config.advantage.reward_terms)
    assert logged.pop("success_ranking") == pytest.approx(1 / 6)
    assert logged == {"near": -1.5, "total": -1.5, "inverted": 0.0}
    assert [one.total_reward for one in shaped[0].trajectories] == [-2.0, -1.0]
    assert custom_metrics(groups(), config.logging.metric_names) == {"groups": 2.0}


def test_run_directories_have_no_colon(tmp_path, monkeypatch):
    (tmp_path / "credit_of_mine.py").write_text("def flat(inputs):\n    return None\n")
    monkeypatch.chdir(tmp_path)
    config = parse(["--advantage-estimator", "credit_of_mine:flat"])
    assert config.run_directory == Path("runs/frozen_lake-credit_of_mine.flat-seed0")
    assert StarPOConfig.from_dict(config.to_dict()) == config


def test_shipped_rewards():
    first, second = groups()[0].trajectories
    expected = {
        "environment": ([1.0, -0.1], [0.0]),
        "success": ([0.0, 1.0], [0.0]),
        "format": ([0.5, 0.0], [1.0]),
        "response_length": ([2.0, 4.0], [3.0]),
    }
    for name, rewards in expected.items():
        for trajectory, own in zip((first, second), rewards):
            shaped = shape_trajectory(trajectory, {name: 2.0})
            assert [turn.reward for turn in shaped.turns] == pytest.approx([2 * r for r in own])


def test_shaping_adds_weighted_terms_and_leaves_what_was_played():
    before = groups()
    terms = parse_reward("environment + 0.5*format - 0.1*response_length + 0*success")
    shaped, logged = shape_rewards(before, terms)
    assert before == groups(), "the rollout on the disk is this"
    totals = [
        sum(turn.reward - 0.1 * (turn.end - turn.start) for turn in one.turns)
        + 0.5 * statistics.mean(turn.info["is_format_valid"] for turn in one.turns)
        for group in before
        for one in group.trajectories
    ]
    assert [t for group in shaped for t in group.total_rewards] == pytest.approx(totals)
    assert logged == pytest.approx(
        {
            "environment": (0.9 + 0.0 + 0.5 + 2.5) / 4,
            "format": 0.5 * (0.5 + 1 + 0 + 1) / 4,
            "response_length": -0.1 * (6 + 3 + 1 + 6) / 4,
            "success": 0.0,
            "total": statistics.mean(totals),
            "success_ranking": 2 / 3,
            "inverted": 0.0,
        }
    )
    for group, own in zip(shaped, before):
        assert group.group_id == own.group_id
        for one, played in zip(group.trajectories, own.trajectories):
            assert one.success == played.success and one.tokens == played.tokens
            for turn in one.turns:
                assert turn.reward == pytest.approx(sum(turn.info["rewards"].values()))


def test_the_default_reward_changes_nothing():
    played = groups()
    shaped, logged = shape_rewards(played, parse([]).advantage.reward_terms)
    assert logged == {} and all(one is own for one, own in zip(shaped, played))


@pytest.mark.parametrize(
    "answer", [3, 3.0, np.float32(3), torch.tensor(3.0), [0, 3.0], (0, 3), torch.tensor([0, 3])]
)
def test_a_reward_may_be_any_number_or_one_per_turn(answer):
    name = f"test_answer_{type(answer).__name__}_{id(answer)}"
    REWARDS.register(name, lambda trajectory: answer)
    trajectory = groups()[0].trajectories[0]
    shaped = shape_trajectory(trajectory, {name: 1.0})
    assert [turn.reward for turn in shaped.turns] == [0.0, 3.0]


def fails(_):
    raise LookupError("no such\nkey")


@pytest.mark.parametrize(
    "answer",
    [
        math.nan,
        math.inf,
        1e31,
        [10**400],
        None,
        "much",
        [1.0],
        [1.0, 2.0, 3.0],
        [[1.0], [2.0]],
        {},
        fails,
    ],
)
def test_bad_rewards_are_one_line(answer):
    name = f"bad_reward_{type(answer).__name__}_{id(answer)}"
    REWARDS.register(name, fails if answer is fails else lambda trajectory: answer)
    with pytest.raises(
        PlugInError, match=f"reward {name} (must return a number of at most|failed:)"
    ) as caught:
        shape_rewards(groups(), {"environment": 1.0, name: 1.0})
    assert "\n" not in str(caught.value)


class OfAUser(Exception):
    """An error of a kind that nobody else knows."""


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(3),
        ImportError("x"),
        EOFError(),
        subprocess.TimeoutExpired("x", 1),
        OfAUser("no"),
    ],
    ids=repr,
)
def test_an_error_of_any_kind_is_one_line(error: Exception) -> None:
    def raises(_: object) -> float:
        raise error

    name = f"raises_{type(error).__name__}"
    REWARDS.register(name, raises)
    with pytest.raises(PlugInError, match=f"{name} failed: {type(error).__name__}"):
        shape_rewards(groups(), {name: 1.0})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 0], r"distinct indices in 0\.\.1"),
        ([2], r"distinct indices in 0\.\.1"),
        ([-1], "distinct indices"),
        ([0.5], "distinct indices"),
        (None, "distinct indices"),
        (fails, "failed: LookupError: no such key"),
    ],
)
def test_bad_filters_are_one_line(answer, message):
    name = f"bad_filter_{type(answer).__name__}_{id(answer)}"
    FILTERS.register(name, lambda returns, **_: fails(0) if answer is fails else answer)
    with pytest.raises(PlugInError, match=f"group filter {name} .*{message}") as caught:
        filter_groups(groups(), strategy=name, value=None, keep_zero=False)
    assert "\n" not in str(caught.value)


def test_a_filter_of_the_users_gets_raw_returns_and_cannot_keep_constant_groups():
    asked = []

    def everything(returns, *, value, keep_zero):
        asked.append((returns, value, keep_zero))
        return torch.arange(len(returns)).flip(0)

    FILTERS.register("test_everything", everything)
    played = [*groups(), TrajectoryGroup(5, [play(5, (1.0, 1, True)), play(5, (1.0, 1, True))])]
    for keep_zero, ids in ((False, [3, 4]), (True, [3, 4, 5])):
        kept = filter_groups(played, strategy="test_everything", value=0.5, keep_zero=keep_zero)
        assert [one.group_id for one in kept] == ids
    assert asked == [([[0.9, 0.0], [0.5, 2.5], [1.0, 1.0]], 0.5, keep) for keep in (False, True)]


def test_a_filter_may_leave_one_trajectory_of_every_group():
    """The best of N, of which no spread can be told."""
    best = Filter(
        lambda returns, **_: [[own.index(max(own))] for own in returns],
        within_groups=True,
        drops_constant=False,
    )
    FILTERS.register("test_best", best)
    kept = filter_groups(groups(), strategy="test_best", value=None, keep_zero=False)
    assert [one.total_rewards for one in kept] == [[max(g.total_rewards)] for g in groups()]
    logged = filter_metrics(groups(), kept)
    assert logged == {"kept_groups": 2.0, "kept_fraction": 1.0, "constant_groups": 0.0}


def test_metrics_of_the_users():
    METRICS.register("test_mean", lambda groups: torch.tensor(2.5))
    METRICS.register("test_more", lambda groups: {"a": 1, "b": np.float64(2)})
    names = ["test_mean", "distinct_responses", "test_more"]
    expected = {"test_mean": 2.5, "distinct_responses": 1.0, "a": 1.0, "b": 2.0}
    assert custom_metrics(groups(), names) == expected
    assert custom_metrics(groups(), []) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (math.nan, "must return a finite number"),
        (None, "must return a finite number"),
        (np.array([1.0, 2.0]), "must return a finite number"),
        (torch.tensor([1.0, 2.0]), "must return a finite number"),
        pytest.param(10**400, "must return a finite number", id="more than a float"),
        ({"a": "b"}, "'a': 'b'"),
        ({1: 2.0}, "must return a finite number"),
        ({"test_taken": 1.0}, "names of its own, not 'test_taken': 1.0"),
        (fails, r"failed: LookupError: no such key \(.*test_tables.py"),
    ],
)
def test_bad_metrics_are_one_line(answer, message):
    if "test_taken" not in METRICS.names():
        METRICS.register("test_taken", lambda groups: 1.0)
    name = f"bad_metric_{type(answer).__name__}_{id(answer)}"
    METRICS.register(name, fails if answer is fails else lambda groups: answer)
    with pytest.raises(PlugInError, match=f"metric {name}.*{message}") as caught:
        custom_metrics(groups(), ["test_taken", name])
    assert "\n" not in str(caught.value)


def tempered(inputs, *, temperature):
    return inputs.rewards, None


def ranked(returns):
    return [0]


def compared(trajectory, other):
    return 0.0


def counted():
    return 0.0


@pytest.mark.parametrize(
    ("section", "flag", "function", "called"),
    [
        (AdvantageConfig, "advantage_estimator", tempered, r"\(inputs\).* 'temperature'"),
        (FilterConfig, "filter_strategy", ranked, r"\(returns, value=..., keep_zero=...\)"),
        (AdvantageConfig, "reward", compared, r"\(trajectory\).* 'other'"),
        (LoggingConfig, "metrics", counted, r"\(groups\), and takes \(\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(section, flag, function, called):
    name = f"{__name__}:{function.__name__}"
    with pytest.raises(ValueError, match=f"{name} is called with {called}.*extending") as caught:
        section(**{flag: name})
    assert "\n" not in str(caught.value) and not isinstance(caught.value, PlugInError)
    AdvantageConfig(reward="environment - 2*numpy:sum")


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="registered already"):
        ESTIMATORS.register("gae", lambda inputs: None)
    with pytest.raises(ValueError, match="colon"):
        METRICS.register("a:b", lambda groups: 0.0)
