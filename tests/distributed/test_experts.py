"""Experts on several ranks: weights, checkpoints, and gradients of batches that leave ranks without
work, against transformers' tensors and one process. Other layouts: tools/parity.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.types import TokenBatch
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.model import build_model, check_model, transformer_config
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.resharding import Traffic
from ragen_mega.megatron.weights import (
    export_weights,
    load_weights,
    reshard_plan,
)
from ragen_mega.models.layout import split_experts
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.storage.model_readers import MegatronReader
from tests.support.forked_ranks import on_ranks
from tools import parity

pytestmark = [pytest.mark.forks, pytest.mark.timeout(600)]
MODEL = parity.random_model("qwen3_moe", num_experts=8, num_hidden_layers=4)
HF, SHAPE = MODEL.config, ModelShape.of(MODEL.config)
WEIGHTS = split_experts({n: t.detach() for n, t in MODEL.named_parameters()}, SHAPE)
EP2 = ParallelConfig(expert_model_parallel_size=2)
LAYOUTS = {  # of four ranks
    "ep4": dict(expert_model_parallel_size=4),
    "ep2 on copies": dict(expert_model_parallel_size=2),
    "pp2 ep2": dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
    "tp2 ep4": dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=4
    ),
    "tp2 pp2": dict(
        tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2
    ),
}


def assert_served(shards: dict[str, Tensor], rank: int, size: int, ep: int) -> None:
    """Check the experts of SGLang's rank: all experts, each divided, or whole ones."""
    held, width = SHAPE.num_experts // ep, HF.moe_intermediate_size * ep // size
    first, row = (rank * held, 0) if ep > 1 else (0, rank * width)
    part = slice(row, row + width)
    for layer in range(HF.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp"
        w13, w2 = (shards[f"{prefix}.experts.{name}_weight"] for name in ("w13", "w2"))
        assert torch.equal(shards[f"{prefix}.gate.weight"], WEIGHTS[f"{prefix}.gate.weight"])
        assert len(w13) == len(w2) == held
        for e in range(held):
            names = (
                f"{prefix}.experts.{first + e}.{x}_proj.weight" for x in ("gate", "up", "down")
            )
            gate, up, down = map(WEIGHTS.get, names)
            assert torch.equal(w13[e], torch.cat([gate[part], up[part]]))
            assert torch.equal(w2[e], down[:, part])


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_come_from_the_ranks_that_hold_them(name: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[name])
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size

    def work() -> None:
        torch.set_num_threads(1)
        groups = initialize(parallel)
        model = build_model(HF, transformer_config(HF, parallel), groups)
        load_weights(model, WEIGHTS.get)
        traffic = Traffic()
        full = list(export_weights(model, groups, traffic=traffic))
        assert len(full) == len(WEIGHTS)
        assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in full)
        experts = sum(t.nbytes for n, t in WEIGHTS.items() if ".experts." in n)
        ep = parallel.expert_model_parallel_size
        assert traffic.group_bytes["expert"] == experts * (ep - 1) // ep
        for size, whole in {(tp, 1), (4, 1), (2, 2), (4, 4)}:
            part, traffic = EngineShard(collectives.rank() % size, size, whole), Traffic()
            assert_served(dict(export_weights(model, groups, part, traffic=traffic)), *part)
            # an expert's elements come from another rank unless this rank is their holder
            numbers = range(SHAPE.num_experts)
            wanted = [e for e in numbers if whole == 1 or e * whole // len(numbers) == part.rank]
            missing = [e for e in wanted if e * ep // len(numbers) != groups.ep.rank()]
            of_one = experts // len(numbers) * whole // size
            assert traffic.group_bytes["expert"] == of_one * len(missing)
            assert traffic.pp_bytes == (pp > 1) * reshard_plan(model, groups).shard_bytes
        collectives.barrier()

    on_ranks(work, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"expert_model_parallel_size": 3}, r"\(3\) must divide the model's experts \(8\)"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size .* --sequence-parallel"),
        ({"fp8": "hybrid", "bf16": True}, "fp8 hybrid .* mixture of experts.*; drop --fp8"),
    ],
)
def test_layouts_that_cannot_be_are_refused(flags: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_model(HF, ParallelConfig(**flags))
    assert "\n" not in str(caught.value)


def test_experts_need_a_model_that_has_them_and_ranks_that_hold_them() -> None:
    dense = parity.random_model("qwen3").config
    with pytest.raises(ValueError, match="expert_model_parallel_size .* qwen3 model has none"):
        check_model(dense, EP2)
    with pytest.raises(ValueError, match=r"\(2\) must divide the 3 ranks of a pipeline stage"):
        EP2.check_world(3)


def computed(
    parallel: ParallelConfig, batch: TokenBatch, file: Path, max_tokens: int = 128
) -> Callable[[], None]:
    """Return the body of a rank: two steps of a policy and a critic on a batch. Rank 0 writes the
    log-probabilities and values before and after them, and the gradients of the first.
    """

    def work() -> None:
        torch.set_num_threads(1)
        groups, found = initialize(parallel), {}
        train = TrainConfig(
            lr=1e-3, critic_lr=1e-3, clip_grad=0.5, max_tokens_per_microbatch=max_tokens
        )
        options = (HF, groups, parallel, train, parity.LOSS)
        policy, critic = MegatronPolicy(*options, temperature=1.0), MegatronCritic(*options)
        for model in (policy, critic):
            model.load_weights(WEIGHTS.get)
        for step in range(2):
            found[f"logprobs {step}"], found[f"values {step}"] = (
                policy.logprobs(batch),
                critic.values(batch),
            )
            for role, model in (("policy", policy), ("critic", critic)):
                found[f"{role} norm {step}"] = torch.tensor(model.update(batch)["grad_norm"])
                gradients = model.trainer.gradients()
                for name, gradient in export_weights(model.chunks, groups, tensors=gradients):
                    if step == 0:
                        found[f"{role} gradient {name}"] = gradient.clone()
        if collectives.is_main():
            torch.save(found, file)
        collectives.barrier()

    return work


@pytest.mark.parametrize(
    ("ids", "max_tokens"),
    [
        pytest.param([0], 128, id="a rank without a trajectory"),
        pytest.param([0, 1, 2], 1, id="a rank with one microbatch fewer"),
    ],
)
def test_ranks_wait_for_no_tokens_that_never_come(
    ids: list[int], max_tokens: int, tmp_path: Path
) -> None:
    batch = parity.make_batch(MODEL).select(ids)
    on_ranks(computed(EP2, batch, tmp_path / "ep2", max_tokens), 2)
    computed(ParallelConfig(), batch, tmp_path / "one", max_tokens)()
    ours, truth = torch.load(tmp_path / "ep2"), torch.load(tmp_path / "one")
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        scale = float(expected.abs().max()) if "gradient" in name or "norm" in name else 1.0
        assert float((ours[name] - expected).abs().max()) <= 1e-5 * scale, name


def test_a_checkpoint_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    batch = parity.make_batch(MODEL)
    layouts = {
        1: ParallelConfig(),
        2: ParallelConfig(expert_model_parallel_size=2, use_distributed_optimizer=True),
        4: ParallelConfig(
            tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=4
        ),
    }

    def build(num_ranks: int) -> MegatronPolicy:
        torch.set_num_threads(1)
        parallel, train = layouts[num_ranks], TrainConfig(lr=1e-3)
        policy = MegatronPolicy(
            HF, initialize(parallel), parallel, train, LossConfig(), temperature=1.0
        )
        policy.load_weights(WEIGHTS.get)
        return policy

    def write() -> None:
        policy = build(2)
        policy.update(batch)
        checkpoint.stage(tmp_path / "begun", {"actor": policy.trainer})()
        proceed(policy, tmp_path / "2")

    def proceed(policy: MegatronPolicy, file: Path) -> None:
        before = {name: t.clone() for name, t in policy.export_weights()}
        policy.update(batch)
        after = {name: t.clone() for name, t in policy.export_weights()}
        if collectives.is_main():
            torch.save([before, after], file)
        collectives.barrier()

    def read() -> None:
        policy = build(distributed_ranks)
        checkpoint.load(tmp_path / "begun", {"actor": policy.trainer})
        proceed(policy, tmp_path / str(distributed_ranks))

    (tmp_path / "begun").mkdir()
    on_ranks(write, 2)
    before, after = torch.load(tmp_path / "2")
    assert not torch.equal(before["lm_head.weight"], WEIGHTS["lm_head.weight"])
    for distributed_ranks in (1, 4):
        on_ranks(read, distributed_ranks)
        found, next_ones = torch.load(tmp_path / str(distributed_ranks))
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
        # Adam's moments arrived too: without them a step has the sign of the gradient.
        far = max(float((next_ones[n] - t).abs().max()) for n, t in after.items())
        assert far < 1e-4, far
    stored = MegatronReader(tmp_path / "begun", SHAPE)
    assert set(stored.names()) == before.keys()
    assert all(torch.equal(stored(name), tensor) for name, tensor in before.items())
