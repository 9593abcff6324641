"""Transformer Engine's layers against the local ones with the same weights, and FP8 around them:
needs a GPU with both.

Every comparison has float32 local layers as its truth and bfloat16 local layers as the measure of
what rounding costs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from ragen_mega.config import LoraConfig, LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.model import build_model, transformer_config
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.precision import RECIPES, Device, obstacle_to_recipe
from ragen_mega.megatron.weights import export_weights, held
from ragen_mega.models.huggingface import random_weights
from ragen_mega.models.shape import ModelShape
from tools.parity import branches, random_adapter, random_trajectories

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(Device.here().transformer_engine is None, reason="needs Transformer Engine"),
]

FLOAT32 = ParallelConfig(transformer_impl="local")
LOCAL = ParallelConfig(bf16=True, transformer_impl="local")
ENGINE = ParallelConfig(bf16=True, transformer_impl="transformer_engine")
FP8 = replace(ENGINE, fp8="hybrid")
SIZES = dict(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.06,
)
MODELS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=128, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=False,
    ),
}  # fmt: skip
RECIPES_HERE = [name for name in RECIPES if obstacle_to_recipe(name, Device.here()) is None]
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def build() -> Iterator[Build]:
    """(architecture, layout) -> a policy, or with `role=MegatronCritic` a critic, of the
    architecture's random weights.
    """
    groups = initialize(ParallelConfig())
    weights = {name: _with_random_biases(random_weights(hf, seed=3)) for name, hf in MODELS.items()}

    def make(
        architecture: str,
        parallel: ParallelConfig,
        role: type = MegatronPolicy,
        shared_prefixes: str = "auto",
        **options: Any,
    ) -> Any:
        train = TrainConfig(
            lr=1e-3,
            critic_lr=1e-3,
            max_tokens_per_microbatch=300,
            shared_prefixes=shared_prefixes,
        )
        if role is MegatronPolicy:
            options = {"temperature": 0.9} | options
        model = role(
            MODELS[architecture], groups, parallel, train, LossConfig(entropy_coef=0.01), **options
        )
        model.load_weights(weights[architecture].get)
        return model

    yield make
    shutdown()


def _with_random_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(name: str, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator).mul(0.1).add(float("norm" in name))

    return {
        name: draw(name, value.shape) if value.dim() == 1 else value
        for name, value in weights.items()
    }


@pytest.fixture(scope="module")
def batch() -> TokenBatch:
    """Ragged trajectories of 20 to 215 tokens; lengths that no alignment divides."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator).tolist()

    trajectories = []
    for index in range(6):
        trajectory = Trajectory(group_id=index)
        trajectory.append_observation(draw(7 + 20 * index))
        tokens = draw(13 + 19 * index)
        trajectory.append_action(Completion(tokens, [-6.9] * len(tokens), "stop"))
        trajectories.append(trajectory)
    packed = pack(trajectories)

    def noise(center: float) -> Tensor:
        return (
            center + 0.3 * torch.randn(packed.num_positions, generator=generator)
        ) * packed.loss_mask

    return packed.with_fields(
        old_logprobs=noise(-6.9),
        rollout_logprobs=noise(-6.9),
        advantages=noise(0.0),
        values=noise(0.0),
        returns=noise(0.5),
    )


def gradients(model: Any) -> dict[str, Tensor]:
    """Hugging Face name -> gradient after an update."""
    stream = export_weights(model.chunks, model.groups, tensors=model.trainer.gradients())
    return {name: value.float().clone() for name, value in stream}


def distance(actual: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the truth, over all tensors."""
    assert actual.keys() == truth.keys()
    difference = sum(float((actual[name] - truth[name]).double().square().sum()) for name in truth)
    return (
        difference / sum(float(value.double().square().sum()) for value in truth.values())
    ) ** 0.5


@pytest.mark.parametrize("architecture", MODELS)
def test_same_weights_give_the_same_log_probabilities(
    build: Build, batch: TokenBatch, architecture: str
) -> None:
    truth, local, engine = (
        build(architecture, layout).logprobs(batch) for layout in (FLOAT32, LOCAL, ENGINE)
    )
    rounding, error = (local - truth).abs(), (engine - truth).abs()
    assert 0 < float(rounding.mean()) < 0.05, "bfloat16 itself is off: nothing can be concluded"
    assert float(error.mean()) < 1.5 * float(rounding.mean()) and float(error.max()) < 2 * float(
        rounding.max()
    )


@pytest.mark.parametrize("architecture", MODELS)
def test_gradients_agree(build: Build, batch: TokenBatch, architecture: str) -> None:
    models = [build(architecture, layout) for layout in (FLOAT32, LOCAL, ENGINE)]
    norms = [model.update(batch)["grad_norm"] for model in models]
    truth, local, engine = map(gradients, models)
    rounding = distance(local, truth)
    assert 0 < rounding < 0.2 and distance(engine, truth) < 2 * rounding
    assert norms[2] == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize("architecture", MODELS)
def test_adapters_beside_these_layers_compute_the_same(
    build: Build, batch: TokenBatch, architecture: str
) -> None:
    """Log-probabilities and gradients of A and B, with the norm inside the layer."""
    lora = LoraConfig(lora_rank=4, lora_alpha=2.0)
    adapter = random_adapter(ModelShape.of(MODELS[architecture]), lora)
    models = [build(architecture, layout, lora=lora) for layout in (FLOAT32, LOCAL, ENGINE)]
    bare = models[0].logprobs(batch)
    for model in models:
        model.load_adapter(adapter.get)
    truth, local, engine = (model.logprobs(batch) for model in models)
    rounding, error = (local - truth).abs().mean(), (engine - truth).abs().mean()
    assert 0 < rounding < 0.2 * (truth - bare).abs().mean() and error < 1.5 * rounding
    for model in models:
        model.update(batch)
    truth, local, engine = map(gradients, models)
    rounding = distance(local, truth)
    assert 0 < rounding < 0.3 and distance(engine, truth) < 2 * rounding


@pytest.mark.parametrize("architecture", MODELS)
def test_a_critic_beside_a_policy_with_adapters_holds_no_second_base(
    build: Build, architecture: str
) -> None:
    """Not for a moment: these layers allocate their parameters once more to initialise them."""
    lora, hf = LoraConfig(lora_rank=4), MODELS[architecture]
    policy = build(architecture, ENGINE, lora=lora)
    num_bytes = sum(slot.nbytes for _, slot in held(policy.chunks))
    config, before = transformer_config(hf, ENGINE), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    build_model(hf, config, policy.groups, is_critic=True, lora=lora, base=policy.chunks)
    assert torch.cuda.max_memory_allocated() - before < num_bytes / 4


def test_shared_prefixes_cost_no_more_than_rounding(build: Build) -> None:
    """Every chain of a forest attends to its path; truth and measure compute each trajectory."""
    stems = random_trajectories(SIZES["vocab_size"], 9)
    batch = pack([*stems, *branches(stems)])
    noise = torch.randn(batch.num_positions, generator=torch.Generator().manual_seed(1))
    batch = batch.with_fields(
        old_logprobs=batch.loss_mask * -6.9, advantages=noise * batch.loss_mask
    )
    models = [
        build("qwen2", layout, shared_prefixes=way)
        for layout, way in ((FLOAT32, "off"), (LOCAL, "off"), (ENGINE, "on"), (LOCAL, "on"))
    ]
    truth, *others = (model.logprobs(batch) for model in models)
    rounding, *errors = ((one - truth).abs() for one in others)
    for error in errors:
        assert float(error.mean()) < 1.5 * float(rounding.mean())
        assert float(error.max()) < 2 * float(rounding.max())
    shares = [model.update(batch)["computed_share"] for model in models]
    assert shares[:2] == [1, 1] and max(shares[2:]) < 0.8
    exact, measure, *found = map(gradients, models)
    for one in found:
        assert distance(one, exact) < 1.5 * distance(measure, exact)


@pytest.mark.parametrize("architecture", MODELS)
def test_weights_leave_as_they_came(build: Build, architecture: str) -> None:
    """Through Transformer Engine's names of the norms, equal to the bit."""
    first, second = (
        dict(build(architecture, layout).export_weights()) for layout in (LOCAL, ENGINE)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_trajectories_of_a_pack_do_not_see_each_other(build: Build, batch: TokenBatch) -> None:
    """Also not the padding: alone in a microbatch a trajectory has the log-probabilities it has in
    a full one.
    """
    policy = build("qwen2", ENGINE)
    together = policy.logprobs(batch)
    alone = torch.cat(
        [policy.logprobs(batch.select([index])) for index in range(batch.num_trajectories)]
    )
    rounding = (
        build("qwen2", LOCAL).logprobs(batch) - build("qwen2", FLOAT32).logprobs(batch)
    ).abs()
    assert float((alone - together).abs().max()) < 2 * float(rounding.max())


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", [ENGINE, FP8], ids=["bf16", "fp8"])
def test_recomputation_changes_nothing(
    build: Build, batch: TokenBatch, recompute: str, layout: ParallelConfig
) -> None:
    plain, again = build("qwen2", layout), build("qwen2", replace(layout, recompute=recompute))
    plain.update(batch)
    again.update(batch)
    assert distance(gradients(again), gradients(plain)) < 0.01


@pytest.mark.parametrize("recipe", RECIPES_HERE)
def test_fp8_stays_near_bfloat16(build: Build, batch: TokenBatch, recipe: str) -> None:
    """Log-probabilities and gradients, from the first pass on, with tokens that no alignment
    divides.
    """
    reference, quantised = build("qwen2", ENGINE), build("qwen2", replace(FP8, fp8_recipe=recipe))
    drift = (quantised.logprobs(batch) - reference.logprobs(batch)).abs()[batch.loss_mask]
    assert 0 < float(drift.mean()) < 0.15 and float(drift.max()) < 2
    metrics = quantised.update(batch)
    reference.update(batch)
    assert metrics["skipped"] == 0
    assert distance(gradients(quantised), gradients(reference)) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES_HERE)
def test_fp8_learns(build: Build, batch: TokenBatch, recipe: str) -> None:
    """Behaviour cloning of one batch goes down as with bfloat16, and what the optimizer writes is
    what is quantised.
    """
    reference, quantised = build("qwen2", ENGINE), build("qwen2", replace(FP8, fp8_recipe=recipe))
    losses = [[model.clone(batch)["loss"] for _ in range(20)] for model in (reference, quantised)]
    fallen = [values[0] - values[-1] for values in losses]
    assert fallen[0] > 0.1 and fallen[1] == pytest.approx(fallen[0], rel=0.3)


def test_quantised_weights_follow_the_weights(build: Build, batch: TokenBatch) -> None:
    """The reference policy is computed by swapping weights in place: no stale FP8 copy may be used,
    in either direction.
    """
    policy = build("qwen2", FP8, keep_reference=True)
    before = policy.logprobs(batch)
    assert torch.equal(policy.logprobs(batch), before), (
        "a log-probability depends on what was computed before it"
    )
    policy.clone(batch)
    after = policy.logprobs(batch)
    assert not torch.equal(after, before)
    assert torch.equal(policy.reference_logprobs(batch), before)
    assert torch.equal(policy.logprobs(batch), after)


def test_fp8_copies_leave_the_device_with_the_weights(build: Build, batch: TokenBatch) -> None:
    policy = build("qwen2", FP8)
    before, memory = policy.logprobs(batch), policy.trainer.memory
    layers = [
        module for module in policy.chunks.modules() if getattr(module, "_fp8_workspaces", None)
    ]
    assert len(layers) == 4 * SIZES["num_hidden_layers"]
    memory.offload()
    assert not any(layer._fp8_workspaces for layer in layers)
    memory.restore()
    assert torch.equal(policy.logprobs(batch), before)


@pytest.mark.parametrize("role", [MegatronPolicy, MegatronCritic])
def test_heads_are_outside_fp8(build: Build, batch: TokenBatch, role: type) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    model, inside, outside = build("qwen2", FP8, role), [], []

    def note_layer(*_: Any) -> None:
        inside.append(FP8GlobalStateManager.is_fp8_enabled())

    def note_head(*_: Any) -> None:
        outside.append(FP8GlobalStateManager.is_fp8_enabled())

    model.chunks[0].decoder.layers[0].register_forward_pre_hook(note_layer)
    if role is MegatronCritic:
        model.chunks[0].output_layer.register_forward_pre_hook(note_head)
    else:
        head_input = model.chunks[0].head_input
        model.chunks[0].head_input = lambda output: (note_head(), head_input(output))[1]
    model.update(batch)
    assert inside and all(inside) and outside and not any(outside)


@pytest.mark.parametrize("layout", [ENGINE, FP8], ids=["bf16", "fp8"])
def test_a_checkpoint_continues_to_the_bit(
    build: Build, batch: TokenBatch, layout: ParallelConfig, tmp_path: Path
) -> None:
    """Transformer Engine's optimizer and its layers' extra state included; local layers read the
    same file.
    """
    policy = build("qwen2", layout)
    for _ in range(2):
        policy.update(batch)
    checkpoint.stage(tmp_path, {"policy": policy.trainer})()
    resumed, local = build("qwen2", layout), build("qwen2", LOCAL)
    for other in (resumed, local):
        checkpoint.load(tmp_path, {"policy": other.trainer})
        for (name, ours), (_, theirs) in zip(policy.export_weights(), other.export_weights()):
            assert torch.equal(ours, theirs), name
    assert torch.equal(resumed.logprobs(batch), policy.logprobs(batch))
    assert resumed.update(batch) == pytest.approx(policy.update(batch), rel=1e-3)
