"""StarPO steps of the whole program on CUDA devices: layers, precisions, FP8 recipes, offloading,
estimators, and tensor, pipeline, context and sequence parallelism with the distributed optimizer.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from ragen_mega.config import parse
from ragen_mega.megatron.initialize import shutdown
from ragen_mega.megatron.offload import Kind, Offloadable
from ragen_mega.megatron.precision import Device
from ragen_mega.train import train
from tests.support.runs import launch, metrics

pytestmark = pytest.mark.gpu

TINY = """
    --environments bandit --max-turns 1 --max-actions-per-turn 1 --max-actions 1
    --prompt-style compact --hidden-size 64 --ffn-hidden-size 128 --num-layers 2
    --warm-start-first-turn-steps 2 --warm-start-steps 2 --warm-start-trajectories 8
    --num-groups 2 --group-size 4 --minibatch-size 4 --num-steps 1 --filter-strategy none
    --eval-prompts 2 --rollout-engine embedded --lr 1e-3 --critic-lr 1e-3
""".split()
TRANSFORMER_ENGINE = "--bf16 --transformer-impl transformer_engine"
SHARDED = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
CONTEXT = "--context-parallel-size 2"
PIPELINE = f"{SHARDED} --pipeline-model-parallel-size 2"
RUNS = {
    "float32": "",
    "grpo": "--advantage-estimator grpo",
    "offload rollout": "--offload rollout",
    "offload turns": "--offload turns",
    "recompute": "--recompute full",
    "bf16": "--bf16 --transformer-impl local",
    "engine": TRANSFORMER_ENGINE,
    "engine, offload turns": f"{TRANSFORMER_ENGINE} --offload turns",
    "tensorwise": f"{TRANSFORMER_ENGINE} --fp8 hybrid --fp8-recipe tensorwise",
    "delayed": f"{TRANSFORMER_ENGINE} --fp8 hybrid --fp8-recipe delayed",
    "blockwise": f"{TRANSFORMER_ENGINE} --fp8 hybrid --fp8-recipe blockwise",
    "tensorwise, offload turns": (
        f"{TRANSFORMER_ENGINE} --fp8 hybrid --fp8-recipe tensorwise --offload turns"
    ),
}
SAMPLED_BY_SGLANG = {
    "ipc": "--bf16 --transformer-impl local --weight-transfer ipc --offload turns",
    "file, fp8": f"{TRANSFORMER_ENGINE} --weight-transfer file --rollout-fp8",
}


def skip_without_layers(flags: str) -> None:
    if "transformer_engine" in flags and Device.here().transformer_engine is None:
        pytest.skip("needs Transformer Engine")


def check(row: dict[str, float], flags: str) -> None:
    """The update happened, and the engine sampled from the policy that is trained."""
    roles = ("actor",) if "grpo" in flags else ("actor", "critic")
    for role in roles:
        assert row[f"{role}/skipped"] == 0 and 0 < row[f"{role}/grad_norm"] < 100
    # of a model that is nearly random; rounding to FP8 is up to 2^-4 of every factor
    largest = 1.0 if "fp8" in flags else 0.3 if "--bf16" in flags else 1e-4
    assert row["mismatch/logprob_max_abs_diff"] < largest


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What each run has logged, filled by the first test."""
    return {}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_on_one_device(
    name: str,
    rows: dict[str, dict[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = RUNS[name]
    skip_without_layers(flags)
    restore, came_to_update = Offloadable.restore, Counter[str]()

    def noted(memory: Offloadable, *kinds: Kind) -> int:
        came_to_update[memory.name] += "gradients" in kinds
        return restore(memory, *kinds)

    monkeypatch.setattr(Offloadable, "restore", noted)
    try:
        train(parse([*TINY, *flags.split(), "--output", str(tmp_path), "--name", "run"]))
    finally:
        shutdown()
    (rows[name],) = metrics(tmp_path / "run")
    check(rows[name], flags)
    if "turns" in flags:  # once a step, though each has two minibatches
        assert came_to_update == {"actor": 1, "critic": 1}
    same = name.partition(", offload")[0]  # memory handover changes no number
    if name.startswith("offload") or name == "recompute":
        same = "float32"
    for key in ("actor/grad_norm", "actor/loss", "critic/grad_norm")[: 0 if same == name else 3]:
        assert rows[name][key] == pytest.approx(rows[same][key], rel=1e-5), key


@pytest.mark.skipif("RAGEN_SGLANG_PYTHON" not in os.environ, reason="needs a server's Python")
@pytest.mark.parametrize("name", ["ipc", pytest.param("file, fp8", marks=pytest.mark.slow)])
def test_a_step_sampled_by_sglang(name: str, tmp_path: Path) -> None:
    """Two rollouts, so that the server sleeps, wakes and takes weights again."""
    flags = SAMPLED_BY_SGLANG[name]
    skip_without_layers(flags)
    sizes = "--hidden-size 256 --ffn-hidden-size 256 --max-response-length 4 --num-steps 2"
    server = f"--rollout-engine sglang --sglang-python {os.environ['RAGEN_SGLANG_PYTHON']}"
    command = [*TINY, *flags.split(), *sizes.split(), *server.split()]
    try:
        train(parse([*command, "--output", str(tmp_path), "--name", "run"]))
    finally:
        shutdown()
    for row in metrics(tmp_path / "run"):
        check(row, flags)


@pytest.mark.forks
@pytest.mark.parametrize(
    "flags",
    [
        f"{PIPELINE} {TRANSFORMER_ENGINE} --fp8 hybrid --offload turns",
        pytest.param(  # twice data-parallel
            f"{SHARDED} --advantage-estimator grpo --offload rollout", marks=pytest.mark.slow
        ),
        pytest.param(PIPELINE, marks=pytest.mark.slow),
        pytest.param(
            f"{SHARDED} {CONTEXT} {TRANSFORMER_ENGINE} --fp8 hybrid --offload turns",
            marks=pytest.mark.slow,
        ),
        pytest.param(f"{SHARDED} {CONTEXT}", marks=pytest.mark.slow),
    ],
)
def test_a_step_on_four_devices(flags: str, tmp_path: Path) -> None:
    """The float32 step equals the step of one rank."""
    skip_without_layers(flags)
    command = [*TINY, "--hidden-size", "128", "--ffn-hidden-size", "256"]
    (sharded,) = metrics(launch(tmp_path, "sharded", 4, *command, *flags.split()))
    check(sharded, flags)
    if "--bf16" not in flags:
        estimator = ["--advantage-estimator", "grpo"] if "grpo" in flags else []
        (alone,) = metrics(launch(tmp_path, "alone", 1, *command, *estimator))
        for key in ("actor/grad_norm", "critic/grad_norm")[: 1 if "grpo" in flags else 2]:
            assert sharded[key] == pytest.approx(alone[key], rel=1e-3), key
    assert not torch.distributed.is_initialized()
