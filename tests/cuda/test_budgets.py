"""What a pass over the policy costs the host, measured, against the budgets in the table of
docs/benchmarks/fake_device.md: waits for the device, operations, bytes copied, peak memory.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig, parse
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.precision import Device
from ragen_mega.models.huggingface import random_weights
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.memory import Setting, activations, workspace
from ragen_mega.run.build import build as assemble
from ragen_mega.train import starpo
from tests.cuda.test_steps import TINY, TRANSFORMER_ENGINE

native = pytest.importorskip("fake_cuda_device", reason="needs the fake CUDA device, which counts")
from tests.fake_cuda.counts import Counts, counted  # noqa: E402 there only beside the device

pytestmark = pytest.mark.gpu

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "fake_device.md"
NUM_TRAJECTORIES, LENGTH = 16, 36
Implementation = Literal["local", "transformer_engine", "mixture"]
"""Layers; a mixture of experts has Transformer Engine's."""


@dataclass(frozen=True)
class Run:
    """One forward pass without gradients and one update, and how many microbatches each had."""

    logprobs: Counts
    update: Counts
    num_microbatches: int


def make_batch(vocab: int, num_trajectories: int, turn: int) -> TokenBatch:
    """Equal trajectories of three turns, each an observation and an action."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    trajectories = []
    for index in range(num_trajectories):
        trajectory = Trajectory(group_id=index)
        for _ in range(3):
            trajectory.append_observation(draw(turn // 2))
            tokens = draw(turn - turn // 2)
            trajectory.append_action(Completion(tokens, [-4.8] * len(tokens), "stop"))
        trajectories.append(trajectory)
    return pack(trajectories)


def build(
    implementation: Implementation,
    hf: PretrainedConfig,
    max_tokens: int,
    **layout: Any,
) -> MegatronPolicy:
    parallel = ParallelConfig(
        bf16=True,
        transformer_impl="local" if implementation == "local" else "transformer_engine",
        **layout,
    )
    policy = MegatronPolicy(
        hf,
        initialize(parallel),
        parallel,
        TrainConfig(max_tokens_per_microbatch=max_tokens),
        LossConfig(),
        temperature=1.0,
    )
    policy.load_weights(random_weights(hf, seed=3).get)
    return policy


def config(num_layers: int, hidden: int = 64, vocab: int = 128) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )


def mixture(num_layers: int) -> Qwen3MoeConfig:
    """A mixture of four experts, two for each token."""
    return Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
    )


def run(implementation: Implementation, num_layers: int, max_tokens: int) -> Run:
    hf = mixture(num_layers) if implementation == "mixture" else config(num_layers)
    policy = build(implementation, hf, max_tokens)
    batch, passes = make_batch(128, NUM_TRAJECTORIES, LENGTH // 3), []
    policy.head.register_forward_pre_hook(lambda *_: passes.append(None))
    old = policy.logprobs(batch)
    batch = batch.with_fields(old_logprobs=old, advantages=batch.loss_mask.float())
    policy.update(batch)  # allocates what stays: Adam's moments, workspaces
    passes.clear()
    with counted() as logprobs:
        policy.logprobs(batch)
    with counted() as update:
        policy.update(batch)
    assert len(passes) % 2 == 0
    return Run(logprobs, update, len(passes) // 2)


def slopes(few: Run, many: Run, deep: Run, work: str, name: str) -> tuple[float, float, float]:
    """(per layer and microbatch, per microbatch, per step) of one count, from runs with 2 layers
    and few or many microbatches, and one with 4 layers and few.
    """
    base, more, deeper = (getattr(getattr(run, work), name) for run in (few, many, deep))
    layer = (deeper - base) / 2 / few.num_microbatches
    microbatch = (more - base) / (many.num_microbatches - few.num_microbatches) - 2 * layer
    return layer, microbatch, base - few.num_microbatches * (microbatch + 2 * layer)


def budgets() -> dict[tuple[str, str, str], float]:
    """(implementation, pass, what) -> number, of the page's table."""
    row = re.compile(r"^\| (\S+) \| (\S+) \| ([^|]+) \| ([\d.]+) \|", re.MULTILINE)
    return {
        (layers, work, what): float(number)
        for layers, work, what, number in row.findall(PAGE.read_text())
    }


@pytest.mark.parametrize("implementation", get_args(Implementation))
def test_budgets(implementation: Implementation) -> None:
    if implementation != "local" and Device.here().transformer_engine is None:
        pytest.skip("needs Transformer Engine")
    quarter = NUM_TRAJECTORIES * LENGTH // 4
    few, many, deep = (
        run(implementation, *setting) for setting in ((2, quarter), (2, quarter // 2), (4, quarter))
    )
    shutdown()
    assert many.num_microbatches > few.num_microbatches == deep.num_microbatches
    measured: dict[tuple[str, str, str], float] = {}
    for work in ("logprobs", "update"):
        key = (implementation, work)
        waits = slopes(few, many, deep, work, "synchronizations")
        for unit, number in zip(("layer", "microbatch", "step"), waits):
            measured[*key, f"waits per {unit}"] = number
        measured[*key, "operations per layer"] = slopes(few, many, deep, work, "operations")[0]
        tokens = NUM_TRAJECTORIES * LENGTH
        for way in ("to_device", "to_host"):
            name = f"bytes {way.replace('_', ' ')} per token"
            measured[*key, name] = getattr(getattr(few, work), way) / tokens
    expected = {
        key: value
        for key, value in budgets().items()
        if key[0] == implementation and key[1] in ("logprobs", "update")
    }
    sites = "\n".join(f"{count} {site}" for site, count in few.update.sites.most_common())
    assert measured.keys() == expected.keys(), measured
    over = {key: (value, expected[key]) for key, value in measured.items() if value > expected[key]}
    assert not over, f"measured, budget: {over}\nan update waits at\n{sites}"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_peak_memory_is_planned(implementation: Implementation, recompute: str) -> None:
    """What an update allocates beside the model's state, against the plan's activations and
    workspace; not far less either, for a plan that is too large refuses what would fit.
    """
    if implementation == "transformer_engine" and Device.here().transformer_engine is None:
        pytest.skip("needs Transformer Engine")
    hf, max_tokens = config(4, hidden=256, vocab=2048), 960
    policy = build(implementation, hf, max_tokens, recompute=recompute)
    batch = make_batch(2048, 8, 80)
    batch = batch.with_fields(
        old_logprobs=torch.full((batch.num_positions,), -7.0), advantages=batch.loss_mask.float()
    )
    policy.update(batch)
    with counted() as counts:
        policy.update(batch)
    shutdown()
    setting = Setting(
        ParallelConfig(bf16=True, transformer_impl=implementation, recompute=recompute),
        1,
        max_tokens,
        has_critic=False,
        has_reference=False,
        engine="embedded",
        kv_cache_tokens=0,
    )
    shape = ModelShape.of(hf)
    planned = activations(shape, setting, 0) + workspace(shape, setting, 0, is_critic=False)
    most = budgets()[implementation, "peak", f"of the plan, recomputation {recompute}"]
    assert most - 0.1 < counts.peak / planned <= most <= 1, (counts.peak, planned)


def test_a_whole_step_waits_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All between two rollouts, as a user runs it: old and reference log-probabilities, values,
    advantages, diagnosis, the updates of both roles, what is logged and written; the second step,
    because the first allocates what stays.
    """
    if Device.here().transformer_engine is None:
        pytest.skip("needs Transformer Engine")
    flags = f"{TRANSFORMER_ENGINE} --kl-kind k3 --kl-coef 0.01 --diagnose-interval 1 --num-steps 2"
    command = [*TINY, *flags.split(), "--save-interval", "0", "--output", str(tmp_path)]
    run = assemble(parse([*command, "--name", "run"]))
    timed, ended = run.timers.timed, dict[str, int]()

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        with timed(name):
            yield
        ended[name] = native.counts()["synchronizations"]

    monkeypatch.setattr(run.timers, "timed", noted)
    try:
        with run:
            starpo(run)
    finally:
        shutdown()
    num_updates = 2 * 2  # actor and critic, eight trajectories in minibatches of four
    per_update = (ended["update"] - ended["rollout"]) / num_updates
    assert 0 < per_update <= budgets()["transformer_engine", "step", "waits per optimizer step"]
