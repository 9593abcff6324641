"""Context parallelism on two devices: both kinds of layers in bfloat16, and Transformer Engine's in
FP8, beside two data-parallel ranks.

Float32 local layers are the truth, and local layers in bfloat16 the measure of rounding.
"""

from dataclasses import replace

import pytest
import torch

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.precision import Device
from ragen_mega.models.huggingface import random_weights
from tests.integration.test_transformer_engine import (
    ENGINE,
    FLOAT32,
    FP8,
    LOCAL,
    MODELS,
    distance,
    gradients,
)
from tests.support.forked_ranks import on_ranks
from tools.parity import branches, random_trajectories

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.forks,
    pytest.mark.skipif(Device.here().transformer_engine is None, reason="needs Transformer Engine"),
]

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probabilities [T] and gradients by name."""


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_two_devices_compute_what_two_ranks_with_all_tokens_do(architecture: str) -> None:
    """Trajectories that begin alike; in FP8 nothing is shared. Each rank's tokens are padded to the
    16 that FP8 needs, and each rank has its own scales.
    """
    hf = MODELS[architecture]
    stems, weights = random_trajectories(hf.vocab_size, 9), random_weights(hf, seed=3)
    batch = pack([*stems, *branches(stems)])
    noise = torch.randn(batch.num_positions, generator=torch.Generator().manual_seed(1))
    batch = batch.with_fields(
        old_logprobs=batch.loss_mask * -6.9, advantages=noise * batch.loss_mask
    )

    def computed(layout: ParallelConfig, shared_prefixes: str = "on") -> Found:
        train = TrainConfig(max_tokens_per_microbatch=100, shared_prefixes=shared_prefixes)
        loss = LossConfig(entropy_coef=0.01)
        policy = MegatronPolicy(hf, initialize(layout), layout, train, loss, temperature=0.9)
        policy.load_weights(weights.get)
        logprobs = policy.logprobs(batch)
        assert policy.update(batch)["skipped"] == 0
        return logprobs, gradients(policy)

    def work() -> None:
        truth, measure = computed(FLOAT32, "off"), computed(LOCAL, "off")
        rounding = (measure[0] - truth[0]).abs()
        for layout in (LOCAL, ENGINE):
            logprobs, found = computed(replace(layout, context_parallel_size=2))
            error = (logprobs - truth[0]).abs()
            assert 0 < error.mean() < 1.5 * rounding.mean() and error.max() < 2 * rounding.max()
            assert distance(found, truth[1]) < 1.5 * distance(measure[1], truth[1])
        near, far = computed(FP8), computed(replace(FP8, context_parallel_size=2))
        drifts = [(one[0] - truth[0]).abs().mean() for one in (near, far)]
        assert rounding.mean() < drifts[1] < 1.2 * drifts[0]
        assert distance(far[1], truth[1]) < 1.2 * distance(near[1], truth[1])

    on_ranks(work, 2)
