"""Low-rank adapters: what they compute, that the base stays as it is, and their files."""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragen_mega.commands import convert
from ragen_mega.config import LoraConfig, LossConfig, ParallelConfig, TrainConfig, parse
from ragen_mega.data.packing import Share, microbatch, pack, part_of
from ragen_mega.data.types import SamplingParams, Trajectory
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.lora import Adapter, Merged, NoMemory, adapters, attach
from ragen_mega.megatron.model import Chunks, build_model, model_inputs, transformer_config
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.weights import (
    export_weights,
    held,
    load_adapters,
    load_weights,
    trained,
)
from ragen_mega.models.directory import content_digest
from ragen_mega.models.layout import split_experts
from ragen_mega.models.lora import expected_adapters
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.run.check import check
from ragen_mega.storage.adapter_files import AdapterReader, save_adapter
from ragen_mega.storage.checkpoints import BASE_MODEL, CHECKPOINTS, FORMAT, STATE
from ragen_mega.storage.integrity import describe_file, write_manifest
from ragen_mega.storage.model_readers import MegatronReader, MergedReader, open_model
from ragen_mega.storage.model_sources import local_directory
from tests.support import gguf_models
from tests.support.forked_ranks import on_ranks
from tools.parity import (
    LOSS,
    TEMPERATURE,
    make_batch,
    merge,
    random_adapter,
    random_model,
    transformers_logprobs,
)

ONE = ParallelConfig()
TRAIN = TrainConfig(lr=1e-3, critic_lr=1e-3, max_tokens_per_microbatch=128)


def settings(rank: int = 3, targets: str = "all") -> LoraConfig:
    return LoraConfig(lora_rank=rank, lora_alpha=6.0, lora_targets=targets)


def reader(model: PreTrainedModel) -> Callable[[str], Tensor | None]:
    shape = ModelShape.of(model.config)
    return split_experts({k: v.detach() for k, v in model.state_dict().items()}, shape).get


def policy_of(
    model: PreTrainedModel, lora: LoraConfig, parallel: ParallelConfig = ONE
) -> MegatronPolicy:
    """A policy with random adapters beside a model."""
    groups = initialize(parallel)
    policy = MegatronPolicy(
        model.config, groups, parallel, TRAIN, LOSS, temperature=TEMPERATURE, lora=lora
    )
    policy.load_weights(reader(model))
    policy.load_adapter(random_adapter(ModelShape.of(model.config), lora).get)
    return policy


def exact_chunks(model: PreTrainedModel, parallel: ParallelConfig = ONE) -> Chunks:
    """The model in float64, without a trainer."""
    groups = initialize(parallel)
    chunks = build_model(model.config, transformer_config(model.config, parallel), groups)
    chunks.double()
    load_weights(chunks, reader(model))
    return chunks


def exact_gradients(architecture: str, parallel: ParallelConfig) -> dict[str, Tensor]:
    """Hidden states of the real positions, and the gradients of all adapters, by name, of a fixed
    weighted sum of these states.
    """
    model, lora = random_model(architecture).double(), settings()
    chunks = exact_chunks(model, parallel)
    attach(chunks, lora)
    chunks.double()
    load_adapters(chunks, random_adapter(ModelShape.of(model.config), lora).get)
    batch = make_batch(random_model(architecture))
    ranks = parallel.tensor_model_parallel_size
    part = part_of(batch, Share([0, 1], [0, 0]))
    micro = microbatch(part, multiple=ranks, device=torch.device("cpu"))
    hidden = chunks[0].head_input(chunks[0](**model_inputs(micro)))[: int(batch.cu_seqlens[2])]
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(hidden.shape, generator=draw, dtype=torch.float64)
    # as each rank has a part of the vocabulary, each adds a part of the loss
    (hidden * weights)[collectives.rank() :: ranks].sum().backward()
    gradients = {}
    for slot, parameter in trained(chunks):
        if vars(parameter)["sequence_parallel"]:  # whole, and of a part of the positions
            torch.distributed.all_reduce(parameter.grad)
        gradients[slot.parameter] = parameter.grad
    groups = initialize(parallel)
    return dict(export_weights(chunks, groups, tensors=gradients)) | {"hidden": hidden.detach()}


@pytest.mark.forks
@pytest.mark.parametrize("is_sequence", [False, True])
def test_two_ranks_agree_with_one_in_float64(is_sequence: bool, tmp_path: Path) -> None:
    """What they differ by in float32 is rounding."""
    layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=is_sequence)

    def compute() -> None:
        found = exact_gradients("qwen2", layout)
        if collectives.is_main():
            torch.save(found, tmp_path / "found")

    on_ranks(compute, 2)
    two, one = torch.load(tmp_path / "found"), exact_gradients("qwen2", ONE)
    assert two.keys() == one.keys() and len(one) > 20
    for name, tensor in one.items():
        assert tensor.abs().max() > 0
        assert (two[name] - tensor).abs().max() < 1e-11 * tensor.abs().max(), name


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize(
    "rank, targets", [(1, "all"), (3, "attention"), (64, "all")], ids=["1", "attention", "64"]
)
def test_merged_equals_unmerged_in_float64(architecture: str, rank: int, targets: str) -> None:
    model, lora = random_model(architecture).double(), settings(rank, targets)
    batch = make_batch(random_model(architecture))
    part = part_of(batch, Share([0, 1], [0, 0]))
    micro = microbatch(part, multiple=1, device=torch.device("cpu"))
    beside, alone = exact_chunks(model), exact_chunks(model)
    attach(beside, lora)
    beside.double()
    load_adapters(beside, random_adapter(ModelShape.of(model.config), lora).get)
    weights = {slot.parameter: parameter for slot, parameter in held(beside)}
    merged = Merged(beside, weights)
    with torch.no_grad():
        base = alone[0](**model_inputs(micro))
        for slot, parameter in held(alone):
            parameter.copy_(merged[slot.parameter])
        expected = alone[0](**model_inputs(micro))
        assert (expected - base).abs().max() > 1e-2
        assert (beside[0](**model_inputs(micro)) - expected).abs().max() < 1e-6
        for change in (wrong_scale, dropped):
            change([*adapters(beside)][-1])
            assert (beside[0](**model_inputs(micro)) - expected).abs().max() > 1e-6


def wrong_scale(adapter: Adapter) -> None:
    adapter.scale *= 1.01


def dropped(adapter: Adapter) -> None:
    adapter.is_on = False


def test_weights_without_memory_get_none_to_be_initialised() -> None:
    """As Transformer Engine 2.11 makes and resets a parameter (module/base.py, 1226)."""
    with NoMemory():
        parameter = torch.nn.Parameter(torch.empty(4, device="cpu"))
        reset = torch.nn.Parameter(torch.empty_like(parameter, device="cuda"))
        torch.nn.init.ones_(reset)
    assert parameter.device.type == reset.device.type == "meta"


def test_one_base_for_actor_critic_and_reference() -> None:
    """The base is the same memory, is bit for bit as before after updates of both, and is the
    reference policy; what is trained and moved are the adapters and the value head.
    """
    model = random_model("qwen2")
    batch, lora = make_batch(model), settings()
    policy = policy_of(model, lora)
    fresh = MegatronPolicy(
        model.config, policy.groups, ONE, TRAIN, LOSS, temperature=TEMPERATURE, lora=lora
    )
    fresh.load_weights(reader(model))
    base_logprobs = fresh.logprobs(batch)  # B is zero
    assert (base_logprobs - transformers_logprobs(model, batch)).abs().max() < 1e-4
    critic = MegatronCritic(
        model.config, policy.groups, ONE, TRAIN, LossConfig(), lora=lora, base=policy.chunks
    )
    before = {slot.parameter: parameter.clone() for slot, parameter in held(policy.chunks)}
    started = [parameter.clone() for parameter in policy.trainer.updated]
    for name in (policy, critic):
        for _ in range(2):
            name.update(batch)
    pointers = {slot.parameter: parameter.data_ptr() for slot, parameter in held(policy.chunks)}
    for slot, parameter in held(critic.chunks):
        if slot.key != "output_layer.weight":
            assert parameter.data_ptr() == pointers[slot.parameter]
    for slot, parameter in held(policy.chunks):
        assert torch.equal(parameter, before[slot.parameter]) and parameter.grad is None
    assert not any(torch.equal(a, b) for a, b in zip(started, policy.trainer.updated))
    assert torch.equal(policy.reference_logprobs(batch), base_logprobs)
    assert (policy.logprobs(batch) - base_logprobs).abs().max() > 1e-3
    assert critic.values(batch).abs().max() > 0
    total = sum(map(torch.numel, random_adapter(ModelShape.of(model.config), lora).values()))
    held_bytes = policy.trainer.memory.on_device()
    assert held_bytes == {"parameters": 4 * total, "gradients": 4 * total, "optimizer": 8 * total}


@pytest.mark.parametrize("is_distributed", [False, True])
def test_adapters_of_experts_alone_are_trained(is_distributed: bool) -> None:
    layout = replace(ONE, use_distributed_optimizer=is_distributed)
    model = random_model("qwen3_moe")
    policy = policy_of(model, settings(targets="experts"), layout)
    before = {name: tensor.clone() for name, tensor in policy.export_adapter()}
    policy.update(make_batch(model))
    assert all(".experts." in name for name in before)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.export_adapter())


@pytest.mark.parametrize(
    ("adam_eps", "asked", "factor"), [(1e-8, None, 10), (1e-2, None, 1), (1e-2, 3.0, 3)]
)
def test_rates_of_adapters(adam_eps: float, asked: float | None, factor: float) -> None:
    """Where steps are near gradient descent, the policy has the rate of all weights."""
    model, train = random_model("qwen2"), replace(TRAIN, adam_eps=adam_eps)
    lora = replace(settings(), lora_lr_factor=asked)
    groups = initialize(ONE)
    policy = MegatronPolicy(
        model.config, groups, ONE, train, LOSS, temperature=TEMPERATURE, lora=lora
    )
    critic = MegatronCritic(
        model.config, groups, ONE, train, LossConfig(), lora=lora, base=policy.chunks
    )
    rates = {group["max_lr"] for group in policy.trainer.optimizer.param_groups}
    assert rates == {factor * train.lr}
    rates = {group["max_lr"] for group in critic.trainer.optimizer.param_groups}
    assert rates == {(asked or 10) * train.critic_lr}


def test_exported_weights_are_merged_from_the_base_each_time() -> None:
    model, lora = random_model("qwen3_moe"), settings()
    policy = policy_of(model, lora)
    adapter = random_adapter(ModelShape.of(model.config), lora)
    truth = reader(merge(model.double(), adapter, lora.scale))
    for _ in range(3):
        for name, tensor in policy.export_weights():
            assert (tensor - truth(name)).abs().max() < 1e-6, name


@pytest.mark.parametrize("scale", [1e-4, 1e-3])
def test_an_engine_in_bfloat16_gets_small_adapters(scale: float) -> None:
    """Of a product far below the distance between two bfloat16 numbers, as after one update, the
    merged weights hold as much as float64 says: in the mean, since each holds all or nothing.
    """
    layout = replace(ONE, bf16=True)
    model, lora = random_model("qwen2"), settings(8)
    policy = policy_of(model, lora, layout)
    small = random_adapter(ModelShape.of(model.config), lora)
    for name in small:
        if ".lora_B." in name:
            small[name] *= scale
    policy.load_adapter(small.get)
    base = {name: tensor.clone() for name, tensor in policy.export_weights(is_merged=False)}
    along, square = 0.0, 0.0
    exports = dict(policy.export_weights())
    for name, tensor in policy.export_weights():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exports[name])
        up = small.get(name.replace(".weight", ".lora_B.weight"))
        change = tensor.double() - base[name].double()
        if up is None:
            assert not change.any()
            continue
        down = small[name.replace(".weight", ".lora_A.weight")]
        product = lora.scale * up.double() @ down.double()
        along += float((change * product).sum())
        square += float(product.square().sum())
    assert along / square == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("scale", [1e-4, 1e-3])
def test_layers_in_bfloat16_keep_small_adapters(scale: float) -> None:
    """Of a product far below the distance between two bfloat16 numbers the outputs of a layer hold
    as much as float64 says, in the mean; and with B = 0 they are the base's to the bit.
    """
    model, lora = random_model("qwen2"), settings(8)
    policy = policy_of(model, lora, replace(ONE, bf16=True))
    draw = torch.Generator().manual_seed(5)
    for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1"):
        linear = policy.chunks[0].decoder.layers[1].get_submodule(name)
        adapter, width = linear.adapter, linear.weight.shape[1]
        x = torch.randn((2048, 1, width), generator=draw).bfloat16()
        with torch.no_grad():
            vars(adapter)["is_on"] = False
            base = linear(x)[0]
            vars(adapter)["is_on"] = True
            adapter.lora_B.mul_(scale)
            down, up = (matrix.double() for matrix in adapter.matrices(0))
            change = linear(x)[0].double() - base.double()
            product = lora.scale * x.double() @ down.t() @ up.t()
            along = float((change * product).sum() / product.square().sum())
            assert along == pytest.approx(1.0, abs=0.1), name
            adapter.lora_B.zero_()
            assert torch.equal(linear(x)[0], base)


def test_peft_gives_our_logprobs(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, lora = random_model("qwen2"), settings()
    batch, policy = make_batch(model), policy_of(model, lora)
    model.save_pretrained(tmp_path / "model")
    save_adapter(
        tmp_path / "a", policy.export_adapter(), lora, model=str(tmp_path / "model"), base="d1"
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    ).float()
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "a").eval()
    ours = policy.logprobs(batch)
    assert (transformers_logprobs(theirs, batch) - ours).abs().max() < 1e-5
    back = AdapterReader(tmp_path / "a", ModelShape.of(model.config))
    back.check(lora, "d1")
    merged = MergedReader(open_model(tmp_path / "model"), back, lora.scale)
    for name, tensor in policy.export_weights():
        assert torch.equal(merged.read(name), tensor)
    theirs.save_pretrained(tmp_path / "b")  # what PEFT writes is read too
    other = AdapterReader(tmp_path / "b", ModelShape.of(model.config))
    assert all(torch.equal(other(name), t) for name, t in policy.export_adapter())


def test_an_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    shape, lora = ModelShape.of(random_model("qwen2").config), settings()
    tensors = random_adapter(shape, lora)
    save_adapter(tmp_path, tensors.items(), lora, model="m", base="d1")
    adapter = AdapterReader(tmp_path, shape)
    with pytest.raises(ValueError, match="has lora_rank 3; set --lora-rank 3"):
        adapter.check(settings(4), None)
    with pytest.raises(ValueError, match="set --lora-targets attention,mlp"):
        adapter.check(settings(targets="mlp"), None)
    with pytest.raises(ValueError, match="beside another model, with the digest d1"):
        adapter.check(lora, "d2")
    adapter.check(settings(targets="all"), None)  # of a model without experts
    part = settings(targets="attention")
    save_adapter(tmp_path / "b", random_adapter(shape, part).items(), part, model="m", base="d1")
    with pytest.raises(ValueError, match="has targets attention; set --lora-targets attention$"):
        AdapterReader(tmp_path / "b", shape).check(settings(targets="all"), None)
    with pytest.raises(ValueError, match="the model of this adapter"):
        AdapterReader(tmp_path, ModelShape.of(random_model("qwen3").config))
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="use_dora .* must be False, not True"):
        AdapterReader(tmp_path, shape)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_the_engine_with_an_adapter_samples_as_with_merged_weights(architecture: str) -> None:
    """And as the trainer computes; the base is sent once, and versions count alike."""
    model, lora = random_model(architecture), settings()
    policy = policy_of(model, lora)
    hf = model.config
    merged = EmbeddedEngine(hf, max_context=64, max_sessions=2)
    beside = EmbeddedEngine(hf, max_context=64, max_sessions=2, lora=lora)
    exports: list[str] = []

    def export(shard: object) -> Iterator[tuple[str, Tensor]]:
        exports.append("base")
        return policy.export_weights(is_merged=False)

    ways = (
        (merged, WeightSync(merged, policy.export_weights)),
        (beside, WeightSync(beside, export, adapter=policy.export_adapter)),
    )
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=20, seed=5)
    for version in (1, 2):
        found = []
        for engine, sync in ways:
            with engine.awake():
                sync.send()
                assert engine.weight_version == version
                found.append(asyncio.run(engine.generate([5, 6, 7], sampling, session=0)))
        one, other = found
        assert one.tokens == other.tokens
        assert torch.tensor(one.logprobs).sub(torch.tensor(other.logprobs)).abs().max() < 1e-5
        trajectory = Trajectory(group_id=0)
        trajectory.append_observation([5, 6, 7])
        trajectory.append_action(other).reward = 1.0
        ours = policy.logprobs(batch := pack([trajectory]))[batch.loss_mask]
        assert (ours - torch.tensor(other.logprobs)).abs().max() < 1e-4
        policy.load_adapter(random_adapter(ModelShape.of(hf), lora, seed=9).get)
    assert exports == ["base"]
    with beside.awake(), pytest.raises(RuntimeError, match="no weights"):
        asyncio.run(beside.generate([5], sampling, session=0))  # the base alone never samples


LAYOUT = ParallelConfig(
    tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True
)


@pytest.mark.forks
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_checkpoints_resume_under_another_layout(architecture: str, tmp_path: Path) -> None:
    """Two ranks write, one reads; the next update equals the update of a policy that went on."""
    model, lora = random_model(architecture), settings()
    batch = make_batch(model)

    def write() -> None:
        policy = policy_of(model, lora, LAYOUT)
        policy.update(batch)
        checkpoint.stage(tmp_path, {"actor": policy.trainer})()

    on_ranks(write, 2)
    policy = policy_of(model, lora)
    policy.update(batch)
    checkpoint.load(tmp_path, {"actor": policy.trainer})
    again = policy_of(model, lora)
    again.update(batch)
    shape = ModelShape.of(model.config)
    stored = MegatronReader(tmp_path, shape, lora)
    assert set(stored.names()) == set(expected_adapters(shape, lora))
    for name, tensor in policy.export_adapter():
        assert torch.equal(stored.read(name), tensor)
    for name, tensor in again.export_adapter():
        assert (stored.read(name) - tensor).abs().max() < 1e-4
    for one in (policy, again):
        one.update(batch)
    for (_, ours), (_, theirs) in zip(policy.export_adapter(), again.export_adapter()):
        assert (ours - theirs).abs().max() < 1e-3


@pytest.mark.parametrize("is_gguf", [False, True])
def test_an_adapter_of_a_run_merges_as_the_run_does(
    is_gguf: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the bit; its model may be a GGUF file, and another model is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    model, lora, base = gguf_models.random_model(), settings(), tmp_path / "base.gguf"
    if is_gguf:
        gguf_models.write_gguf(
            base, model, gguf_models.sentencepiece_tokenizer(), "sentencepiece", "F32"
        )
    else:
        model.save_pretrained(base := tmp_path / "base")
    step = tmp_path / "run" / CHECKPOINTS / "step_00000002"
    step.mkdir(parents=True)
    checkpoint.stage(step, {"actor": policy_of(model, lora).trainer})()
    (step / STATE).write_text("{}")
    facts = {"format": FORMAT, "step": 2, "score": None}
    facts["config"] = {"model": {"load": str(base)}, "lora": asdict(lora)}
    facts["models"] = {BASE_MODEL: content_digest(local_directory(str(base)))}
    write_manifest(step, facts, {path.name: describe_file(path) for path in step.iterdir()})

    def converted(source: Path, name: str, *flags: str) -> Path:
        convert.main(["--from", str(source), "--to", str(tmp_path / name), *flags])
        return tmp_path / name

    whole = ("--format", "huggingface")
    direct = converted(tmp_path / "run", "direct", *whole)
    adapter = converted(step, "adapter", "--format", "peft")
    beside = converted(adapter, "beside", *whole, "--base", str(base))
    one, other = (load_file(path / "model.safetensors") for path in (direct, beside))
    expected = merge(model, random_adapter(ModelShape.of(model.config), lora), lora.scale)
    weights = expected.state_dict()
    assert one.keys() == other.keys() <= weights.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        assert (tensor - weights[name]).abs().max() < 1e-5
    for source, flags, said in (
        (adapter, (), "is an adapter; name its model by --base"),
        (adapter, ("--base", str(direct)), "was trained beside another model"),
        (direct, ("--base", str(base)), "is the model of an adapter"),
        (direct, ("--format", "peft"), "has no adapter; give a run with --lora-rank"),
    ):
        with pytest.raises(SystemExit):
            converted(source, "refused", *whole, *flags)
        assert said in capsys.readouterr().err and not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--lora-rank", "0"], "lora_rank must be at least 1"),
        (["--lora-rank", "8", "--lora-targets", "head"], "lora_targets must be of attention"),
        (["--lora-alpha", "8"], "lora_alpha does nothing without lora_rank"),
        (["--lora-rank", "8", "--critic-load", "other"], "critic_load .* is another"),
        (
            ["--lora-rank", "8", "--warm-start-critic-steps", "9"],
            "warm_start_critic_steps makes another one",
        ),
    ],
)
def test_impossible_settings(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(["--recipe", "none", *flags])


def test_a_target_that_the_model_has_not(tmp_path: Path) -> None:
    config = parse(
        ["--recipe", "none", "--lora-rank", "8", "--lora-targets", "experts"]
        + ["--output", str(tmp_path)]
    )
    with pytest.raises(ValueError, match="lora_targets experts: a qwen2 model has none"):
        check(config, 1, 1)
