"""What a StarPO step costs the host on a CUDA device: waits, operations, bytes."""

import torch
import pytest
from transformers import Qwen2Config

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory, TokenBatch
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import random_weights

pytestmark = pytest.mark.gpu


def model(num_layers: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )


def make_batch(num_trajectories: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, 128, (count,), generator=generator).tolist()

    trajectories = []
    for index in range(num_trajectories):
        trajectory = Trajectory(group_id=index)
        for turn in range(3):
            trajectory.append_observation(draw(5 + index % 3))
            trajectory.append_action(Completion(draw(7), [-4.8] * 7, "stop"))
        trajectories.append(trajectory)
    return pack(trajectories)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_report(impl: str) -> None:
    from tests.fake_cuda.counts import counted

    parallel = ParallelConfig(bf16=True, transformer_impl=impl)
    groups = initialize(parallel)
    results = []
    for layers, tokens in ((2, 200), (4, 200), (2, 100)):
        hf = model(layers)
        weights = random_weights(hf, seed=3)
        train = TrainConfig(max_tokens_per_microbatch=tokens)
        policy = MegatronPolicy(hf, groups, parallel, train, LossConfig(), temperature=1.0)
        policy.load_weights(weights.get)
        batch = make_batch(8)
        with counted() as forward:
            old = policy.logprobs(batch)
        batch = batch.with_fields(old_logprobs=old, advantages=batch.loss_mask.float())
        policy.update(batch)
        with counted() as update:
            policy.update(batch)
        for name, counts in (("logprobs", forward), ("update", update)):
            print("\n", impl, layers, tokens, name, {k: v for k, v in vars(counts).items() if k != "sites"})
            for site, count in counts.sites.most_common(25):
                print("    ", count, site)
