"""Hugging Face directories: configuration, tokenizer, random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ragen_mega.models.families import FAMILIES
from ragen_mega.models.layout import expected_tensors
from ragen_mega.models.shape import ModelShape

transformers_logging.disable_progress_bar()

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float"}
"""Qwen's published FP8 layout, besides the size of a block; absent entries have these values."""

_TOKENIZER = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""One of these holds the vocabulary."""

_ABSENT = frozenset(
    "num_key_value_heads head_dim rms_norm_eps rope_theta tie_word_embeddings"
    " max_position_embeddings".split()
)
"""Entries of config.json that are absent if they are null."""
_WRONG_TYPE = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors that transformers raises for a computation with an entry of a wrong type."""


def load_config(directory: str) -> PretrainedConfig:
    """Return the model configuration of a Hugging Face directory or hub name, as the weights are
    read: a quantisation, which reading undoes, is not in it, and what an old file leaves out is as
    in `ModelShape`. Raises ValueError if it cannot be read.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(directory)
        if values.get("model_type") in FAMILIES:
            hf = _family_config(directory, values)
        else:
            hf = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError, *_WRONG_TYPE) as error:
        raise ValueError(
            f"cannot read a model configuration from {directory}: {brief(error)}"
        ) from None
    if fp8_block(vars(hf)):
        del hf.quantization_config
    return hf


def _family_config(directory: str, values: Mapping[str, Any]) -> PretrainedConfig:
    """Build the configuration of a known family. transformers fills sizes that are missing with the
    sizes of one model of the family.
    """
    shape = ModelShape.from_config(values)
    stated = {
        name: value for name, value in values.items() if name not in _ABSENT or value is not None
    }
    kind = stated.pop("model_type")
    hf = AutoConfig.for_model(kind, **stated, name_or_path=directory)
    hf.num_key_value_heads = shape.num_kv_heads
    if hasattr(hf, "head_dim"):
        hf.head_dim = shape.head_dim
    return hf


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a weight that share a scale if config.json states Qwen's FP8
    layout, None if no quantisation. Raises ValueError for any other.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    block = stated.get("weight_block_size")
    is_known = {name: stated.get(name, value) for name, value in _FP8.items()} == _FP8
    is_block = isinstance(block, (list, tuple)) and [type(size) for size in block] == [int, int]
    if not (is_known and "quant_method" in stated and is_block and min(block) > 0):
        raise ValueError(
            f"quantization_config in config.json must be absent or FP8 (e4m3) with"
            f" weight_block_size and float scales, not {str(stated)[:200]}; load the model"
            " without quantisation"
        )
    return block[0], block[1]


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """Return its tokenizer. Raises ValueError if there is none or it has no chat template."""
    # transformers makes up an empty one from config.json alone.
    if Path(directory).is_dir() and not any(Path(directory, name).exists() for name in _TOKENIZER):
        raise ValueError(
            f"{directory} holds no tokenizer ({' or '.join(_TOKENIZER)}); copy the files of the"
            " model's tokenizer there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"cannot read a tokenizer from {directory}: {brief(error)}") from None
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer in {directory} has no chat template; load an Instruct checkpoint"
        )
    return tokenizer


def stop_tokens(directory: str) -> set[int]:
    """Return the tokens that end an answer by generation_config.json; the empty set without that
    file. Raises ValueError if it cannot be read.
    """
    path = Path(directory, "generation_config.json")
    if not path.exists():
        return set()
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, *_WRONG_TYPE) as error:
        raise ValueError(
            f"cannot read generation_config.json in {directory}: {brief(error)}; mend or delete it"
        ) from None
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids if token is not None):
        raise ValueError(
            f"eos_token_id in {directory}/generation_config.json must be token ids, not {ids};"
            " correct it"
        )
    return {token for token in ids if token is not None}


def random_weights(config: PretrainedConfig, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Draw a model's Hugging Face tensors from the distribution that transformers draws them from,
    the same for every caller with this seed on the same kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")), device=device)
        tensor = torch.empty(shape, device=device)
        return tensor.normal_(std=config.initializer_range, generator=generator)

    shapes = expected_tensors(ModelShape.of(config))
    return {name: draw(name, shape) for name, shape in shapes.items()}


def brief(error: BaseException) -> str:
    """Return the first two lines of an error as one."""
    return " ".join(" ".join(str(error).strip().splitlines()[:2]).split()) or type(error).__name__
