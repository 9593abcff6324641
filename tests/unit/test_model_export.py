"""The export of a model: tensor by tensor, in one file or several, complete or not there."""

import json
import os
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from ragen_mega.config import parse
from ragen_mega.models.directory import check_model_directory
from ragen_mega.models.huggingface import load_config, load_tokenizer, random_weights
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.run.build import check_model_and_engine
from ragen_mega.run.check import check
from ragen_mega.storage import model_writers
from ragen_mega.storage.model_readers import HuggingFaceReader, open_model
from ragen_mega.storage.model_writers import save_huggingface

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
    assert not HuggingFaceReader.is_for(tmp_path) and not list(tmp_path.glob(".*"))
    export(new)
    read = open_model(tmp_path)
    assert all(torch.equal(read(name), weight) for name, weight in new.items())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda weights: weights.popitem(), "missing, first"),
        (lambda weights: weights.update(x=torch.ones(2)), "unexpected weight 'x'"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(31)}),
            "model.norm.weight' .* full shape",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(32).bfloat16()}),
            "model.norm.weight is torch.bfloat16, .*torch.float32",
        ),
    ],
)
def test_wrong_streams_leave_no_model(harm, message: str, tmp_path: Path) -> None:
    weights = weights_of(CONFIGS["untied"], torch.float32)
    harm(weights)
    with pytest.raises(ValueError, match=message):
        save_huggingface(tmp_path, CONFIGS["untied"], TOKENIZER, weights.items(), is_writer=True)
    assert not HuggingFaceReader.is_for(tmp_path) and not list(tmp_path.glob(".*"))


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
    with pytest.raises(ValueError, match="no tokenizer .*tokenizer.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"), [("tokenizer.json", '{"added_tokens": []}'), ("tokenizer_config.json", "[]")]
)
def test_a_tokenizer_that_cannot_be_read_says_so(file: str, text: str, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match="cannot read a tokenizer"):
        load_tokenizer(str(tmp_path))


THETAS = {
    "plain": ({"rope_type": "default", "rope_theta": 1e6}, None),
    "scaled": (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        {"rope_type": "linear", "factor": 2.0},
    ),
}


def export_with(rope: dict, directory: Path) -> PretrainedConfig:
    hf = Qwen2Config(**SIZES | {"vocab_size": len(TOKENIZER)}, rope_parameters=rope)
    weights = iter(weights_of(hf, torch.float32).items())
    save_huggingface(directory, hf, TOKENIZER, weights, is_writer=True)
    return hf


@pytest.mark.parametrize("kind", THETAS)
def test_an_export_has_the_spellings_of_transformers_4_and_5(kind: str, tmp_path: Path) -> None:
    rope, scaling = THETAS[kind]
    hf = export_with(rope, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == rope["rope_theta"] and config["rope_scaling"] == scaling
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert load_config(str(tmp_path)).rope_parameters == hf.rope_parameters
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert isinstance(tokenizer.get("extra_special_tokens", {}), dict)
    assert tokenizer["tokenizer_class"] != "TokenizersBackend"
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.all_special_ids == TOKENIZER.all_special_ids
    assert loaded.chat_template == TOKENIZER.chat_template


READ_BY_4 = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4."), transformers.__version__
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)
ids = tokenizer(text)["input_ids"]
logits = model(torch.tensor([ids * 8])).logits[0, -1]
print(json.dumps([ids, sorted(tokenizer.all_special_ids), logits.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "RAGEN_TRANSFORMERS4_PYTHON" not in os.environ,
    reason="RAGEN_TRANSFORMERS4_PYTHON names no Python with transformers 4",
)
@pytest.mark.parametrize("kind", THETAS)
def test_transformers_4_computes_the_same(kind: str, tmp_path: Path) -> None:
    export_with(THETAS[kind][0], tmp_path)
    command = [os.environ["RAGEN_TRANSFORMERS4_PYTHON"], "-c", READ_BY_4, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ids, special, logits = json.loads(done.stdout)
    tokenizer = load_tokenizer(str(tmp_path))
    ours = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)
    assert ids == tokenizer(ours)["input_ids"] and special == sorted(tokenizer.all_special_ids)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model(torch.tensor([ids * 8])).logits[0, -1]
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-5)


def saved(directory: Path) -> Path:
    """A whole model directory, of one file."""
    hf = Qwen2Config(**SIZES | {"vocab_size": len(TOKENIZER)}, max_position_embeddings=64)
    weights = iter(weights_of(hf, torch.float32).items())
    save_huggingface(directory, hf, TOKENIZER, weights, is_writer=True)
    return directory


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def not_fetched(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def scaled(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    (directory / "config.json").write_text(json.dumps(config))


def indexed(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "other.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def fewer_rows(directory: Path) -> None:
    hf = Qwen2Config(**SIZES)  # of 97 words
    weights = iter(weights_of(hf, torch.float32).items())
    save_huggingface(directory, hf, TOKENIZER, weights, is_writer=True)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (pickled, "pytorch_model.bin, a pickle"),
        (not_fetched, "git lfs pull"),
        (scaled, "YaRN"),
        (indexed, "delete one of them"),
        (fewer_rows, "97 rows"),
        (lambda directory: None, "max_context_length .65. .* 64"),
    ],
)
def test_a_directory_that_cannot_be_trained_is_refused_at_the_start(
    harm, said: str, tmp_path: Path
) -> None:
    harm(saved(tmp_path / "model"))
    flags = ["--load", str(tmp_path / "model"), "--max-context-length", "65"]
    config = parse([*flags, "--output", str(tmp_path / "runs")])
    with pytest.raises(ValueError, match=said) as caught:
        check(config, 1, 1)
        check_model_and_engine(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_folder_named_like_an_owner_does_not_hide_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_model_directory("--load", "Qwen/Qwen3-8B", needs_tokenizer=True) is None
    with pytest.raises(ValueError, match="does not exist"):
        check_model_directory("--load", "./Qwen/Qwen3-8B", needs_tokenizer=True)
