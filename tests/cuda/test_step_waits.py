"""How often the host waits for a CUDA device in a pass, in an optimizer step and for advantages, by
the counts of the fake device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.config import AdvantageConfig, LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory
from ragen_mega.megatron import context
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import random_weights
from tests.cuda.test_budgets import build, config, make_batch, mixture
from tests.support.forked_ranks import on_ranks

pytestmark = pytest.mark.gpu
counts = pytest.importorskip("tests.fake_cuda.counts", reason="counts are the fake device's")
# The stand-in for Transformer Engine's native module computes attention with its own host code.
STAND_IN = "cpp_extensions/fused_attn.py"


def waits(work: Callable[[], object]) -> int:
    """How often the host waits in `work`."""
    with counts.counted() as found:
        work()
    return sum(count for site, count in found.sites.items() if STAND_IN not in site)


def play(num_trajectories: int) -> list[Trajectory]:
    trajectories = []
    for index in range(num_trajectories):
        trajectory = Trajectory(group_id=index // 4)
        for turn in range(3):
            trajectory.append_observation(list(range(5 + index % 3)))
            sampled = Completion(list(range(20, 27)), [-4.8] * 7, "stop")
            trajectory.append_action(sampled).reward = float((index + turn) % 3)
        trajectories.append(trajectory)
    return trajectories


@pytest.mark.parametrize(("num_layers", "max_tokens"), [(2, 400), (3, 100)])
def test_a_pass_waits_once_and_a_step_twice(num_layers: int, max_tokens: int) -> None:
    """Whatever the number of layers and microbatches."""
    hf = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    parallel = ParallelConfig(bf16=True, transformer_impl="transformer_engine")
    groups, weights = initialize(parallel), random_weights(hf, seed=3)
    train, loss = TrainConfig(max_tokens_per_microbatch=max_tokens), LossConfig()
    policy = MegatronPolicy(hf, groups, parallel, train, loss, temperature=1.0)
    critic = MegatronCritic(hf, groups, parallel, train, loss)
    for model in (policy, critic):
        model.load_weights(weights.get)
    batch = pack(play(8))
    assert waits(lambda: policy.logprobs(batch)) == 1
    assert waits(lambda: critic.values(batch)) == 1
    sampled = batch.loss_mask.float()
    ready = batch.with_fields(advantages=sampled, values=sampled, returns=sampled)
    for model in (policy, critic):
        model.update(ready)  # Adam makes its moments
        assert waits(lambda model=model: model.update(ready)) == 2


@pytest.mark.forks
def test_experts_on_two_devices_wait_once_a_layer() -> None:
    """All-to-all takes numbers of rows that the host knows: how many of a rank's tokens go to which
    expert is copied there once a layer, for the gradients too.
    """

    def work() -> None:
        num_layers, batch = 3, make_batch(128, 4, 12)
        policy = build("mixture", mixture(num_layers), 1000, expert_model_parallel_size=2)
        assert waits(lambda: policy.logprobs(batch)) == 1 + num_layers
        sampled = batch.loss_mask.float()
        ready = batch.with_fields(advantages=sampled, old_logprobs=policy.logprobs(batch))
        assert waits(lambda: policy.update(ready)) == 3 + num_layers

    on_ranks(work, 2)


@pytest.mark.forks
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_context_ranks_wait_for_no_exchange(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank sends keys and values once in a pass and a layer, and twice in an update: again for
    its backward pass, or when the layer is computed again; then their gradients. The host waits as
    often as without an exchange, the path above a rank's first node says the bytes, and a layer
    takes 8 operations more in a pass and 31 more in an update.
    """
    send, moved = context._sent, list[int]()

    def noted(*arguments: Any) -> torch.Tensor:
        arrived = send(*arguments)
        moved.append(arrived.nbytes)
        return arrived

    monkeypatch.setattr(context, "_sent", noted)

    def counts_of(num_layers: int) -> list[int]:
        """Operations of a pass and of an update."""
        policy = build(
            "transformer_engine", config(num_layers), 1000,
            context_parallel_size=2, recompute=recompute,
        )  # fmt: skip
        batch = make_batch(128, 1, 40)  # 119 nodes of one trajectory, of which a rank has a half
        old = policy.logprobs(batch)
        ready = batch.with_fields(advantages=batch.loss_mask.float(), old_logprobs=old)
        policy.update(ready)
        received = sum(
            policy.trainer._microbatches(batch, policy.trainer._parts(batch))[0].forest.received
        )
        assert (received > 0) == (policy.groups.cp.rank() == 1)
        of_layer = received * 2 * 2 * 16 * 2  # keys and values, two heads of 16 channels, bfloat16
        found = []
        for work, most, times in (
            (lambda: policy.logprobs(batch), 1, 1),
            (lambda: policy.update(ready), 2, 3),
        ):
            moved.clear()
            with counts.counted() as of_work:
                work()
            seen = sum(n for site, n in of_work.sites.items() if STAND_IN not in site)
            assert seen == most
            forward = (times + 1) // 2 * num_layers  # of keys; then their gradients
            assert len(moved) == times * num_layers
            assert sum(moved) == of_layer * forward or not received
            found.append(of_work.operations)
        return found

    def work() -> None:
        of_two, of_three = counts_of(2), counts_of(3)
        in_pass, in_update = (b - a for a, b in zip(of_two, of_three, strict=True))
        assert in_pass <= 22 and in_update <= {"none": 71, "full": 83}[recompute]

    on_ranks(work, 2)


@pytest.mark.parametrize(
    ("estimator", "most"), [("gae", 4), ("grpo", 4), ("bilevel_gae", 6), ("reinforce_plus_plus", 2)]
)
def test_advantages_wait_for_what_is_checked_and_returned(estimator: str, most: int) -> None:
    trajectories = play(16)
    batch = pack(trajectories)
    batch = batch.with_fields(values=batch.loss_mask.float())
    placement = "turn" if estimator == "bilevel_gae" else "trajectory"
    settings = AdvantageConfig(advantage_estimator=estimator, reward_placement=placement)
    device = torch.device("cuda", 0)
    found = waits(lambda: estimate_advantages(batch, trajectories, settings, device=device))
    assert found <= most
