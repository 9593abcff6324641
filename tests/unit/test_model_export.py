"""The export of a model: tensor by tensor, in one file or several, complete or not there."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from ragen_mega.models.huggingface import load_config, load_tokenizer, random_weights
from ragen_mega.storage import model_writers
from ragen_mega.storage.model_readers import HuggingFaceReader, open_model
from ragen_mega.storage.model_writers import save_huggingface
from ragen_mega.warm_start.tokenizer import train_tokenizer

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
CONFIGS = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
}
TOKENIZER = train_tokenizer(["a b c"] * 3)


def weights_of(hf: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: weight.to(dtype) for name, weight in random_weights(hf, 0).items()}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_size", [5 * 10**9, 30_000])
def test_transformers_loads_what_was_sent(
    kind: str, dtype: torch.dtype, max_shard_size: int, tmp_path: Path
) -> None:
    hf, weights = CONFIGS[kind], weights_of(CONFIGS[kind], dtype)
    backwards = reversed(list(weights.items()))  # the order of a stream is its own affair
    save_huggingface(
        tmp_path, hf, TOKENIZER, backwards, is_writer=True, max_shard_size=max_shard_size
    )
    is_sharded = max_shard_size < 10**6
    assert (tmp_path / "model.safetensors").exists() != is_sharded
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not is_sharded
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and model.dtype == dtype
    loaded, read = model.state_dict(), open_model(tmp_path)
    assert set(read.names()) == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight) and torch.equal(read(name), weight), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert config["architectures"] == [type(model).__name__]
    assert len(load_tokenizer(str(tmp_path))) == len(TOKENIZER)


@pytest.mark.parametrize("max_shard_size", [5 * 10**9, 30_000])
def test_one_tensor_in_memory_and_the_directory_complete_at_the_end_only(
    max_shard_size: int, tmp_path: Path
) -> None:
    hf, alive = CONFIGS["untied"], []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights_of(hf, torch.float32).items():
            copy = weight.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy
            assert not HuggingFaceReader.is_for(tmp_path)
            assert sum(reference() is not None for reference in alive) <= 2

    save_huggingface(
        tmp_path, hf, TOKENIZER, stream(), is_writer=True, max_shard_size=max_shard_size
    )
    assert HuggingFaceReader.is_for(tmp_path) and not list(tmp_path.glob(".*"))


def test_a_second_export_that_fails_among_its_shards_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, synced = weights_of(CONFIGS["untied"], torch.float32), []
    new = {name: weight + 1 for name, weight in old.items()}

    def export(weights: dict[str, Tensor]) -> None:
        save_huggingface(
            tmp_path, CONFIGS["untied"], TOKENIZER, weights.items(), is_writer=True,
            max_shard_size=30_000,
        )  # fmt: skip

    def disk(path: Path) -> None:
        synced.append(path)
        if len(synced) == 2:
            raise OSError(5, "Input/output error")

    export(old)
    with monkeypatch.context() as patched:
        patched.setattr(model_writers, "sync", disk)
        with pytest.raises(OSError, match="Input/output error"):
            export(new)
    assert not HuggingFaceReader.is_for(tmp_path)
    export(new)
    read = open_model(tmp_path)
    assert all(torch.equal(read(name), weight) for name, weight in new.items())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda weights: weights.popitem(), "weights are missing, first"),
        (lambda weights: weights.update(x=torch.ones(2)), "unexpected weight 'x'"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(31)}),
            "model.norm.weight' must have the full shape",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(32).bfloat16()}),
            "model.norm.weight is torch.bfloat16, and others are torch.float32",
        ),
    ],
)
def test_wrong_streams_leave_no_model(harm, message: str, tmp_path: Path) -> None:
    weights = weights_of(CONFIGS["untied"], torch.float32)
    harm(weights)
    with pytest.raises(ValueError, match=message):
        save_huggingface(tmp_path, CONFIGS["untied"], TOKENIZER, weights.items(), is_writer=True)
    assert not HuggingFaceReader.is_for(tmp_path)


def test_critic_and_generation_config(tmp_path: Path) -> None:
    start, out, critic = (tmp_path / name for name in ("start", "out", "critic"))
    weights = weights_of(CONFIGS["tied"], torch.bfloat16)
    save_huggingface(start, CONFIGS["tied"], TOKENIZER, weights.items(), is_writer=True)
    (start / "generation_config.json").write_text('{"temperature": 0.7}')
    hf = load_config(str(start))
    save_huggingface(out, hf, TOKENIZER, weights.items(), is_writer=True)
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.7}'
    weights["value_head.weight"] = torch.ones(1, 32)  # float32 in a bfloat16 critic
    save_huggingface(critic, hf, TOKENIZER, weights.items(), is_writer=True, is_critic=True)
    stored = load_file(critic / "model.safetensors")
    assert stored.keys() == weights.keys() and stored["value_head.weight"].dtype == torch.float32
    assert open_model(critic, hf, is_critic=True).names()


def test_ranks_that_do_not_write_consume_the_stream(tmp_path: Path) -> None:
    stream = iter(weights_of(CONFIGS["tied"], torch.float32).items())
    save_huggingface(tmp_path / "none", CONFIGS["tied"], TOKENIZER, stream, is_writer=False)
    assert next(stream, None) is None and not (tmp_path / "none").exists()


def test_a_model_without_tokenizer_says_so(tmp_path: Path) -> None:
    """transformers would make up an empty one, which has no chat template either."""
    TOKENIZER.save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))) == len(TOKENIZER)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer \(tokenizer.json or"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"), [("tokenizer.json", '{"added_tokens": []}'), ("tokenizer_config.json", "[]")]
)
def test_a_tokenizer_that_cannot_be_read_says_so(file: str, text: str, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match="cannot read a tokenizer from"):
        load_tokenizer(str(tmp_path))
