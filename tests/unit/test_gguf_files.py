"""GGUF files: the model directory that they become gives the logits of the model that was written,
and the tokens of its tokenizer.
"""

import struct
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from ragen_mega.commands import convert, plan
from ragen_mega.models.directory import check_model_directory
from ragen_mega.storage import gguf_files
from ragen_mega.storage.gguf_files import read_config
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.model_sources import local_directory
from tests.support.gguf_models import (
    TEXTS,
    byte_level_tokenizer,
    random_model,
    sentencepiece_tokenizer,
    write_gguf,
)
from tests.support.positions import LLAMA3

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITS = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), BYTES]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"
            ),
            BYTES,
        ]
    ),
}
LONG = LLAMA3 | {
    "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e3,
}  # fmt: skip
MODELS = {
    "llama tied": ("llama", "smollm", {"tie_word_embeddings": True}),
    "llama": ("llama", "llama-bpe", {"tie_word_embeddings": False, "head_dim": 24}),
    "llama 3.2": ("llama", "llama-bpe", {"rope_parameters": LONG, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen2", {"tie_word_embeddings": False, "head_dim": 48}),
}
"""Name -> architecture, split of its tokenizer, entries of its configuration."""
ERROR = {"F16": 4e-3, "BF16": 4e-2, "Q8_0": 0.1, "Q4_1": 0.8}
"""Type -> mean error that it makes in the logits, as a share of their size: twice as measured."""
TOKENS = torch.tensor([[7, 1, 300, 42, 5, 9, 2, 6, 440, 8]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of dequantised models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ragen_mega" / "gguf"


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    byte_level = {name: byte_level_tokenizer(name, split) for name, split in SPLITS.items()}
    return byte_level | {"sentencepiece": sentencepiece_tokenizer()}


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_that_was_written(
    name: str, kind: str, tmp_path: Path, tokenizers, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture, split, changes = MODELS[name]
    model = random_model(architecture, **changes)
    path = write_gguf(tmp_path / "a.gguf", model, tokenizers[split], split, kind)
    directory = local_directory(str(path))
    assert str(directory) in capsys.readouterr().out.replace("\n", "")
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rounded = logits(loaded)
    exact = logits(model)
    assert float((rounded - exact).abs().mean() / exact.abs().mean()) < ERROR[kind]
    with torch.no_grad():
        for parameter in model.parameters():  # that model with the numbers that are in the file
            if parameter.dim() == 2:
                type_ = GGMLQuantizationType[kind]
                stored = gguf.dequantize(gguf.quantize(parameter.numpy(), type_), type_)
                parameter.copy_(torch.tensor(stored))
    assert float((rounded - logits(model)).abs().max()) < 1e-4 < float(exact.abs().max())
    open_model(directory)  # the loader of training finds what it needs
    assert local_directory(str(path)) == directory and not capsys.readouterr().out


@pytest.mark.parametrize("split", [*SPLITS, "sentencepiece"])
def test_texts_get_the_tokens_of_the_tokenizer(split: str, tmp_path: Path, tokenizers) -> None:
    tokenizer = tokenizers[split]
    model = random_model()
    path = write_gguf(tmp_path / "a.gguf", model, tokenizer, split)
    loaded = AutoTokenizer.from_pretrained(local_directory(str(path)))
    assert loaded.get_vocab().items() >= tokenizer.get_vocab().items()
    assert max(loaded.get_vocab().values()) < model.config.vocab_size
    texts = [*TEXTS, "<|im_start|>user\n  42  007\u2028x<|im_end|>", "   7", "e\u0301", ""]
    for text in texts:
        # Qwen's tokenizer composes what Unicode writes in two characters
        written = normalizers.NFC().normalize_str(text) if split == "qwen2" else text
        expected = tokenizer.encode(written)
        assert loaded.encode(text) == expected, text
        assert loaded.decode(expected) == tokenizer.decode(expected)
    messages = [{"role": "user", "content": TEXTS[0]}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert loaded.apply_chat_template(messages, add_generation_prompt=True) == rendered
    assert loaded.eos_token_id == tokenizer.eos_token_id


UP = "blk.1.ffn_up.weight"
ROWS = np.ones((64, 64), np.float32)
BAD = {
    "architecture": ({"architecture": "gemma2"}, "general.architecture"),
    "template": ({"template": None}, "chat template"),
    "split of texts": ({"pre": "default"}, "tokenizer.ggml.pre"),
    "scaling": ({"keys": {"llama.rope.scaling.type": "yarn"}}, "scaling.type yarn"),
    "other positions": (
        {"further": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}},
        "rope_freqs.weight .* as Llama 3.1 does",
    ),
    "positions of other heads": ({"further": {"rope_freqs.weight": ROWS[0]}}, "rope_freqs.weight"),
    "heads": ({"keys": {"llama.attention.head_count": 7}}, "number of attention heads"),
    "half of the channels": ({"keys": {"llama.rope.dimension_count": 8}}, "8 of 16"),
    "part": ({"keys": {"split.count": 3}}, "llama-gguf-split"),
    "missing": ({"without": "blk.1.ffn_up.weight"}, "blk.1.ffn_up.weight .* not absent"),
    "embedding": ({"without": "token_embd.weight"}, "vocab_size"),
    "experts": (
        {"further": {"blk.0.ffn_gate_exps.weight": ROWS}},
        "blk.0.ffn_gate_exps.* must be absent",
    ),
    "shape": (
        {"without": "blk.0.ffn_up.weight", "further": {"blk.0.ffn_up.weight": ROWS}},
        "96, 64",
    ),
}
"""Fault -> how the file is written, and the rule that the error names."""


@pytest.mark.parametrize("fault", BAD)
def test_an_unsupported_file_is_refused_in_one_line_and_leaves_nothing(
    fault: str, tmp_path: Path, cache: Path, tokenizers
) -> None:
    changes, rule = BAD[fault]
    options = {"pre": "smollm"} | changes
    path = write_gguf(tmp_path / "a.gguf", random_model(), tokenizers["smollm"], **options)
    with pytest.raises(ValueError, match=rule) as error:
        local_directory(str(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.99])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path, cache: Path, tokenizers) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_model(), tokenizers["smollm"], "smollm")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ValueError, match="copy it again"):
        local_directory(str(path))
    assert not list(cache.iterdir())


def test_a_type_without_dequantisation_is_refused(tmp_path: Path, cache: Path, tokenizers) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_model(), tokenizers["smollm"], "smollm", "Q8_0")
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = [tensor for tensor in reader.tensors if tensor.name == "blk.2.ffn_up.weight"]
    tensor.field.parts[4][0] = GGMLQuantizationType.I8
    reader.data.flush()
    with pytest.raises(ValueError, match="the type I8"):
        local_directory(str(path))
    assert not list(cache.iterdir())


def test_parallel_starts_write_one_model(
    tmp_path: Path, cache: Path, tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_model(), tokenizers["smollm"], "smollm")
    written, found = [], []
    write = gguf_files.write_model

    def count(*arguments: Path) -> str:
        written.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(gguf_files, "write_model", count)
    starts = [
        threading.Thread(target=lambda: found.append(local_directory(str(path)))) for _ in range(3)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(written) == 1 and len(set(found)) == 1 and len(found) == 3
    # a process that was killed while it wrote leaves a part, which the next one replaces
    directory = found[0]
    directory.rename(directory.with_name(f".{directory.name}.unfinished"))
    assert local_directory(str(path)) == directory and len(written) == 2
    assert [directory] == list(cache.iterdir())


def test_commands_take_the_file_or_its_folder(
    tmp_path: Path, tokenizers, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_gguf(folder / "a.gguf", random_model(), tokenizers["smollm"], "smollm")
    for name in (path, folder):
        assert check_model_directory("--load", str(name), needs_tokenizer=True) is None
    assert local_directory(str(folder)) == local_directory(str(path))
    convert.main(["--from", str(path), "--to", str(tmp_path / "out"), "--format", "megatron"])
    open_model(tmp_path / "out")
    capsys.readouterr()
    plan.main(["--load", str(path), "--recipe", "none", "--num-gpus", "1"])
    assert "GiB" in capsys.readouterr().out
    path.rename(folder / "b.gguf")
    write_gguf(path, random_model(), tokenizers["smollm"], "smollm")
    with pytest.raises(ValueError, match="a.gguf, b.gguf"):
        check_model_directory("--load", str(folder), needs_tokenizer=True)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: GGUFValueType, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(num_tensors: int, num_entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)


LLAMA = entry("general.architecture", GGUFValueType.STRING, text("llama"))
LIST = GGUFValueType.ARRAY
NESTED = struct.pack("<IQ", LIST, 1) * 100_000 + struct.pack("<IQ", GGUFValueType.UINT8, 0)
DAMAGED = {
    "entries": header(0, 2**63) + LLAMA,
    "tensors": header(2**64 - 1, 1) + LLAMA,
    "length of a name": header(0, 1) + struct.pack("<Q", 2**64 - 1) + b"a",
    "length of a text": header(0, 1) + entry("a", GGUFValueType.STRING, struct.pack("<Q", 2**63)),
    "elements": header(0, 1) + entry("a", LIST, struct.pack("<IQ", 0, 2**63)) + bytes(1000),
    "texts": header(0, 1) + entry("a", LIST, struct.pack("<IQ", 8, 2**23)) + bytes(1000),
    "lists in lists": header(0, 1) + entry("a", LIST, NESTED),
    "empty lists without end": header(0, 1) + entry("a", LIST, struct.pack("<IQ", LIST, 2**40)),
    "a type that is none": header(0, 1) + entry("a", 77, bytes(8)),
    "an entry twice": header(0, 2) + LLAMA * 2,
    "dimensions": header(1, 1) + LLAMA + text("t") + struct.pack("<I", 2**31) + bytes(64),
    "sizes": header(1, 1) + LLAMA + text("t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0),
    "place": header(1, 1) + LLAMA + text("t") + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(64),
    "alignment": header(0, 1) + entry("general.alignment", 4, bytes(4)),
    "a number of parts that is a text": header(0, 2) + LLAMA + entry("split.count", 8, text("x")),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_header_that_claims_too_much_is_refused_at_once(
    case: str, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(ValueError, match="cannot read .* as GGUF|several parts") as error:
        local_directory(str(path))
    assert "\n" not in str(error.value) and not list(cache.iterdir())


def test_what_llama_cpp_lets_a_file_leave_out_is_as_it_reads_it(
    tmp_path: Path, cache: Path, tokenizers
) -> None:
    changes = {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None}
    path = write_gguf(
        tmp_path / "a.gguf", random_model(), tokenizers["smollm"], "smollm", keys=changes
    )
    with pytest.raises(ValueError, match="attn_k.weight .* must be"):  # each head has keys
        local_directory(str(path))
    config = read_config(path)
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.rope_parameters["rope_theta"] == 10_000.0


def test_too_many_layers_are_refused_before_they_are_counted(
    tmp_path: Path, cache: Path, tokenizers
) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", random_model(), tokenizers["smollm"], "smollm",
        keys={"llama.block_count": 2**31},
    )  # fmt: skip
    with pytest.raises(ValueError, match="num_hidden_layers must be at most"):
        local_directory(str(path))
