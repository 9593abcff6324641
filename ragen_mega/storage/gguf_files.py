"""GGUF files, llama.cpp's format of a model in one file, written anew as model directories.

Names of tensors and the arithmetic of quantisation come from llama.cpp's package `gguf`. Source of
the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ragen_mega.models.directory import content_digest
from ragen_mega.models.huggingface import brief
from ragen_mega.models.layout import expected_tensors
from ragen_mega.models.rotary import rotary_frequencies
from ragen_mega.models.shape import ModelShape, check_config
from ragen_mega.ranks.launcher import cache_folder
from ragen_mega.report.console import Console
from ragen_mega.storage.integrity import atomic_directory
from ragen_mega.storage.model_writers import save_huggingface

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of `general.architecture` that are read. llama.cpp writes Mistral models as llama."""
_VERSION = 2
"""Number of what this file writes, so that a directory of an older one is not taken."""
_ENTRIES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
"""Entry of config.json -> key in the file, without the architecture before it."""
_MOST_ELEMENTS = 2**22
"""Elements of a list in the header, such as tokens and merges of a vocabulary."""
_ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the rotary frequencies, in files of Llama 3.1 and later."""
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Numbers of all released Llamas, which a file does not state."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_SPLITS: dict[str, list[Any]] = {
    "gpt-2": [_WORDS],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _WORDS],
    "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), _BYTES],
}
"""`tokenizer.ggml.pre` -> how a text is split before its bytes are merged, as in the tokenizer.json
of the models of this name.
"""

_SENTENCEPIECE = normalizers.Sequence(
    [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
)
"""The space that Llama 2's tokenizer and llama.cpp put before every text and after special tokens.
"""


def dequantised(path: Path) -> Path:
    """Return the directory in the user's cache with the model of a GGUF file. The first call for a
    file writes it and says so, while other processes wait. Raises ValueError if the file cannot be
    used.
    """
    folder = cache_folder("gguf")
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = folder / f"{path.stem}-{content_digest(path)}-v{_VERSION}"
        if not target.exists():
            # left by a process that was killed, for none but this one is at work
            shutil.rmtree(target.with_name(f".{target.name}.unfinished"), ignore_errors=True)
            with atomic_directory(target) as directory:
                types = write_model(path, directory)
            Console(is_writer=True, num_steps=0).say(
                f"{path.name} ({types}) is dequantised to float32, once: {target}"
            )
    finally:
        os.close(lock)
    return target


def write_model(path: Path, directory: Path) -> str:
    """Write the model of a GGUF file as a model directory in float32, and return the types of its
    weights. Raises ValueError if the file is damaged or not supported.
    """
    reader = _open(path)
    hf = _config(path, reader)
    tokenizer = _tokenizer(path, reader)
    save_huggingface(directory, hf, tokenizer, _weights(path, reader, hf), is_writer=True)
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    return ", ".join(name for name, _ in types.most_common())


def read_config(path: Path) -> PretrainedConfig:
    """Return the configuration of the model in a GGUF file, without its weights. Raises ValueError
    if the file is damaged or not supported.
    """
    return _config(path, _open(path))


class _Reader(GGUFReader):
    """gguf's reader, which believes every count, within the bounds of the file."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"a value at byte {offset} would end at {end} of {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32)[0], self._get(orig_offs + 4, np.uint64)[0]
            if kind == GGUFValueType.ARRAY or count > _MOST_ELEMENTS:
                what = "arrays" if kind == GGUFValueType.ARRAY else f"{count} elements"
                raise ValueError(f"the list at byte {orig_offs} is one of {what}")
        return super()._get_field_parts(orig_offs, raw_type)


def _open(path: Path) -> GGUFReader:
    try:
        return _Reader(path)
    except (ValueError, LookupError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"cannot read {path} as GGUF ({error}); the file is damaged or incomplete, copy it"
            " again"
        ) from None


def _field(reader: GGUFReader, name: str, default: Any = None) -> Any:
    found = reader.get_field(name)
    return default if found is None else found.contents()


def _config(path: Path, reader: GGUFReader) -> PretrainedConfig:
    architecture = _field(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture of {path} must be one of {', '.join(ARCHITECTURES)}, not"
            f" {architecture!r}; give another model"
        )
    if _field(reader, "split.count", 1) not in (0, 1):
        raise ValueError(
            f"{path} is one of several parts of a model; join them by llama-gguf-split --merge"
        )
    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    values = {entry: _field(reader, f"{architecture}.{key}") for entry, key in _ENTRIES.items()}
    values["vocab_size"] = shapes.get("token_embd.weight", [None])[0]
    for entry, usual in (
        ("num_key_value_heads", values["num_attention_heads"]),
        ("rope_theta", 10_000.0),
    ):  # which llama.cpp lets a file leave out
        values[entry] = usual if values[entry] is None else values[entry]
    for entry, value in values.items():
        if not (type(value) in (int, float) and value > 0):
            raise ValueError(
                f"{path} must state the {entry} of a {architecture} model, not {value!r:.60}; is"
                " the file complete?"
            )
    whole = values["hidden_size"] // values["num_attention_heads"]
    rotated = _field(reader, f"{architecture}.rope.dimension_count")
    head_dim = _field(reader, f"{architecture}.attention.key_length", rotated or whole)
    scaling = _field(reader, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or rotated not in (None, head_dim):
        raise ValueError(
            f"{path} must give RoPE for all channels of a head with rope.scaling.type none, not for"
            f" {rotated} of {head_dim} with rope.scaling.type {scaling}; give another model"
        )
    factors = {tensor.name: tensor.data for tensor in reader.tensors}.get(_ROPE_FACTORS)
    ModelShape.from_config(values | {"model_type": architecture})
    if factors is not None:
        values["rope_scaling"] = _LLAMA3_ROPE | {"factor": float(factors.max())}
    try:
        hf = AutoConfig.for_model(
            architecture,
            **values,
            head_dim=head_dim,
            tie_word_embeddings="output.weight" not in shapes,
            bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
            eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
            pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        )
    except StrictDataclassError as error:
        raise ValueError(f"the sizes in {path} contradict each other: {brief(error)}") from None
    check_config(hf)
    if factors is not None:
        _check_rope(path, torch.tensor(factors), ModelShape.of(hf))
    return hf


def _check_rope(path: Path, factors: Tensor, shape: ModelShape) -> None:
    """Raise ValueError unless these factors belong to the scaling that was read from them."""
    plain = rotary_frequencies(replace(shape, rope_scaling=None))
    expected = plain / rotary_frequencies(shape)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{_ROPE_FACTORS} of {path} must slow the rotary positions as Llama 3.1 does, whose"
            " pretraining had a context of 8192 tokens; give another model"
        )


def _weights(path: Path, reader: GGUFReader, hf: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor in float32). Raises ValueError unless the file holds exactly
    the tensors of such a model.
    """
    shape = ModelShape.of(hf)
    (kind,) = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == hf.model_type]
    names = gguf.get_tensor_name_map(kind, shape.num_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
    found = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in tensors.items()}
    stored, wanted = {}, {}
    for name, size in expected_tensors(shape).items():
        stem, _, suffix = name.rpartition(".")
        stored[name] = f"{names.get_name(stem)}.{suffix}"
        wanted[stored[name]] = size
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f"{key} of {path} must be {wanted.get(key, 'absent')} in a {hf.model_type} of"
                f" {shape.num_layers} layers, not {found.get(key, 'absent')}; give another model"
            )
    for name, key in stored.items():
        tensor = tensors[key]
        try:
            weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError:
            raise ValueError(
                f"{key} of {path} has the type {tensor.tensor_type.name}, which cannot be"
                " dequantised; give the model in another, e.g. Q8_0 or F16"
            ) from None
        if hf.model_type == "llama" and ".self_attn.q_proj." in name:
            weight = _rotary_halves(weight, shape.num_heads)
        elif hf.model_type == "llama" and ".self_attn.k_proj." in name:
            weight = _rotary_halves(weight, shape.num_kv_heads)
        yield name, weight


def _rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Return q or k of a Llama with its rows in Hugging Face's order. RoPE turns pairs of channels:
    llama.cpp has the two of a pair side by side, Hugging Face in the two halves of a head.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _tokenizer(path: Path, reader: GGUFReader) -> PreTrainedTokenizerBase:
    if _field(reader, "tokenizer.chat_template") is None:
        raise ValueError(
            f"{path} holds no chat template (tokenizer.chat_template); give an Instruct model"
        )
    kind, split = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if kind == "gpt2" and split not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre of {path} must be one of {', '.join(_SPLITS)}, not {split!r}: its"
            " texts would get other tokens than in training; give another model"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:
        raise ValueError(f"cannot read a tokenizer from {path}: {brief(error)}") from None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # transformers adds GPT-2's or Llama 2's special tokens to a vocabulary that lacks these tokens
    size = len(reader.fields["tokenizer.ggml.tokens"].data)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    state["model"]["ignore_merges"] = split == "llama-bpe"
    backend = Tokenizer.from_str(json.dumps(state))
    if kind == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split])
        backend.normalizer = normalizers.NFC() if split == "qwen2" else None
    else:
        backend.pre_tokenizer, backend.normalizer = None, _SENTENCEPIECE
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
