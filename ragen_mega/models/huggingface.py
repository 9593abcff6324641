"""Hugging Face directories: what a run starts from and what it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Model type -> the class that `architectures` in config.json names, without which SGLang loads no
model.
"""


def load_config(directory: str) -> PretrainedConfig:
    """The model configuration of a Hugging Face directory or hub name. Raises ValueError if it
    cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(
            f"cannot read a model configuration from {directory}: {_brief(error)}"
        ) from None


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """Its tokenizer. Raises ValueError if there is none or it has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot read a tokenizer from {directory}: {_brief(error)}") from None
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer in {directory} has no chat template; load an Instruct checkpoint"
        )
    return tokenizer


def local_directory(name: str) -> Path:
    """`name` itself if it is a directory, else a download of that model from the Hugging Face hub."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"--load {name} is neither a directory nor a model that the hub gives"
            f" ({_brief(error)}); check the name, the network, or give a local directory"
        ) from None


def save_huggingface(
    directory: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    weights: Iterable[tuple[str, Tensor]],
    *,
    is_writer: bool,
) -> None:
    """Write a directory that `transformers` loads. Every rank must call it: `weights` is a
    collective stream.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in _drain(weights, is_writer)
    }
    if not is_writer:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if not config.architectures:
        config = copy.deepcopy(config)
        config.architectures = [ARCHITECTURES[config.model_type]]
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    temporary = directory / ".model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(directory / "model.safetensors")


def _drain(weights: Iterable[tuple[str, Tensor]], is_writer: bool) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in weights:
        if is_writer:
            yield name, tensor


def random_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """Hugging Face tensors of a freshly initialised model, the same for every caller with this
    seed.
    """
    from transformers import AutoModelForCausalLM

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_rng_state(state)
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }


def _brief(error: BaseException) -> str:
    """What an error says on its first two lines, as one."""
    return " ".join(" ".join(str(error).strip().splitlines()[:2]).split()) or type(error).__name__
