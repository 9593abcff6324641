"""GGUF files as llama.cpp's converter writes them: its names, its order of the rows of q and k, its
keys of sizes and tokenizer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "system user assistant The dragon pays 10 coins, the phoenix 2024 in 12 of 345 games.",
    "1  2   3  4   5 in columns",
    "  x = 7\n\n\ty = 89 + 1234567;  it's  don't we'LL \r\n caf\u00e9 \u6f22\u5b57 \U0001f409",
]


def random_model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """A small model whose every parameter, biases and norms too, is random."""
    config = AutoConfig.for_model(
        architecture, vocab_size=448, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        rms_norm_eps=1e-5,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}} | changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model


def byte_level_tokenizer(name: str, split: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    """Train a small byte-level tokenizer that splits texts so before it merges. Llama's has no
    `<|endoftext|>`, and its words that are tokens are not merged.
    """
    special = ["<|begin_of_text|>", *SPECIAL[1:]] if name == "llama-bpe" else SPECIAL
    backend = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 9, trainer)
    state = json.loads(backend.to_str())
    merges = state["model"]["merges"]  # without the merge of " dragon", which stays a token
    state["model"]["merges"] = [pair for pair in merges if "".join(pair) != "\u0120dragon"]
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        chat_template=TEMPLATE,
    )


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Train a small tokenizer of Llama 2's kind: a space before every text, bytes for characters
    that it does not know, and merges in the order of the tokens.
    """
    normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizer
    learned.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    learned.train_from_iterator(TEXTS[:1] * 9, trainer)
    model = json.loads(learned.to_str())["model"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        additional_special_tokens=SPECIAL,
        chat_template=TEMPLATE,
    )


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    pre: str,
    type_name: str = "F16",
    *,
    architecture: str | None = None,
    template: str | None = TEMPLATE,
    keys: dict[str, Any] | None = None,
    without: str = "",
    further: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a model and its tokenizer. Matrices get the named type; `keys` and tensors of `further`
    are added, a key of None and one tensor are left out, as a damaged or unsupported file has them.
    """
    hf, kind = model.config, GGMLQuantizationType[type_name]
    writer = GGUFWriter(path, architecture or hf.model_type)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_rope_freq_base(hf.rope_parameters["rope_theta"])
    sizes = {f"{hf.model_type}.attention.head_count": hf.num_attention_heads}
    if head_dim := getattr(hf, "head_dim", None):
        sizes |= {f"{hf.model_type}.attention.{x}_length": head_dim for x in ("key", "value")}
        if hf.model_type == "llama":
            sizes["llama.rope.dimension_count"] = head_dim
    for name, value in (sizes | (keys or {})).items():
        writer.kv_data[0].pop(name, None)
        if value is None:
            continue
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    _write_tokenizer(writer, tokenizer, pre, template, hf.vocab_size)
    for name, weight in _stored(model):
        if name == without:
            continue
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    for name, weight in (_rope_factors(model) | (further or {})).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope_factors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensor that the converter writes for the positions of Llama 3.1: by how much slower each
    pair of channels turns.
    """
    rope = model.config.rope_parameters
    if rope["rope_type"] != "llama3":
        return {}
    slow = model.model.rotary_emb.inv_freq.numpy()
    exponents = np.arange(len(slow), dtype=np.float32) / len(slow)
    return {"rope_freqs.weight": rope["rope_theta"] ** -exponents / slow}


def _stored(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """(name, numbers) of every tensor in llama.cpp's layout."""
    hf = model.config
    (architecture,) = [k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == hf.model_type]
    names = gguf.get_tensor_name_map(architecture, hf.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and hf.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        for part, heads in ("q", hf.num_attention_heads), ("k", hf.num_key_value_heads):
            if hf.model_type == "llama" and name.endswith(f"{part}_proj.weight"):
                halves = weight.reshape(heads, 2, -1, weight.shape[1])
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        stem, _, suffix = name.rpartition(".")
        yield f"{names.get_name(stem)}.{suffix}", weight


def _write_tokenizer(
    writer: GGUFWriter,
    tokenizer: PreTrainedTokenizerFast,
    pre: str,
    template: str | None,
    size: int,
) -> None:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    padding = [f"[PAD{index}]" for index in range(len(tokens), size)]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * len(padding)
    for index, token in tokenizer.added_tokens_decoder.items():
        types[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    if pre == "sentencepiece":
        types = [gguf.TokenType.BYTE if t.startswith("<0x") else k for t, k in zip(tokens, types)]
        types += [gguf.TokenType.UNUSED] * len(padding)
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(index) for index in range(size)])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types(types)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if template:
        writer.add_chat_template(template)
