"""What a model directory says is computed or refused, by --load and by conversion alike; what is
accepted gives the logits of transformers in float64.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers import quantizer_finegrained_fp8

from ragen_mega.config import ParallelConfig, parse
from ragen_mega.engines.embedded.decoder import Decoder
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.engines.embedded.kv_cache import KVCache
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.model import build_model, transformer_config
from ragen_mega.megatron.weights import export_weights, load_weights
from ragen_mega.models.directory import check_model_directory
from ragen_mega.models.families import FAMILIES
from ragen_mega.models.huggingface import load_config
from ragen_mega.models.layout import split_experts
from ragen_mega.models.shape import ModelShape
from ragen_mega.run.build import build
from ragen_mega.storage.model_readers import open_model
from tests.support.converted_models import convert
from tests.support.positions import LLAMA3

CLASSES = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
}
OWN = {
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {
        "head_dim": 12, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mistral": {"sliding_window": None},
}  # fmt: skip
"""Entries in which a family's model differs from the others."""
SHORT = LLAMA3 | {
    "high_freq_factor": 2.0, "original_max_position_embeddings": 16, "rope_theta": 9.0,
}  # fmt: skip
SIZES = dict(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
BLOCK = (8, 16)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"],
}
FILE = "model.safetensors"
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def model_config(family: str, **changes) -> PretrainedConfig:
    return CLASSES[family](**SIZES | OWN.get(family, {}) | changes)


def write_model(directory: Path, family: str = "qwen2", **changes) -> Path:
    """What transformers saves of a model with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(directory)
    return directory


def edit_config(**changes) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return edit


def quantise(tensors: dict[str, Tensor]) -> None:
    """Qwen's published layout: matrices of layers, but routers, in FP8, a scale for every block."""
    for name, weight in list(tensors.items()):
        is_router = name.endswith("mlp.gate.weight")
        if name.startswith("model.layers.") and weight.dim() == 2 and not is_router:
            rows, columns = weight.shape[0] // BLOCK[0], weight.shape[1] // BLOCK[1]
            blocks = weight.reshape(rows, BLOCK[0], columns, BLOCK[1])
            scale = blocks.abs().amax((1, 3)) / 448
            quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name] = quantised.reshape(weight.shape)
            tensors[f"{name}_scale_inv"] = scale.bfloat16()  # the type in Qwen's files
        else:
            tensors[name] = weight.bfloat16()


def write_fp8(directory: Path, family: str = "qwen2", **changes) -> Path:
    write_model(directory, family, **changes)
    edit_tensors(quantise)(directory)
    edit_config(quantization_config=FP8, dtype="bfloat16")(directory)
    return directory


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    def all_names(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[change(name)] = tensors.pop(name)

    return edit_tensors(all_names)


def cut_file(share: float) -> Callable[[Path], None]:
    def cut(directory: Path) -> None:
        path = directory / FILE
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return cut


def edit_header(
    change: Callable[[dict[str, Any]], None], length: int | None = None
) -> Callable[[Path], None]:
    """Rewrite the header of the file, with a wrong length of itself if one is given."""

    def edit(directory: Path) -> None:
        data = (directory / FILE).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        size = (len(text) if length is None else length).to_bytes(8, "little")
        (directory / FILE).write_bytes(size + text + data[end:])

    return edit


def put(name: str, value: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({name: value(tensors).contiguous()}))


# harm, what the error says; on an untied Qwen2, or on what "on" names
REFUSED: dict[str, tuple] = {
    "activation": (edit_config(hidden_act="gelu"), "hidden_act in config.json must be 'silu'"),
    "window": (edit_config(use_sliding_window=True), "use_sliding_window .* must be false"),
    "layers with a window": (
        edit_config(layer_types=["full_attention", "sliding_attention"]),
        r"layer_types .* must be 'full_attention' in every layer, not \['full_attention', 'sliding",
    ),
    "dropout": (edit_config(attention_dropout=0.1), "attention_dropout .* must be 0.0, not 0.1"),
    "rope scaling": (
        edit_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rope_parameters .* must be of rope_type 'default' or 'llama3'",
    ),
    "rope of some channels": (
        edit_config(
            rope_parameters={
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            }
        ),
        "rope_parameters",
    ),  # fmt: skip
    "rope without a base": (
        edit_config(rope_parameters={"rope_type": "default", "rope_theta": None}),
        "rope_parameters",
    ),
    "type that is none": (edit_config(dtype="bf16"), "cannot read a model configuration from"),
    "no causal mask": (edit_config(is_causal=False), "is_causal in config.json must be true"),
    "layers of their own": (
        edit_config(per_layer_config={"0": {"intermediate_size": 96}}),
        "per_layer_config in config.json must be absent",
    ),
    "class": (
        edit_config(architectures=["Qwen2ForSequenceClassification"]),
        r"architectures .* must be \['Qwen2ForCausalLM'\]",
    ),
    "heads": (edit_config(num_attention_heads=3, head_dim=8), r"must be a multiple of num_key"),
    "zero": (edit_config(rms_norm_eps=0.0), "rms_norm_eps in config.json must be above 0, not 0.0"),
    "other family": (edit_config(model_type="mixtral"), "model_type must be one of qwen2, qwen3"),
    "quantisation": (
        edit_config(quantization_config={"quant_method": "awq", "bits": 4}),
        "quantization_config in config.json must be absent or FP8",
    ),
    "biases in Qwen3": (
        edit_config(attention_bias=True), "attention_bias .* must be false", "qwen3",
    ),
    "layers without experts": (
        edit_config(mlp_only_layers=[1]), "mlp_only_layers .* must be empty", "qwen3_moe",
    ),
    "experts in every second layer": (
        edit_config(decoder_sparse_step=2), "decoder_sparse_step .* must be 1, not 2", "qwen3_moe",
    ),
    "shared experts": (
        edit_config(shared_expert_intermediate_size=32),
        "shared_expert_intermediate_size .* must be absent", "qwen3_moe",
    ),
    "more choices than experts": (
        edit_config(num_experts_per_tok=6), r"num_experts_per_tok \(6\) .* at most .* \(5\)",
        "qwen3_moe",
    ),
    "a router that cannot learn": (
        edit_config(num_experts_per_tok=1), "norm_topk_prob .* set it to false", "qwen3_moe",
    ),
    "fewer experts in the file": (
        edit_config(num_local_experts=6), "lacks model.layers.0.mlp.experts.5.gate_proj.weight",
        "qwen3_moe",
    ),
    "experts twice": (
        put("model.layers.0.mlp.experts.down_proj", lambda _: torch.zeros(5, 32, 32)),
        "mlp.experts.down_proj holds the same expert", "qwen3_moe",
    ),
    "window of Mistral": (
        edit_config(sliding_window=4), "sliding_window .* must be null, not 4", "mistral",
    ),
    "biases in Llama": (edit_config(mlp_bias=True), "mlp_bias .* must be false", "llama"),
    "Llama 3.1's positions without a context": (
        edit_config(rope_parameters=SHORT | {"original_max_position_embeddings": 0}),
        "rope_parameters .* must be of rope_type 'default' or 'llama3'", "llama",
    ),
    "Llama 3.1's positions with turns in the wrong order": (
        edit_config(rope_parameters=SHORT | {"low_freq_factor": 4}), "rope_parameters", "llama",
    ),
    "Llama 3.1's positions with an entry more": (
        edit_config(rope_parameters=SHORT | {"mscale": 1.0}), "rope_parameters", "llama",
    ),
    "rows in the vocabulary": (
        edit_config(vocab_size=80), r"embed_tokens.weight has shape \[67, 32\] .* \[80, 32\]",
    ),
    "more layers in the file": (
        edit_config(num_hidden_layers=1, layer_types=["full_attention"]),
        "holds model.layers.1.input_layernorm.weight and 11 more, for which a qwen2 policy",
    ),
    "more layers in the config": (
        edit_config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "lacks model.layers.2.input_layernorm.weight and 11 more",
    ),
    "extra tensor": (
        put("model.layers.0.mlp.gate_proj.bias", lambda _: torch.zeros(48)),
        "holds model.layers.0.mlp.gate_proj.bias, for which",
    ),
    "missing tensor": (edit_tensors(lambda tensors: tensors.pop(K_PROJ)), f"lacks {K_PROJ}; is it"),
    "shape": (put(K_PROJ, lambda tensors: tensors[K_PROJ].t()), rf"{K_PROJ} has shape \[32, 16\]"),
    "integers": (put(K_PROJ, lambda tensors: tensors[K_PROJ].int()), f"{K_PROJ} is I32 in"),
    "FP8 that no config explains": (
        put(K_PROJ, lambda tensors: tensors[K_PROJ].to(torch.float8_e4m3fn)), "is F8_E4M3 in",
    ),
    "scale that no config explains": (
        put(f"{K_PROJ}_scale_inv", lambda tensors: torch.ones(2, 2)), "holds .*_inv, for which",
    ),
    **{
        f"names with {what}": (
            rename(change), rf"it holds {first}\S*, which is .*: rename .*{remedy}",
        )
        for what, change, first, remedy in (
            ("module", lambda name: f"module.{name}", "module.lm_head.weight", "the wrapper"),
            ("two wrappers", lambda name: f"module._orig_mod.{name}", "module", "the wrapper"),
            ("an inner wrapper", lambda name: name.replace("mlp.", "mlp._orig_mod."),
             "model.layers", "the wrapper"),
            ("PEFT", lambda name: f"base_model.model.{name}", "base_model", "merge_and_unload"),
            ("a base layer", lambda name: name.replace("q_proj.", "q_proj.base_layer."),
             "model.layers.0.self_attn.q_proj.base_layer", "merge_and_unload"),
            ("no model", lambda name: name.removeprefix("model."), "embed_tokens", "CausalLM"),
            ("transformer", lambda name: name.replace("model.", "transformer."), "transformer",
             "CausalLM"),
            ("a larger model", lambda name: f"language_model.{name}", "language_model", "CausalLM"),
        )
    },
    "half a file": (cut_file(0.5), "cannot read .*model.safetensors: .*; the file is missing or"),
    "no file": (cut_file(0.0), "cannot read .*model.safetensors"),
    "offsets below zero": (edit_header(lambda header: header[K_PROJ].update(data_offsets=[-8, 8])),
        "cannot read .*model.safetensors"),
    "offsets behind the end": (
        edit_header(lambda header: header[K_PROJ].update(data_offsets=[0, 2**62])),
        "cannot read .*model.safetensors"),
    "a header without end": (edit_header(lambda header: None, length=2**63 - 1),
        "cannot read .*model.safetensors"),
    "tied head": (
        put("lm_head.weight", lambda tensors: tensors["model.embed_tokens.weight"] + 1),
        "ties lm_head.weight to the embedding, and the two differ", "tied",
    ),
    "FP8 without scale": (
        edit_tensors(lambda tensors: tensors.pop(f"{K_PROJ}_scale_inv")), "is F8_E4M3 in", "fp8",
    ),
    "scale of another grid": (
        put(f"{K_PROJ}_scale_inv", lambda _: torch.ones(1, 2)),
        r"must be F8_E4M3 with a scale for every block of \[8, 16\]", "fp8",
    ),
    "scale of no FP8": (
        put(K_PROJ, lambda tensors: tensors[K_PROJ].float()), "must be F8_E4M3 with a scale", "fp8",
    ),
    "other scales": (
        edit_config(quantization_config=FP8 | {"scale_fmt": "ue8m0"}),
        "must be absent or FP8", "fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_training_and_conversion_in_the_same_words(case: str, tmp_path: Path) -> None:
    harm, message, *on = REFUSED[case]
    write = write_fp8 if on == ["fp8"] else write_model
    start = write(
        tmp_path / "start",
        on[0] if on and on[0] in CLASSES else "qwen2",
        tie_word_embeddings=on == ["tied"],
    )
    convert(start, tmp_path / "good", "huggingface")
    harm(start)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (start / name).touch()  # nobody comes as far as to read them
    flags = ["--load", str(start), "--output", str(tmp_path), "--environments", "bandit"]
    with pytest.raises(ValueError, match=message) as training:
        build(parse(flags))
    with pytest.raises(ValueError, match=message) as conversion:
        convert(start, tmp_path / "target", "huggingface")
    assert str(training.value) == str(conversion.value) and "\n" not in str(training.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "start"]  # nothing begun


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_none_are_refused_when_they_are_read(value: float, tmp_path: Path) -> None:
    start = write_model(tmp_path / "start")
    edit_tensors(lambda tensors: tensors[K_PROJ].view(-1)[5:6].fill_(value))(start)
    hf, parallel = load_config(str(start)), ParallelConfig()
    model = build_model(hf, transformer_config(hf, parallel), initialize(parallel))
    for use in (
        lambda: load_weights(model, open_model(start)),
        lambda: convert(start, tmp_path / "target", "huggingface"),
    ):
        with pytest.raises(ValueError, match=f"{K_PROJ}.* NaN or infinite"):
            use()
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("place", range(6))
def test_an_infinite_number_of_a_bfloat16_checkpoint_is_refused(place: int, tmp_path: Path) -> None:
    """Wherever it is: the numbers below infinity that stand for it are finite in float32."""
    start = write_model(tmp_path / "start")
    edit_tensors(lambda tensors: tensors[K_PROJ].view(-1)[place].fill_(float("inf")))(start)
    hf, parallel = load_config(str(start)), ParallelConfig(bf16=True)
    model = build_model(hf, transformer_config(hf, parallel), initialize(parallel))
    read = open_model(start)
    with pytest.raises(ValueError, match=f"{K_PROJ}.* NaN or infinite"):
        load_weights(model, lambda name: read.read(name).bfloat16(), lambda *_: None)


# Entries of config.json that are said to be neutral, with another value; transformers itself fails
# where return_dict is false.
OTHER_VALUES = {
    "transformers_version": "4.0.0", "dtype": "bfloat16", "initializer_range": 1.0,
    "use_cache": False, "output_hidden_states": True, "return_dict": True,
    "chunk_size_feed_forward": 1, "id2label": {"0": "a"}, "label2id": {"a": 0},
    "problem_type": "regression", "pad_token_id": 3, "bos_token_id": 3, "eos_token_id": 3,
    "sliding_window": 2, "max_window_layers": 0, "pretraining_tp": 2, "intermediate_size": 80,
    "output_router_logits": False, "router_aux_loss_coef": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_of_the_config_class_is_listed_once(family: str) -> None:
    ours = FAMILIES[family]
    assert FAMILIES.keys() == CLASSES.keys() and ours.neutral <= OTHER_VALUES.keys()
    listed = [*ours.computed, *ours.limits, *ours.neutral]
    assert len(listed) == len(set(listed))
    fields = {field.name for field in dataclasses.fields(CLASSES[family])}
    assert fields <= set(listed), fields - set(listed)


@torch.no_grad()
def transformers_logits(directory: Path, **options) -> Tensor:
    options |= {"dtype": torch.float64, "experts_implementation": "eager"}  # the others need less
    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    return model.eval()(TOKENS[None], return_dict=True).logits[0]


@torch.no_grad()
def our_logits(directory: Path) -> Tensor:
    """By the trainer's load and export and the embedded decoder, in float64."""
    hf, parallel, read = load_config(str(directory)), ParallelConfig(), open_model(directory)
    groups = initialize(parallel)
    model = build_model(hf, transformer_config(hf, parallel), groups)
    load_weights(model, read)
    exported = dict(export_weights(model, groups))
    for name, tensor in exported.items():  # every tensor went in and came out
        assert torch.equal(tensor, read(name).float())
    shape, num_tokens = ModelShape.of(hf), len(TOKENS)
    decoder = Decoder(shape, exported.items(), max_context=num_tokens, dtype=torch.float64)
    cache = KVCache(shape, num_slots=1, max_context=num_tokens, dtype=torch.float64)
    rows = np.zeros(num_tokens, dtype=np.int64)
    cache.reserve(rows[:1], np.array([num_tokens]))
    return decoder.logits(decoder.forward(TOKENS.numpy(), rows, np.arange(num_tokens), cache))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    # transformers and we hold frequencies and angles of RoPE in float32, in another order
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


ACCEPTED: dict[str, tuple[dict, Callable[[Path], None]]] = {
    "plain": ({}, lambda path: None),
    "tied": ({"tie_word_embeddings": True}, lambda path: None),
    "tied head that is the embedding": (
        {"tie_word_embeddings": True},
        put("lm_head.weight", lambda tensors: tensors["model.embed_tokens.weight"].clone()),
    ),
    "buffers of old files": (
        {}, put("model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: torch.ones(4)),
    ),
    "base and epsilon": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 17.0}, "rms_norm_eps": 0.3},
        lambda path: None,
    ),
    "entries of transformers 4": (
        {}, edit_config(rope_parameters=None, rope_theta=23.0, rope_scaling=None),
    ),
    "positions of Llama 3.1": (
        {}, edit_config(rope_parameters=None, rope_theta=9.0, rope_scaling=SHORT),
    ),
    "no class": ({}, edit_config(architectures=None)),
    "width of heads": ({"head_dim": 10}, lambda path: None),
}  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_accepted_is_computed_as_transformers_does(
    case: str, family: str, tmp_path: Path
) -> None:
    changes, edit = ACCEPTED[case]
    start = write_model(tmp_path / "start", family, **changes)
    edit(start)
    assert_close(our_logits(start), transformers_logits(start))
    read = open_model(start)
    engine = EmbeddedEngine(load_config(str(start)), max_context=8, max_sessions=1)
    with engine.awake():  # evaluation gives an engine what is in a directory
        engine.load_weights((name, read(name)) for name in read.names())


def test_weights_of_experts_need_not_sum_to_one(tmp_path: Path) -> None:
    start = write_model(tmp_path, "qwen3_moe", norm_topk_prob=False)
    logits = transformers_logits(start)
    assert_close(our_logits(start), logits)
    edit_config(norm_topk_prob=True)(start)
    assert float((transformers_logits(start) - logits).abs().max()) > 0.01


def test_a_tensor_of_all_experts_is_read_as_those_of_single_ones(tmp_path: Path) -> None:
    separate = write_model(tmp_path / "separate", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(separate)
    fused = tmp_path / "fused"
    model.save_pretrained(fused, save_original_format=False)
    assert len(load_file(fused / FILE)) < len(load_file(separate / FILE))
    ours, theirs = open_model(fused), open_model(separate)
    assert set(ours.names()) == set(theirs.names())
    assert all(torch.equal(ours(name), theirs(name)) for name in theirs.names())
    put("model.layers.0.mlp.experts.down_proj", lambda _: torch.zeros(6, 32, 32))(fused)
    with pytest.raises(
        ValueError, match=r"experts.down_proj has shape \[6, 32, 32\] .* \[5, 32, 32"
    ):
        open_model(fused)


@pytest.mark.parametrize("family", CLASSES)
def test_neutral_entries_change_nothing(family: str, tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", family)
    expected = transformers_logits(start)
    edit_config(**{name: OTHER_VALUES[name] for name in FAMILIES[family].neutral})(start)
    assert torch.equal(transformers_logits(start), expected)
    assert_close(our_logits(start), expected)


@pytest.mark.parametrize("family", CLASSES)
def test_fp8_blocks_are_read_as_transformers_reads_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"head_dim": 16} if family.startswith("qwen3") else {}
    start = write_fp8(tmp_path / "start", family, **heads)
    stored, read = load_file(start / "model.safetensors"), open_model(start)
    assert not any("scale" in name for name in read.names())
    for name in read.names():
        expected = stored[name]
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            parts = {"weight": expected, "weight_scale_inv": scale.float()}
            (expected,) = Fp8Dequantize(None).convert(parts).values()
            assert expected.dtype == torch.float32 and not torch.equal(
                expected, stored[name].float()
            )
        assert torch.equal(read(name), expected), name

    # the whole model by transformers' own loading, which wants a library that is not needed for it
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    parameters = split_experts(dict(model.named_parameters()), ModelShape.of(model.config))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, read(name).float()), name
    model.set_experts_implementation("eager")  # the only one in float64
    assert_close(our_logits(start), model.double()(TOKENS[None]).logits[0].detach())

    # and out again: plain weights, of the type that config.json says or of the one asked for
    for dtype, directory in (("bfloat16", "as_said"), ("float32", "exact")):
        given = None if dtype == "bfloat16" else dtype
        out = convert(start, tmp_path / directory, "huggingface", dtype=given)
        config = json.loads((out / "config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == dtype
        for name, tensor in load_file(out / "model.safetensors").items():
            assert torch.equal(tensor, read(name).to(getattr(torch, dtype))), name
    assert_close(our_logits(tmp_path / "exact"), our_logits(start))
    assert "quantization_config" in AutoConfig.from_pretrained(start).to_dict()
    assert "quantization_config" not in load_config(str(start)).to_dict()


def test_a_critic_may_start_from_a_policy_and_a_policy_not_from_a_critic(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy")
    assert "lm_head.weight" in open_model(policy, is_critic=True).names()
    critic = write_model(tmp_path / "critic")
    edit_tensors(lambda tensors: tensors.pop("lm_head.weight"))(critic)
    put("value_head.weight", lambda _: torch.zeros(1, 32))(critic)
    hf = load_config(str(policy))
    assert open_model(critic, hf, is_critic=True)("value_head.weight") is not None
    with pytest.raises(ValueError, match="lacks lm_head.weight"):
        open_model(critic)
    edit_config(rms_norm_eps=1e-3)(critic)
    with pytest.raises(ValueError, match="policy's shape"):
        open_model(critic, hf, is_critic=True)


OLD = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
       "max_position_embeddings")  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("is_null", [False, True])
def test_every_reader_takes_the_same_where_an_old_config_says_nothing(
    family: str, is_null: bool, tmp_path: Path
) -> None:
    stated = {"model_type": family} | SIZES | OWN.get(family, {})
    stated = {name: value for name, value in stated.items() if name not in OLD}
    stated |= dict.fromkeys(OLD) if is_null else {}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    hf = load_config(str(tmp_path))
    shape = ModelShape.of(hf)
    assert shape == ModelShape.from_config(stated)
    # Multi-head attention, over all channels: the model of arXiv:1706.03762.
    assert (shape.num_kv_heads, shape.head_dim) == (4, 32 // 4)
    assert (shape.rms_norm_eps, shape.rope_theta, shape.is_tied) == (1e-6, 1e4, False)
    usual = CLASSES[family]().max_position_embeddings
    assert (hf.num_key_value_heads, hf.max_position_embeddings) == (4, usual)


def test_a_model_of_that_time_is_computed_as_transformers_does(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", "llama", num_key_value_heads=4)
    reference = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64).eval()
    config = json.loads((start / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "rope_parameters", "tie_word_embeddings"):
        config.pop(name)
    (start / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    converted = convert(start, tmp_path / "converted", "huggingface")
    assert json.loads((converted / "config.json").read_text())["num_key_value_heads"] == 4
    for directory in (start, converted):
        assert_close(our_logits(directory), expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' is in it twice"),
        ('{"weight_map": {"a": 3}}', "cannot read"),
        ('{"weight_map": ["a"]}', "cannot read"),
        ("[" * 100_000, "cannot read"),
        ("{}", "cannot read"),
    ],
)
def test_a_damaged_index_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    start = write_model(tmp_path / "start")
    (start / FILE).rename(start / "model-00001-of-00001.safetensors")
    (start / f"{FILE}.index.json").write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        open_model(start)
    assert "\n" not in str(refused.value)


def test_an_adapter_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter of PEFT and no model; give its"):
        check_model_directory("--load", str(tmp_path), needs_tokenizer=True)


def test_layers_without_end_are_refused_before_they_are_counted(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start")
    edit_config(num_hidden_layers=10**15)(start)
    for read in (load_config, partial(check_model_directory, "--load", needs_tokenizer=False)):
        with pytest.raises(ValueError, match="num_hidden_layers must be at most 10000, not 10+"):
            read(str(start))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start")
    shard = "model-00002-of-00002.safetensors"
    names = dict.fromkeys(load_file(start / FILE), shard)
    (start / FILE).unlink()
    (start / f"{FILE}.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=f"cannot read .*{shard}: .*missing"):
        open_model(start)
