"""Which layers and FP8 recipes a machine can compute, what shapes they need, and that padding for
them changes nothing.

Machines are passed as values, so that every row of the table is checked without the machine.
"""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Microbatch, TokenBatch, Trajectory
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.layers import layer_spec
from ragen_mega.megatron.model import check_model, transformer_config
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.precision import (
    RECIPES,
    Device,
    check_widths,
    choose_implementation,
    describe,
    layer_fields,
    obstacle_to_recipe,
    scales_from_history,
    token_alignment,
)
from ragen_mega.megatron.weights import held
from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.huggingface import random_weights
from ragen_mega.models.rounding import spread_bits
from tests.support.rounding import FLOAT32, SLACK, forward_bound

CPU = Device(None, None, None)
AMPERE = Device((8, 0), (12, 8), "2.11.0", flash_attention=True)
ADA = Device((8, 9), (12, 8), "2.11.0", flash_attention=True)
WITHOUT_FLASH = Device((8, 9), (12, 8), "2.11.0")
HOPPER = Device((9, 0), (13, 0), "2.11.0")
HOPPER_OLD_CUDA = Device((9, 0), (12, 8), "2.11.0")
BLACKWELL = Device((10, 0), (13, 0), "2.11.0")
CONSUMER_BLACKWELL = Device((12, 0), (13, 0), "2.11.0")
BF16, FP8 = ParallelConfig(bf16=True), ParallelConfig(bf16=True, fp8="hybrid")
HF = Qwen2Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    ("machine", "possible"),
    [
        (CPU, ""),
        (AMPERE, ""),
        (ADA, "delayed tensorwise"),
        (Device((8, 9), (12, 0), "2.11.0"), ""),
        (HOPPER, "delayed tensorwise blockwise"),
        (HOPPER_OLD_CUDA, "delayed tensorwise"),
        (BLACKWELL, "delayed tensorwise blockwise mxfp8"),
        (CONSUMER_BLACKWELL, "delayed tensorwise blockwise"),
    ],
)
def test_recipes_of_a_machine(machine: Device, possible: str) -> None:
    """The rows of Transformer Engine 2.11's check_fp8_support, check_fp8_block_scaling_support,
    check_mxfp8_support.
    """
    assert [
        name for name in RECIPES if obstacle_to_recipe(name, machine) is None
    ] == possible.split()


@pytest.mark.parametrize(
    ("parallel", "machine", "chosen"),
    [
        (BF16, CPU, "local"),
        (BF16, HOPPER, "transformer_engine"),
        (BF16, AMPERE, "transformer_engine"),
        (BF16, WITHOUT_FLASH, "local"),
        (BF16, Device((9, 0), (13, 0), None), "local"),
        (BF16, Device((9, 0), (13, 0), "2.8.0"), "local"),
        (BF16, Device((7, 5), (12, 8), "2.11.0"), "local"),
        (ParallelConfig(), HOPPER, "local"),
        (ParallelConfig(bf16=True, transformer_impl="local"), HOPPER, "local"),
        (FP8, ADA, "transformer_engine"),
        (
            ParallelConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8"),
            BLACKWELL,
            "transformer_engine",
        ),
    ],
)
def test_layers_of_a_machine(parallel: ParallelConfig, machine: Device, chosen: str) -> None:
    assert choose_implementation(parallel, machine) == chosen


@pytest.mark.parametrize(
    ("parallel", "machine", "message"),
    [
        (FP8, CPU, "--fp8 hybrid .*CUDA device.*drop --fp8"),
        (
            FP8,
            Device((9, 0), (13, 0), None),
            "Transformer Engine, .*pip install .*h100",
        ),
        (FP8, Device((9, 0), (13, 0), "2.8.0"), "Transformer Engine 2.9 .*, not 2.8.0"),
        (
            FP8,
            AMPERE,
            "tensorwise .* 8.9, not 8.0; .*drop --fp8",
        ),
        (
            ParallelConfig(bf16=True, fp8="hybrid", fp8_recipe="blockwise"),
            HOPPER_OLD_CUDA,
            "CUDA 12.9, not 12.8; .*--fp8-recipe delayed or tensorwise",
        ),
        (
            ParallelConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8"),
            HOPPER,
            "mxfp8 .* 10.0, not 9.0; .*--fp8-recipe delayed .* blockwise",
        ),
        (
            ParallelConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8"),
            CONSUMER_BLACKWELL,
            "below 12.0, not 12.0",
        ),
        (
            ParallelConfig(bf16=True, transformer_impl="transformer_engine"),
            CPU,
            "--transformer-impl transformer_engine .*CUDA device.*--transformer-impl local",
        ),
        (
            ParallelConfig(bf16=True, transformer_impl="transformer_engine"),
            Device((7, 5), (12, 8), "2.11.0"),
            "bfloat16, .* 8.0, not 7.5",
        ),
        (
            ParallelConfig(bf16=True, transformer_impl="transformer_engine"),
            WITHOUT_FLASH,
            "fused attention .* 9.0 .* 8.9.*flash-attn, .*--transformer-impl local",
        ),
    ],
)
def test_what_cannot_work_is_one_line(
    parallel: ParallelConfig, machine: Device, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        choose_implementation(parallel, machine)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp8_without_a_gpu_fails_before_anything_is_built() -> None:
    assert Device.here().capability is None
    with pytest.raises(ValueError, match="--fp8 hybrid .*CUDA device"):
        initialize(FP8)
    shutdown()


@pytest.mark.parametrize(
    ("distribution", "counts"), [("flash_attn_4-4.0.0b19", False), ("flash_attn-2.8.3", True)]
)
def test_flash_attention_is_known_by_its_distribution(
    distribution: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The h100 extra installs flash-attn-4, as flash_attn/cute, which Transformer Engine does not
    use.
    """
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    name, _, version = distribution.partition("-")
    about = tmp_path / f"{distribution}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert Device.here().flash_attention is counts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (8, True)]
)
def test_every_slice_of_padded_tokens_fits_the_recipe(
    recipe: str, tp: int, sequence_parallel: bool
) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        bf16=True,
        fp8="hybrid",
        fp8_recipe=recipe,
    )
    multiple = token_alignment(parallel)
    slice_length = multiple // tp if sequence_parallel else multiple
    # What Transformer Engine asserts of a slice: 8 rows per product and 16 for weight gradients, 32
    # and 128 of blocks.
    expected = {
        "delayed": 16,
        "tensorwise": 16,
        "mxfp8": 32,
        "blockwise": 128 if sequence_parallel else 16,
    }[recipe]
    assert multiple % tp == 0 or not sequence_parallel
    assert slice_length % expected == 0 and slice_length == expected  # no more padding than needed


def test_without_fp8_only_sequence_parallelism_pads() -> None:
    assert token_alignment(BF16) == 1
    assert token_alignment(ParallelConfig(tensor_model_parallel_size=4)) == 1
    assert (
        token_alignment(ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True)) == 4
    )


@pytest.mark.parametrize(
    ("recipe", "tp", "message"),
    [
        ("tensorwise", 2, r"intermediate size .*\(24\) .*multiple of 16"),
        ("mxfp8", 1, r"intermediate size .*\(48\) .*multiple of 32"),
    ],
)
def test_widths_that_fp8_cannot_multiply_are_refused(recipe: str, tp: int, message: str) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, bf16=True, fp8="hybrid", fp8_recipe=recipe
    )
    with pytest.raises(ValueError, match=message):
        check_model(HF, parallel)
    check_model(HF, ParallelConfig(bf16=True, fp8="hybrid"))


def test_gathered_blocks_need_a_hidden_size_of_whole_blocks() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        bf16=True,
        fp8="hybrid",
        fp8_recipe="blockwise",
    )
    check_widths({"hidden size": 896, "intermediate size": 48}, parallel)
    with pytest.raises(ValueError, match=r"hidden size .*\(96\) .*multiple of 128"):
        check_widths({"hidden size": 96}, parallel)


def test_recipes_reach_megatron_core() -> None:
    """Its own configuration takes the fields, amax collectives never span data-parallel ranks,
    parameters stay as they are.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    for recipe in RECIPES:
        parallel = ParallelConfig(bf16=True, fp8="e4m3", fp8_recipe=recipe)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            params_dtype=torch.bfloat16,
            **layer_fields(parallel, "transformer_engine"),
        )
        assert (config.fp8, config.fp8_recipe, config.tp_only_amax_red, config.fp8_param) == (
            "e4m3",
            recipe,
            True,
            False,
        )
        assert not config.fp8_dot_product_attention and not config.fp8_multi_head_attention
        assert scales_from_history(config) == (recipe == "delayed")
        assert (config.fp8_amax_history_len == 1024) == (recipe == "delayed")
        assert f"FP8 e4m3 with {recipe} scaling" in describe(config)
    assert FP8.recipe == "tensorwise" and layer_fields(BF16, "local") == {
        "transformer_impl": "local"
    }


def ragged_batch(seed: int = 0) -> TokenBatch:
    """Trajectories of 7 to 40 random tokens, half of them sampled, with every field that the losses
    read.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(0, HF.vocab_size, (count,), generator=generator).tolist()

    trajectories = []
    for index in range(5):
        trajectory = Trajectory(group_id=index)
        trajectory.append_observation(draw(3 + 4 * index))
        tokens = draw(4 + 4 * index)
        trajectory.append_action(Completion(tokens, [-4.0] * len(tokens), "stop"))
        trajectories.append(trajectory)
    batch = pack(trajectories)
    mask = batch.loss_mask

    def noise(center: float) -> torch.Tensor:
        return (center + 0.3 * torch.randn(batch.num_positions, generator=generator)) * mask

    return batch.with_fields(
        old_logprobs=noise(-4.0),
        rollout_logprobs=noise(-4.0),
        advantages=noise(0.0),
        values=noise(0.0),
        returns=noise(0.5),
    )


@pytest.fixture(scope="module")
def models():
    """A policy and a critic of the same random weights, on this process alone."""
    groups = initialize(ParallelConfig())
    train = TrainConfig(lr=1e-3, critic_lr=1e-3, max_tokens_per_microbatch=48, clip_grad=1.0)
    weights = random_weights(HF, seed=1)

    def build(bf16: bool = False):
        parallel, loss = ParallelConfig(bf16=bf16), LossConfig(entropy_coef=0.01)
        policy = MegatronPolicy(HF, groups, parallel, train, loss, temperature=0.8)
        critic = MegatronCritic(HF, groups, parallel, train, loss)
        for model in (policy, critic):
            model.load_weights(weights.get)
        return policy, critic

    yield build
    shutdown()


def test_master_copies_start_from_all_bits_of_the_checkpoint(models) -> None:
    """What bfloat16 rounds off is kept, so that small steps count from the first."""
    weights = random_weights(HF, seed=1)
    for model in models(bf16=True):
        checked = 0
        for slot, parameter in held(model.chunks):
            own = model.trainer.updated[parameter].own
            if own is None or slot.names == (VALUE_HEAD,):
                continue
            expected = slot.shard([weights[name] for name in slot.names], 0, 1)
            assert torch.equal(own.view_as(expected), expected)
            assert torch.equal(parameter, expected.bfloat16())
            checked += int(not torch.equal(parameter.float(), expected))
        assert checked > 5


def test_padding_for_fp8_changes_neither_loss_nor_gradients(models) -> None:
    batch = ragged_batch()
    for exact, padded in zip(models(), models()):
        assert exact.trainer.alignment == 1
        padded.trainer.alignment = 32
        sizes = [len(micro.input_ids) for micro in _microbatches(padded.trainer, batch)]
        assert all(size % 32 == 0 for size in sizes) and sum(sizes) > batch.num_positions
        read = "logprobs" if isinstance(exact, MegatronPolicy) else "values"
        # forward and backward, each result as far from the exact one as the other
        tolerance = 4 * forward_bound(HF, int(batch.lengths.max()))
        expected = getattr(exact, read)(batch)
        torch.testing.assert_close(
            getattr(padded, read)(batch),
            expected,
            rtol=0,
            atol=tolerance * float(expected.abs().max()),
        )
        first, second = exact.update(batch), padded.update(batch)
        assert first["grad_norm"] > 0
        for key in first:
            assert second[key] == pytest.approx(first[key], rel=tolerance, abs=tolerance), key
        gradients, truth = padded.trainer.gradients(), exact.trainer.gradients()
        largest = max(float(gradient.abs().max()) for gradient in truth.values())
        for name, gradient in truth.items():  # the keys' biases have zero but for rounding
            atol = tolerance * float(gradient.abs().max()) + SLACK * FLOAT32.eps * largest
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=atol)


def _microbatches(trainer, batch: TokenBatch) -> list[Microbatch]:
    return trainer._microbatches(batch, trainer._parts(batch))


def test_a_pass_that_only_finds_scales_leaves_no_trace(models) -> None:
    """Delayed scaling needs a pass before the first one; here without FP8, where both must give the
    same bits.
    """
    batch = ragged_batch()
    for plain, twice in zip(models(), models()):
        twice.trainer._lacks_scales = twice.trainer._lacks_gradient_scales = True
        read = "logprobs" if isinstance(plain, MegatronPolicy) else "values"
        assert torch.equal(getattr(twice, read)(batch), getattr(plain, read)(batch))
        assert twice.trainer._lacks_gradient_scales and not twice.trainer._lacks_scales
        assert twice.update(batch) == plain.update(batch)
        assert not twice.trainer._lacks_gradient_scales
        for ours, theirs in zip(twice.chunks.parameters(), plain.chunks.parameters()):
            assert torch.equal(ours, theirs)


def test_originals_gradients_and_moments_are_float32_beside_bfloat16_parameters(models) -> None:
    for model in models(bf16=True):
        model.update(ragged_batch())
        backbone = [p for name, p in model.chunks.named_parameters() if "output_layer" not in name]
        assert {p.dtype for p in backbone} == {torch.bfloat16}
        assert {p.main_grad.dtype for p in model.chunks.parameters()} == {torch.float32}
        originals = [p.main_param for p in backbone]
        assert {p.dtype for p in originals} == {torch.float32}
        assert all(
            torch.equal(main.to(torch.bfloat16), p.detach()) for main, p in zip(originals, backbone)
        )
        optimizers = getattr(
            model.trainer.optimizer, "chained_optimizers", [model.trainer.optimizer]
        )
        states = [state for optimizer in optimizers for state in optimizer.optimizer.state.values()]
        assert len(states) == len(list(model.chunks.parameters()))
        assert {state[kind].dtype for state in states for kind in ("exp_avg", "exp_avg_sq")} == {
            torch.float32
        }


def test_heads_are_no_layers_of_transformer_engine(models) -> None:
    """FP8 contexts exist inside `decoder` alone; both heads are outside and none of its modules."""
    for model in models(bf16=True):
        inside = set(model.chunks[0].decoder.modules())
        head = getattr(model.chunks[0], "output_layer", None)
        assert head is not None and head not in inside
        assert type(head).__module__.split(".")[0] in ("megatron", "ragen_mega", "torch")
    _, critic = models(bf16=True)
    assert critic.chunks[0].output_layer.weight.dtype == torch.float32


def test_without_transformer_engine_layers_are_local(models) -> None:
    config = transformer_config(HF, ParallelConfig())
    if choose_implementation(ParallelConfig(), Device.here()) == "local":
        assert config.transformer_impl == "local"
    assert layer_spec(config).layer_norm.__module__ == "ragen_mega.megatron.layers"


def test_master_copies_of_bfloat16_weights_are_spread_between_their_neighbours() -> None:
    """The draws round to the weight, fill the whole interval evenly, and leave zeros alone."""
    weights = torch.tensor([1.0, -1.0, 0.037, 3e-39, 0.0]).bfloat16().repeat_interleave(20000)
    spread = spread_bits(weights, "a")
    assert spread.dtype == torch.float32 and torch.equal(spread.bfloat16(), weights)
    assert torch.equal(spread, spread_bits(weights, "a"))
    assert not torch.equal(spread, spread_bits(weights, "b"))
    one, minus, small, tiny, zero = spread.view(5, -1).double()
    assert torch.equal(zero, torch.zeros(20000)) and len(tiny.unique()) > 1000
    # a step of a quarter of the distance moves a quarter of the weights, where no binade ends
    step = 2.0**-12 / 4  # 0.037 lies between 2^-5 and 2^-4: 2^-12 apart
    moved = ((small + step).float().bfloat16() != weights[2 * 20000]).double().mean()
    assert abs(float(moved) - 0.25) < 4 * (0.25 * 0.75 / 20000) ** 0.5
    assert abs(float((one + minus).mean())) < 1e-4
