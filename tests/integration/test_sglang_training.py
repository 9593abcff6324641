"""Training with the real SGLang server on a CPU: several ranks that share it, under every cut of
trainer and server.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from ragen_mega.data.types import VERSION, Completion
from ragen_mega.engines.sglang import supervisor
from ragen_mega.engines.sglang.engine import SGLangEngine, SGLangFollower
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.forked_ranks import join_ranks, on_ranks
from tests.support.processes import command_of, wait_until
from tests.support.runs import start_ranks
from tests.support.sglang_server import (
    CONFIG,
    PYTHON,
    build_model,
    check_logprobs,
    converse,
    converse_all,
    needs_sglang,
    settings,
)
from tests.support.training import FLAGS, launch, read_metrics

pytestmark = [*needs_sglang, pytest.mark.forks]
SERVER = ("--rollout-engine", "sglang", "--sglang-python", str(PYTHON))
SMALL_BUCKETS = 32 * 1024
SHORT = """
    --num-steps 2 --num-groups 2 --eval-interval 0 --eval-prompts 2 --eval-samples 1
    --warm-start-first-turn-steps 20 --warm-start-steps 10 --warm-start-trajectories 40
""".split()
"""What is played besides the steps costs most of the time of a small run."""


TWO_RANKS = (
    "--tensor-model-parallel-size 2 --rollout-tensor-parallel-size 2 --weight-transfer ipc",
    "--tensor-model-parallel-size 2 --rollout-tensor-parallel-size 2",
    "--pipeline-model-parallel-size 2 --rollout-tensor-parallel-size 2",
    "--rollout-tensor-parallel-size 2",
    "--tensor-model-parallel-size 2",
)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--weight-transfer ipc"),
        *(pytest.param(2, flags, marks=pytest.mark.slow) for flags in TWO_RANKS),
    ],
)
def test_the_server_follows_the_trainer(ranks: int, flags: str, tmp_path: Path) -> None:
    run = launch(tmp_path, ranks, *SERVER, *SHORT, *flags.split())
    rows = read_metrics(run)
    assert len(rows) == 2  # the second from weights that have changed
    is_gathered = flags == "--tensor-model-parallel-size 2"
    for row in rows:
        assert row["mismatch/logprob_max_abs_diff"] < 1e-4
        assert (row["time/sync_gbytes_tensor"] > 0) == is_gathered
        assert row["rollout/success"] is not None and row["actor/grad_norm"] > 0
        assert 0.3 < row["engine/cached_share"] < 1 and row["engine/restarts"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", ["--pipeline-model-parallel-size 2", "--rollout-tensor-parallel-size 2"]
)
def test_servers_lost_in_rollouts_get_their_weights_from_all_ranks(
    layout: str, tmp_path: Path
) -> None:
    """Two ranks, a shared buffer, and servers that are killed in the first second of every rollout
    but the first.
    """
    flags = "--weight-transfer ipc --num-steps 4 --group-size 16 --eval-interval 0"
    ranks = start_ranks(tmp_path, "run", 2, *FLAGS, *SERVER, *flags.split(), *layout.split())
    directory, generator = tmp_path / "run", random.Random(0)

    def has_logged(num_steps: int) -> bool:
        assert ranks[0].is_alive()
        file = directory / "metrics.jsonl"
        return file.exists() and len(file.read_text().splitlines()) >= num_steps

    for num_steps in range(1, 4):
        wait_until(partial(has_logged, num_steps))
        time.sleep(generator.uniform(0.2, 1.0))  # the weights have to be sent first
        generator.choice(servers_of(directory)).kill()
    join_ranks(ranks)
    rows = read_metrics(directory)
    assert len(rows) == 4 and all(row["mismatch/logprob_max_abs_diff"] < 1e-4 for row in rows)
    assert sum(row["engine/restarts"] for row in rows) == 3
    assert (
        sum(row["engine/reissued"] for row in rows) > 0
    )  # some were lost in the middle of a rollout


@pytest.mark.slow
def test_a_rank_that_only_samples_has_a_server_of_its_own(tmp_path: Path) -> None:
    """Beside those with which the ranks that train evaluate. It gets the weights of every step, a
    share from each sender, and so does the server that replaces it.
    """
    flags = "--placement separate --rollout-ranks 1 --num-steps 3 --keep-rollouts 0"
    flags += " --sglang-start-timeout 600 --weight-senders 2"
    ranks = start_ranks(tmp_path, "run", 3, *FLAGS, *SERVER, *SHORT, *flags.split())
    run = tmp_path / "run"
    wait_until((run / "rollouts" / "step_00000000.safetensors").exists)
    servers_of(run / "sglang" / "rank_00002")[0].kill()
    join_ranks(ranks)
    rows = read_metrics(run)
    assert len(rows) == 3 and all(row["mismatch/logprob_max_abs_diff"] < 1e-4 for row in rows)
    assert [row["engine/restarts"] for row in rows][0] == 0
    assert sum(row["engine/restarts"] for row in rows) == 1
    store = RolloutStore(run / "rollouts")
    for step in range(3):
        groups = store.read(step).groups
        assert {one.weight_version for group in groups for one in group.trajectories} == {step}
    folders = [f"rank_{number:05}" for number in range(3)]
    assert sorted(path.name for path in (run / "sglang").iterdir()) == folders


@pytest.mark.slow
def test_a_server_goes_on_with_unfinished_trajectories_under_other_weights(tmp_path: Path) -> None:
    """Every turn has the version that sampled it, which the server says with each completion."""
    flags = "--placement separate --rollout-ranks 1 --num-steps 4 --keep-rollouts 0"
    flags += " --max-staleness 2 --carry-over 0.5 --importance-cap 2 --sglang-start-timeout 600"
    run = launch(tmp_path, 2, *SERVER, *SHORT, *flags.split())
    continued = [row["rollout/continued"] for row in read_metrics(run)]
    assert any(continued) and continued[-1] == 0
    store, seen = RolloutStore(run / "rollouts"), set()
    for step in range(4):
        for group in store.read(step).groups:
            for one in group.trajectories:
                later = [turn.info[VERSION] for turn in one.turns if VERSION in turn.info]
                assert one.weight_version == max(0, step - 2) and later == sorted(later)
                seen |= {(step, version) for version in later}
    assert seen and all(version == max(0, step - 1) for step, version in seen)


def servers_of(directory: Path) -> list[psutil.Process]:
    """The schedulers of servers that work in a folder of the run."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if "scheduler" in " ".join(process.info["cmdline"] or [])
        and (process.info["cwd"] or "").startswith(str(directory))
    ]


@pytest.mark.slow
def test_a_shared_server_is_replaced(tmp_path: Path) -> None:
    """Log-probabilities over three weight versions; then a rank of the server is killed, and the
    next server is fed alike.
    """
    size = 2

    def rank() -> None:
        collectives.start()
        group, index = collectives.consecutive_group(size), collectives.rank()
        if index == 0:
            server = settings(tmp_path, tensor_parallel_size=size)
            engine = SGLangEngine(CONFIG, server, group=group, bucket_bytes=SMALL_BUCKETS)
        else:
            shard = EngineShard(index, size)
            engine = SGLangFollower(
                CONFIG, shard, torch.float32, group=group, bucket_bytes=SMALL_BUCKETS
            )
        try:
            for version in range(1, 4):
                model = build_model(version)
                with engine.awake():
                    engine.load_weights(
                        cut_stream(model.state_dict().items(), CONFIG, *engine.shard)
                    )
                    engine.start()
                    assert engine.weight_version == version
                    if index == 0:
                        check(model, converse_all(engine))
                        if version == 3:
                            check(model, asyncio.run(with_a_kill(engine)))
                            assert engine.counts.restarts == 1
                    collectives.barrier()
        finally:
            engine.shutdown()

    def check(
        model: PreTrainedModel, conversations: list[list[tuple[list[int], Completion]]]
    ) -> None:
        for turns in conversations:
            for prompt, answer in turns:
                check_logprobs(model, prompt, answer, 1.0)

    async def with_a_kill(engine: SGLangEngine) -> list[list[tuple[list[int], Completion]]]:
        conversations = asyncio.gather(
            *(converse(engine, session, temperature=1.0) for session in range(3))
        )
        await asyncio.sleep(0.05)
        schedulers = [
            pid
            for pid in supervisor.descendants(engine.server.pid)
            if "scheduler" in command_of(pid)
        ]
        assert len(schedulers) == size
        os.kill(schedulers[-1], signal.SIGKILL)
        return await conversations

    on_ranks(rank, size)
