"""Aggregation against hand-computed numbers, and the run directory as another process finds it."""

import html
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory
from ragen_mega.megatron.resharding import Traffic
from ragen_mega.report import metrics
from ragen_mega.report.glossary import GLOSSARY
from ragen_mega.report.metrics import (
    Max,
    Mean,
    Metrics,
    RunLogger,
    Sum,
    read_metrics,
    write_json,
)
from ragen_mega.report.provenance import read_settings
from ragen_mega.report.step_metrics import engine_vs_policy, evaluation_metrics
from ragen_mega.run.guards import UpdateGuard
from ragen_mega.run.log import StepLog
from ragen_mega.run.run import Run
from ragen_mega.run.timers import Timers
from ragen_mega.storage.run_directory import put_back, recover


def logger(directory: Path, **options) -> RunLogger:
    return RunLogger(directory, is_writer=True, **{"tensorboard": False, **options})


def finished_run(directory: Path, steps: int = 3) -> None:
    run = logger(directory)
    run.write_config({"train": {"seed": 1}}, {"host": "here"})
    for step in range(steps):
        run.log(step, {"actor/loss": float(step)})
    run.write_summary({"steps": steps})
    run.close()


class TestMetrics:
    def test_repeated_values_are_averaged_and_keys_are_stage_slash_name(self):
        metrics = Metrics()
        metrics.add("actor", {"loss": 1.0, "kl": torch.tensor(0.5)})
        metrics.add("actor", loss=np.float32(4.0))
        metrics.add("critic", loss=7)
        assert metrics.result() == {"actor/loss": 2.5, "actor/kl": 0.5, "critic/loss": 7.0}
        assert all(type(value) is float for value in metrics.result().values())

    def test_a_mapping_and_names_are_one_call(self):
        metrics = Metrics()
        metrics.add("time", {"rollout": Sum(1.0)}, update=Sum(2.0))
        metrics.add("time", rollout=Sum(0.5), update=Sum(0.25))
        assert metrics.result() == {"time/rollout": 1.5, "time/update": 2.25}

    @given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 1000)), min_size=1, max_size=20))
    def test_weighted_mean_equals_the_mean_over_all_tokens(self, parts):
        metrics = Metrics()
        for value, weight in parts:
            metrics.add("actor", entropy=Mean(value, weight))
        tokens = np.repeat([value for value, _ in parts], [weight for _, weight in parts])
        assert metrics.result()["actor/entropy"] == pytest.approx(tokens.mean(), rel=1e-9, abs=1e-9)

    def test_weight_zero_counts_for_nothing_even_if_its_value_is_nan(self):
        metrics = Metrics()
        metrics.add("actor", entropy=Mean(math.nan, 0))
        assert math.isnan(metrics.result()["actor/entropy"])
        metrics.add("actor", entropy=Mean(3.0, 2))
        assert metrics.result() == {"actor/entropy": 3.0}

    def test_max_keeps_the_largest_and_does_not_hide_nan(self):
        metrics = Metrics()
        for value in (-3.0, -1.0, -2.0):
            metrics.add("mismatch", largest=Max(value))
        assert metrics.result() == {"mismatch/largest": -1.0}
        metrics.add("mismatch", largest=Max(math.nan))
        metrics.add("mismatch", largest=Max(5.0))
        assert math.isnan(metrics.result()["mismatch/largest"])

    def test_a_key_has_one_reduction(self):
        metrics = Metrics()
        metrics.add("time", step=Sum(1.0))
        with pytest.raises(ValueError, match="time/step .* Sum .* Mean"):
            metrics.add("time", step=1.0)


class TestRunLogger:
    def test_files(self, tmp_path):
        directory = tmp_path / "runs" / "a"
        finished_run(directory)
        assert [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ] == [
            {"step": 0, "actor/loss": 0.0},
            {"step": 1, "actor/loss": 1.0},
            {"step": 2, "actor/loss": 2.0},
        ]
        assert json.loads((directory / "config.json").read_text()) == {
            "train": {"seed": 1},
            "provenance": [{"host": "here", "changed": {}}],
        }
        assert json.loads((directory / "summary.json").read_text()) == {"steps": 3}
        (tmp_path / "plain").mkdir()
        assert directory.stat().st_mode == (tmp_path / "plain").stat().st_mode, "the umask's"
        assert sorted(path.name for path in directory.iterdir()) == [
            "config.json",
            "metrics.jsonl",
            "summary.json",
        ]

    def test_other_ranks_touch_nothing(self, tmp_path):
        run = RunLogger(tmp_path / "a", is_writer=False)
        run.write_config({}, {})
        run.log(0, {"x": 1.0})
        run.write_summary({})
        run.close()
        assert not (tmp_path / "a").exists()

    def test_non_finite_values_are_null_with_a_warning_that_names_them(self, tmp_path):
        run = logger(tmp_path / "a")
        with pytest.warns(RuntimeWarning, match="step 0 .*actor/loss = nan, .*grad_norm = inf"):
            run.log(0, {"actor/loss": math.nan, "actor/grad_norm": math.inf, "actor/kl": 1.0})
        line = (tmp_path / "a" / "metrics.jsonl").read_text()
        record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert record == {"step": 0, "actor/loss": None, "actor/grad_norm": None, "actor/kl": 1.0}
        with pytest.warns(RuntimeWarning, match="frozen_lake/success = nan"):
            run.write_summary({"frozen_lake": {"success": math.nan}})
        assert json.loads((tmp_path / "a" / "summary.json").read_text()) == {
            "frozen_lake": {"success": None}
        }

    @pytest.mark.parametrize("finished", [True, False])
    def test_an_existing_run_is_refused_and_left_as_it_was(self, tmp_path, finished):
        finished_run(tmp_path / "a")
        if not finished:
            (tmp_path / "a" / "summary.json").unlink()
        state = "a finished" if finished else "an unfinished"
        with pytest.raises(ValueError, match=f"{state} run; add --overwrite"):
            logger(tmp_path / "a")
        assert len(read_metrics(tmp_path / "a" / "metrics.jsonl")) == 3

    def test_overwrite_deletes_a_run_but_never_a_directory_that_is_none(self, tmp_path):
        finished_run(tmp_path / "a")
        run = logger(tmp_path / "a", overwrite=True)
        assert list((tmp_path / "a").iterdir()) == []
        with run.beginning():
            assert len(list(tmp_path.iterdir())) == 2, "nothing is lost before it has begun"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        (tmp_path / "thesis.tex").write_text("years of work")
        for options in ({}, {"overwrite": True}):
            with pytest.raises(ValueError, match="files that are no run"):
                logger(tmp_path, **options)
        assert (tmp_path / "thesis.tex").exists()

    @pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}])
    def test_a_start_that_is_refused_loses_nothing(self, tmp_path, options):
        finished_run(tmp_path / "a")
        before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
        with pytest.raises(ValueError, match="refused"):
            with logger(tmp_path / "a", **options).beginning():
                raise ValueError("refused")
        assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_start_that_is_killed_loses_nothing(self, tmp_path):
        finished_run(tmp_path / "a")
        logger(tmp_path / "a", overwrite=True)
        assert recover(tmp_path / "a") and not recover(tmp_path / "a")
        assert len(read_metrics(tmp_path / "a" / "metrics.jsonl")) == 3
        logger(tmp_path / "a", overwrite=True).write_config({}, {})
        (tmp_path / "a" / "warm_start").mkdir()
        assert not recover(tmp_path / "a"), "--resume goes on from there"
        with logger(tmp_path / "a", overwrite=True).beginning():
            put_back(tmp_path / "a")
        assert len(read_metrics(tmp_path / "a" / "metrics.jsonl")) == 3

    def test_a_damaged_config_is_named_and_loses_nothing(self, tmp_path):
        finished_run(tmp_path / "a")
        (tmp_path / "a" / "config.json").write_text('{"train": ')
        run = logger(tmp_path / "a", resume=True)
        with pytest.raises(ValueError, match="config.json is no JSON .*manifest.json"):
            run.write_config({}, {})
        assert (tmp_path / "a" / "summary.json").exists()

    def test_resume_drops_what_was_logged_from_its_first_step_on(self, tmp_path):
        finished_run(tmp_path / "a", steps=6)
        run = logger(tmp_path / "a", resume=True)
        with run.beginning():
            assert (tmp_path / "a" / "summary.json").exists()
        assert not (tmp_path / "a" / "summary.json").exists()
        run.drop_from(4)
        run.log(4, {"actor/loss": -4.0})
        run.log(5, {"actor/loss": -5.0})
        losses = [record["actor/loss"] for record in read_metrics(tmp_path / "a" / "metrics.jsonl")]
        assert losses == [0.0, 1.0, 2.0, 3.0, -4.0, -5.0]

    def test_resume_drops_the_events_of_steps_that_come_again(self, tmp_path):
        """Also where nothing happens this time: a lower learning rate ends no warning otherwise."""
        events = tmp_path / "a" / "events.jsonl"
        finished_run(tmp_path / "a", steps=6)
        run = logger(tmp_path / "a", resume=True)
        run.drop_from(2)
        for step in (2, 4, 5):
            run.note(step, f"in {step}")
        run.log(5, {})
        run = logger(tmp_path / "a", resume=True)
        run.drop_from(4)
        run.note(4, "again in 4")
        run.log(4, {"actor/loss": -4.0})
        run.note(5, "at the end")
        run.note(5, "of it")
        told = [(event["step"], event["text"]) for event in read_metrics(events)]
        assert told == [(2, "in 2"), (4, "again in 4"), (5, "at the end"), (5, "of it")]
        run = logger(tmp_path / "a", resume=True)
        run.drop_from(3)
        run.log(3, {"actor/loss": -3.0})
        assert [event["step"] for event in read_metrics(events)] == [2]
        steps = [record["step"] for record in read_metrics(tmp_path / "a" / "metrics.jsonl")]
        assert steps == [0, 1, 3]

    @pytest.mark.parametrize(
        "left", ["", '{"step": 9, "text": "', '{"step": 9, "text": "so"}', "\n"]
    )
    @pytest.mark.parametrize("step", range(11))
    def test_resume_keeps_the_rows_before_its_step_and_writes_nothing_else(
        self, tmp_path, step, left
    ):
        """Some steps have no row and some several, one of 9,000 characters; `left` by a kill."""
        run = logger(tmp_path / "a")
        for at in (0, 2, 2, 3, 3, 3, 7, 8):
            run.note(at, "x" * (9000 if at == 7 else at))
        path = tmp_path / "a" / "events.jsonl"
        path.write_text(path.read_text() + left)
        os.utime(path, ns=(1, 1))
        before, whole = path.stat(), path.read_bytes()
        kept = [record for record in read_metrics(path) if record["step"] < step]
        run.drop_from(step)
        assert path.read_text() == "".join(json.dumps(record) + "\n" for record in kept)
        assert (path.stat().st_mtime_ns == 1) == (path.read_bytes() == whole)
        assert path.stat().st_ino == before.st_ino

    def test_resume_reads_no_rows_that_stay(self, tmp_path, monkeypatch):
        """But the last one: a run has many."""
        finished_run(tmp_path / "a", steps=40)
        read = Mock(side_effect=json.loads)
        monkeypatch.setattr(metrics, "read_json", read)
        logger(tmp_path / "a", resume=True).drop_from(37)
        assert read.call_count == 4
        path = tmp_path / "a" / "metrics.jsonl"
        path.write_text(path.read_text() + 'nonsense\n{"step": 38}\n')
        with pytest.raises(ValueError, match="line 38 .* step, not 'nonsense'"):
            logger(tmp_path / "a", resume=True).drop_from(37)

    def test_resume_begins_a_run_that_is_not_there_and_spares_what_is_none(self, tmp_path):
        logger(tmp_path / "a", resume=True).log(0, {"actor/loss": 1.0})
        assert [record["step"] for record in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [0]
        with pytest.raises(ValueError, match="files that are no run"):
            logger(tmp_path, resume=True)

    def test_a_line_that_was_cut_short_is_dropped_but_only_at_the_end(self, tmp_path):
        finished_run(tmp_path / "a", steps=2)
        path = tmp_path / "a" / "metrics.jsonl"
        path.write_text(path.read_text() + '{"step": 2, "actor/lo')
        assert [record["step"] for record in read_metrics(path)] == [0, 1]
        run = logger(tmp_path / "a", resume=True)
        run.drop_from(2)
        run.log(2, {"actor/loss": 9.0})
        assert [record["step"] for record in read_metrics(path)] == [0, 1, 2]
        path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
        with pytest.raises(ValueError, match="line 2 .* step, not 'nonsense'"):
            read_metrics(path)

    def test_metrics_are_readable_after_a_kill(self, tmp_path):
        script = textwrap.dedent("""
            import sys, time
            from ragen_mega.report.metrics import RunLogger
            run = RunLogger(sys.argv[1], is_writer=True, tensorboard=False)
            run.log(0, {"a/b": 1.0})
            print("logged", flush=True)
            time.sleep(60)
            """)
        process = subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / "a"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "logged\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert read_metrics(tmp_path / "a" / "metrics.jsonl") == [{"step": 0, "a/b": 1.0}]

    def test_tensorboard_holds_the_same_numbers(self, tmp_path):
        run = logger(tmp_path / "a", tensorboard=True)
        run.log(0, {"actor/loss": 0.5})
        with pytest.warns(RuntimeWarning):
            run.log(1, {"actor/loss": math.nan})
        run.log(2, {"actor/loss": 0.25})
        run.close()
        events = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
        assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [
            (0, 0.5),
            (2, 0.25),
        ]

    def test_tensorboard_holds_tables_as_text(self, tmp_path):
        run = logger(tmp_path / "a", tensorboard=True)
        row = (7, True, 0.5, "<|im_start|>user\nUp | Down?")
        run.show("trajectories/lake", ("prompt", "success", "reward", "text"), [row])
        run.log(3, {"rollout/success": 0.5})
        run.log(4, {"rollout/success": 0.5})
        run.close()
        events = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
        (shown,) = events.Tensors("trajectories/lake/text_summary")
        page = markdown_to_safe_html(shown.tensor_proto.string_val[0])  # as TensorBoard shows it
        assert shown.step == 3 and page.count("<th>") == page.count("<td>") == 4
        cell = page.split("<td>")[-1].partition("</td>")[0]
        assert html.unescape(re.sub("<br */?>", "\n", cell)) == row[3]

    def test_tensorboard_holds_the_settings(self, tmp_path):
        run = logger(tmp_path / "a", tensorboard=True)
        run.write_config({"train": {"lr": 0.5, "name": None}, "model": {"tied": True}}, {})
        run.log(0, {"actor/loss": 0.5})
        run.close()
        events = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
        tags = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        start = HParamsPluginData.FromString(tags).session_start_info
        values = {key: MessageToDict(value) for key, value in start.hparams.items()}
        assert values == {"train.lr": 0.5, "train.name": "None", "model.tied": True}
        assert [event.value for event in events.Scalars("actor/loss")] == [0.5]

    def test_a_run_that_goes_on_keeps_how_it_began(self, tmp_path):
        """Settings that were changed come from the latest start, and each step has its own."""
        run = logger(tmp_path / "a")
        run.write_config({"train": {"lr": 0.5, "seed": 1}}, {"first_step": 0})
        for first_step, rate in ((4, 0.25), (8, 0.125)):
            again = logger(tmp_path / "a", resume=True)
            again.write_config({"train": {"lr": rate, "seed": 1}}, {"first_step": first_step})
        recorded = json.loads((tmp_path / "a" / "config.json").read_text())
        assert recorded["train"] == {"lr": 0.125, "seed": 1}
        changes = [start["changed"] for start in recorded["provenance"]]
        assert changes == [{}, {"train.lr": [0.5, 0.25]}, {"train.lr": [0.25, 0.125]}]
        for step, rate in ((0, 0.5), (3, 0.5), (4, 0.25), (7, 0.25), (8, 0.125), (99, 0.125)):
            settings, start = read_settings(tmp_path / "a", step)
            assert (settings["train"]["lr"], settings["train"]["seed"]) == (rate, 1)
            assert start["first_step"] <= step

    def test_wandb_knows_a_run_by_an_id_of_its_own(self, tmp_path, monkeypatch):
        """The real package, offline: runs of one name are two, a run that goes on is one."""
        wandb = pytest.importorskip("wandb", reason="pip install wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")

        table_files = "wandb/offline-run-*/files/media/table/trajectories"

        def play(step, **flags):
            run = logger(tmp_path / "a", wandb_project="starpo", **flags)
            run.write_config({"train": {"lr": 0.5}}, {"first_step": step})
            run.show("trajectories/lake", ("prompt", "text"), [(7, "Up"), (8, "Down")])
            run.log(step, {"actor/loss": 0.25})
            name, settings = wandb.run.id, wandb.run.config["train"]
            run.close()
            file = max((tmp_path / "a").glob(f"{table_files}/lake_*.table.json"))  # the latest
            table = json.loads(file.read_text())
            assert table["columns"] == ["prompt", "text"] and table["data"][1] == [8, "Down"]
            assert settings == {"lr": 0.5}
            return name

        first, goes_on, anew = play(0), play(1, resume=True), play(0, overwrite=True)
        assert first == goes_on != anew
        assert len(list((tmp_path / "a").glob("wandb/offline-run-*"))) == 1


def test_write_json_replaces_whole_files(tmp_path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})

    def broken(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError):
        write_json(tmp_path / "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def test_evaluations_of_several_trained_environments_have_a_mean() -> None:
    unknown = {"reward": 0.5, "random": None, "optimum": 1.0}
    sets = {name: unknown | {"success": x} for name, x in (("a", 0.2), ("b", 0.6), ("c", 1.0))}
    both = evaluation_metrics(sets, ["a", "b"], "initial_")
    assert both.keys() == {"initial_success"} | {
        f"initial_{what}_{name}" for what in ("success", "reward", "optimum") for name in sets
    }
    assert both["initial_success"] == pytest.approx(0.4) and both["initial_success_b"] == 0.6
    one = evaluation_metrics(sets, ["a"])
    assert one.keys() == {"success", "reward", "optimum"} | {
        f"{what}_{name}" for what in ("success", "reward", "optimum") for name in "bc"
    }
    assert one["success"] == 0.2


def test_without_the_result_of_an_added_environment_there_is_no_mean() -> None:
    """A run that was stopped in its first step and goes on with one more environment."""
    found = evaluation_metrics({"a": {"success": 0.2}}, ["a", "b"], "initial_")
    assert found == {"initial_success_a": 0.2}


def test_the_engine_is_compared_with_the_policy_on_what_was_sampled() -> None:
    """k3 estimates KL(engine || policy) from the engine's samples: r - 1 - log r, r = p / q."""
    one, other = Trajectory(group_id=0), Trajectory(group_id=1)
    for trajectory, engine in ((one, [-1.0, -2.0]), (other, [-0.5])):
        trajectory.append_observation([5, 6, 7])
        trajectory.append_action(Completion([8] * len(engine), engine, "stop"))
    batch = pack([one, other])
    policy = torch.full((batch.num_positions,), 9.0)  # what was not sampled is not compared
    policy[batch.loss_mask] = torch.tensor([-1.25, -1.5, -0.5])
    gaps = [-0.25, 0.5, 0.0]
    assert engine_vs_policy(batch, policy) == {
        "logprob_mean_abs_diff": pytest.approx(0.25),
        "logprob_max_abs_diff": pytest.approx(0.5),
        "kl_rollout_old": pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / 3),
    }


def test_means_over_the_tokens_of_a_step_are_of_all_its_minibatches() -> None:
    """Two minibatches of 2 and 18 sampled tokens, 12 and 28 positions, in which known tokens are
    clipped and known positions computed.
    """
    guard = UpdateGuard(None, max_consecutive=1, report=print)
    run = cast(Run, SimpleNamespace(guard=guard))
    log, is_clipped, is_computed = StepLog(0, Timers()), [], []
    for num_sampled, num_clipped in ((2, 2), (18, 1)):
        trajectory = Trajectory(group_id=0, environment="toy", seed=0)
        trajectory.append_observation([1] * 11)
        trajectory.append_action(Completion([2] * num_sampled, [-1.0] * num_sampled, "stop"))
        minibatch = pack([trajectory])
        positions = minibatch.num_positions
        clipped = [index < num_clipped for index in range(num_sampled)]
        computed = [index < 10 for index in range(positions)]
        is_clipped += clipped
        is_computed += computed
        result: dict[str, Any] = {"loss": float(num_sampled), "skipped": 0.0}
        result["clip_fraction"] = np.mean(clipped)
        result["computed_share"] = np.mean(computed)
        Run.check_update(run, "critic", minibatch, result, log)
    found = log.result()
    assert found["critic/clip_fraction"] == pytest.approx(np.mean(is_clipped)) == 3 / 20
    assert found["critic/computed_share"] == pytest.approx(np.mean(is_computed))
    assert found["critic/loss"] == 10.0 and found["critic/skipped"] == 0.0  # of updates


@pytest.mark.parametrize("share", [None, 0.25])
def test_the_rate_of_computed_tokens_is_of_the_actor(share: float | None) -> None:
    """None: its updates wait for the critic's (--critic-warmup)."""
    timers, metrics = Timers(), Metrics()
    metrics.add("critic", computed_share=0.75)
    if share:
        metrics.add("actor", computed_share=share)
    with timers.timed("update"):
        timers.trained_tokens = 1000
    timers.close_step(metrics)
    found = metrics.result()
    expected = share and pytest.approx(share * found["update/tokens_per_second"])
    assert found.get("update/computed_tokens_per_second") == expected


def test_every_number_of_a_sync_has_a_meaning_of_its_own() -> None:
    """The entry of all other times says seconds."""
    traffic = Traffic(pp_bytes=1, seconds=1.0)
    missing = [key for key in traffic.metrics() if f"time/{key}" not in GLOSSARY]
    assert missing == [] and "sync_gbytes_per_second" in traffic.metrics()


def test_numbers_that_json_does_not_have_are_read_as_missing(tmp_path: Path) -> None:
    """An earlier program, or a person, wrote them, and a bad byte; a browser refuses both."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": NaN, "b": -Infinity, "c": "\xff"}\n{"step": 1, "a": 2}\n')
    first, second = read_metrics(path)
    assert first == {"step": 0, "a": None, "b": None, "c": "\ufffd"}
    assert second == {"step": 1, "a": 2}
