"""Ranks and their devices, and what the environment says about ranks."""

import os
import resource
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ragen_mega.commands import command_line, train
from ragen_mega.config import parse
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import _take_device
from ragen_mega.ranks.launcher import forget_foreign_ranks
from ragen_mega.run import nodes
from ragen_mega.run.stop import fail_if_rank_lost
from tests.support.refusals import refused

FOREIGN = [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1"}, {"WORLD_SIZE": "x"}]
"""What a platform may set for programs that are no rank of torchrun."""


def test_a_rank_without_a_gpu_says_so() -> None:
    with pytest.raises(ValueError, match="local rank 1 .* --nproc-per-node 1"):
        _take_device(1, 1, may_share=False)


@pytest.mark.parametrize("platform", FOREIGN)
def test_ranks_that_torchrun_has_not_started_are_not_waited_for(
    platform: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives.stop()
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in platform.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE.*torchrun"):
        collectives.start()


@pytest.mark.parametrize("platform", FOREIGN)
def test_commands_that_start_ranks_name_the_variables(
    platform: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in platform.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ValueError, match="RANK.*WORLD_SIZE"):
        command_line.relaunch(2, "evaluate", [])
    assert "WORLD_SIZE" in refused(capsys, train.main, [])


def test_one_process_that_a_platform_calls_rank_0_of_1_may_start_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    forget_foreign_ranks()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys()
    became = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.append(words))
    monkeypatch.setenv("RANK", "0")
    command_line.relaunch(2, "evaluate", [])
    (words,) = became
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--nnodes") + 1] == "1", "PET_NNODES would ask for others"


def test_an_interface_that_is_not_there_keeps_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives.stop()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    collectives.start()
    assert collectives.world_size() == 1
    collectives.stop()


def test_engines_are_reached_from_an_address_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse("--rollout-engine sglang --engine-addresses elsewhere:1".split())
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(nodes, "address_towards", lambda host: "192.0.2.1")
    with pytest.raises(ValueError, match="elsewhere:1, and connections to it come from 192.0.2.1"):
        nodes.join_job(config)


@pytest.mark.parametrize(
    ("flags", "minutes"),
    [
        ("--environments bandit", 30),
        ("--environments bandit --max-turns 39 --environment-timeout 60", 90),
        ("--environments bandit --environment-timeout 0", 7 * 24 * 60),
        ("--environments agent:mine:play --agent-timeout 2400", 90),
        ("--environments agent:mine:play --agent-timeout 0", 7 * 24 * 60),
        ("--environments bandit --reward https://judge --num-groups 8 --group-size 16", 30),
        ("--environments bandit --reward https://judge --num-groups 64 --group-size 16", 106),
    ],
)
def test_ranks_wait_for_the_slowest_that_flags_allow(
    flags: str, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: two episodes of 40 turns of a minute, with the start; 32 rounds of 3 attempts."""
    waited: list[float] = []
    monkeypatch.setattr(collectives, "start", lambda minutes, **options: waited.append(minutes))
    monkeypatch.setattr(nodes.watch, "begin", lambda *arguments: None)
    monkeypatch.setattr(collectives, "board", lambda: None)
    nodes.join_job(parse(flags.split()))
    assert waited == [minutes]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_control_group_waits_as_long_as_ranks_may_take(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, list[timedelta]] = {"nccl": [], "gloo": []}

    def form(*ranks: object, backend: str, timeout: timedelta, **options: object) -> None:
        limits[backend].append(timeout)

    def join(backend: str, **options: Any) -> None:
        form(backend=backend, **options)

    monkeypatch.setattr(collectives.torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(dist, "new_group", form)
    monkeypatch.setattr(collectives, "_control_group", None)
    monkeypatch.setattr(collectives, "_timeout", None)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    collectives._join(dist.HashStore(), 0, 2, timedelta(minutes=90))
    collectives.consecutive_group(2)
    assert limits == {
        "nccl": [timedelta(minutes=30)] * has_gpu,
        "gloo": [timedelta(minutes=90)] * 2,
    }


def test_nodes_read_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were trained further differ, and a model or a file may be on one node alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    config, facts = parse(["--load", "model", "--tasks", "rows.jsonl"]), []
    for index, weights in enumerate((0, 0, 1)):
        (folder := tmp_path / str(index) / "model").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(1 << 22) + bytes([weights]) * (1 << 22))
        (folder / "notes.md").write_text(str(index))
        (folder.parent / "rows.jsonl").write_text("{}")
        monkeypatch.chdir(folder.parent)
        facts.append(nodes.describe(config))
    assert nodes.disagreement(facts[:2]) is None
    assert "the same files: load is" in (nodes.disagreement(facts) or "")
    (tmp_path / "2" / "rows.jsonl").unlink()
    facts[2] = nodes.describe(config)
    facts[2]["files"]["load"] = facts[0]["files"]["load"]
    said = nodes.disagreement(facts) or ""
    assert "tasks:rows.jsonl is" in said and "not there on node 2" in said


def test_every_file_that_a_run_begins_with_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    (tmp_path / "rows.jsonl").write_text("{}")
    flags = "--load {0} --critic-load {0} --lora-rank 8 --lora-load {0} --sft-file {0}"
    flags += " --sft-steps 1 --prompt-examples 1 --prompt-examples-file {0}"
    flags += " --teacher-prompt-examples 1 --teacher-prompt-examples-file {0} --teacher-load {0}"
    flags += " --reward environment+teacher --boards {0}"
    flags += " --advantage-estimator gae"
    config = parse(flags.format(tmp_path / "rows.jsonl").split())
    facts = [nodes.describe(config)["files"]]
    (tmp_path / "rows.jsonl").unlink()
    facts.append(nodes.describe(config)["files"])
    differ = {name for name in facts[0] if facts[0][name] != facts[1][name]}
    words = flags.replace("-", "_").split()
    assert differ == {flag.strip("_") for flag, path in pairwise(words) if path == "{0}"}


def test_a_rank_that_may_open_no_more_files_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    collectives.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, limits[1]))
    try:
        for _ in range(20):
            dist.new_group(backend="gloo")
    except RuntimeError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pytest.raises(SystemExit):
            fail_if_rank_lost(error)
        assert "ulimit -n" in capsys.readouterr().err
    else:
        pytest.fail("the limit held nothing back")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        collectives.stop()
