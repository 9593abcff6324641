"""A first look at a model directory: whether it can be one, without reading a weight. No torch: the
launcher asks before it starts ranks, and the loader looks closely.
"""

import hashlib
import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from shlex import quote
from tempfile import NamedTemporaryFile

from ragen_mega.config.recorded import beside
from ragen_mega.models.families import find_family
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks.launcher import cache_folder

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MODEL_FILES = (".json", ".jinja", ".txt", ".safetensors")
"""Suffixes of the files that make a model; others may lie beside them."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "manifest.json")
_TOKENIZER = ("tokenizer.json", "vocab.json")
_LARGE = 1 << 24
"""Bytes from which on the digest of a file is remembered."""
_SECONDS_OF_CLOCK = 2.0
"""Time after a change in which another one may leave a file with the same times."""
_LFS = b"version https://git-lfs"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path means: itself, or the only one in a directory without a
    model in another format. Raises ValueError if such a directory holds several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or any((path / file).exists() for file in ("config.json", *_WEIGHTS)):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} holds several models ({names}); give the path of one file")
    return found[0] if found else None


def check_hub_name(flag: str, name: str) -> None:
    """Raise ValueError for the path of no model, unless it may be a name on the hub."""
    path = Path(name)
    is_fetched = path.parts[:1] == ("models",)  # where `ragen-mega fetch` writes
    is_ours = is_fetched or path.parts[:1] == ("runs",)  # and no owner's name
    if _HUB_NAME.fullmatch(name) and not (is_ours or path.exists() or path.suffix == ".gguf"):
        return
    state = "is no GGUF file" if path.exists() else "does not exist"
    fetched = Path("models", name)
    hint = f" (did you mean {fetched}?)" if fetched.is_dir() else beside(path)
    if is_fetched:
        hint += "; ragen-mega fetch smollm2 writes models/smollm2, in the working directory"
    raise ValueError(
        f"{flag} {name} {state}{hint}; give the directory of a model, a file that ends in .gguf, or"
        " a name on the hub as owner/model"
    )


def check_model_directory(flag: str, name: str, *, needs_tokenizer: bool) -> ModelShape | None:
    """Return the shape of the model that `flag` names, None if that is a GGUF file or a hub model,
    or if its sizes are invalid. Raises ValueError if it is a local path that cannot hold a model.
    """
    path = Path(name)
    if file := find_gguf(path):
        _check_content(flag, file)
        return None
    if not path.is_dir():
        check_hub_name(flag, name)
        return None
    shape = _shape(_read_config(flag, path))
    for part in (*_WEIGHTS[:2], *_TOKENIZER):
        _check_content(flag, path / part)
    if (path / "pytorch_model.bin").exists() and not any((path / f).exists() for f in _WEIGHTS):
        raise ValueError(
            f"{flag} {name} holds its weights as pytorch_model.bin, a pickle, which is not read;"
            " write model.safetensors by transformers: AutoModelForCausalLM.from_pretrained(...)"
            ".save_pretrained(...)"
        )
    if not any((path / file).exists() for file in _WEIGHTS):
        raise ValueError(
            f"{flag} {name} holds no weights ({' or '.join(_WEIGHTS[:2])}); copy them there, or"
            " give another directory"
        )
    if needs_tokenizer and not any((path / file).exists() for file in _TOKENIZER):
        raise ValueError(
            f"{flag} {name} holds no tokenizer ({' or '.join(_TOKENIZER)}); copy the model's"
            " tokenizer files there"
        )
    if needs_tokenizer and not _has_template(path):
        raise ValueError(
            f"{flag} {name} has a tokenizer without chat template; load an Instruct model, or"
            " copy its chat_template.jinja there"
        )
    return shape


def _check_content(flag: str, path: Path) -> None:
    """Raise ValueError if a file is one that Git LFS has not fetched."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise ValueError(
                f"{flag} {path} is a pointer of Git LFS and not the file; run git lfs pull in"
                f" {path.parent}"
            )


def content_digest(path: Path) -> str:
    """Return the digest by which a model, a directory or a GGUF file, is known again after it was
    moved. All of a large file is read once, until the file changes.
    """
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file == path or file.suffix in MODEL_FILES:
            digest.update(f"{file.name} {_file_digest(file)} ".encode())
    return digest.hexdigest()[:16]


def _file_digest(file: Path) -> str:
    """Return the SHA-256 of a file. The digest of a large file is kept in the user's cache under
    the file's place and times, of which nobody can set the time of the last change.
    """
    facts, known = _facts(file), None
    if facts[0] >= _LARGE:
        with suppress(OSError, ValueError):  # no cache that can be trusted
            known = cache_folder("digests") / hashlib.sha256(repr(facts).encode()).hexdigest()
            return known.read_text()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    is_settled = _facts(file) == facts and time.time() - facts[1] / 1e9 > _SECONDS_OF_CLOCK
    if known is not None and is_settled:
        with suppress(OSError), NamedTemporaryFile("w", dir=known.parent, delete=False) as written:
            written.write(digest)
            written.flush()
            os.replace(written.name, known)
    return digest


def _facts(file: Path) -> tuple[int, int, int, int, int, str]:
    about = file.stat()
    changed = about.st_ctime_ns, about.st_mtime_ns
    return about.st_size, *changed, about.st_dev, about.st_ino, str(file.resolve())


def _read_config(flag: str, path: Path) -> dict:
    """Read the config.json of a model of a known family."""
    try:
        values = json.loads((path / "config.json").read_text())
        model_type = values.get("model_type")
    except FileNotFoundError:
        what = "holds no config.json; give the directory of a Hugging Face model"
        if (path / "state.json").exists():
            what = (
                f"is a checkpoint of a run; give the run's directory huggingface, or convert it:"
                f" ragen-mega convert --from {quote(str(path))} --to DIRECTORY --format"
                " huggingface"
            )
        elif (path / "adapter_config.json").exists():
            what = (
                "is an adapter of PEFT and no model; give its model, and the adapter by --lora-load"
            )
        elif any(path.glob("step_*/state.json")):
            what = f"holds the checkpoints of a run; give {path.parent / 'huggingface'}"
        elif snapshots := sorted(path.glob("snapshots/*/config.json")):
            what = (
                f"is the hub's cache of a model; give {snapshots[-1].parent}, one of its versions"
            )
        raise ValueError(f"{flag} {path} {what}") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{flag}: {path / 'config.json'} is no JSON object ({error}); copy it again"
        ) from None
    if "warm_start" in values:
        raise ValueError(
            f"{flag} {path} is a run, not a model; give {path / 'huggingface'}, the policy that it"
            " ended with"
        )
    find_family(model_type)
    return values


def _shape(values: dict) -> ModelShape | None:
    """Return the shape that a config.json says; None if it is damaged, which the loader reports."""
    try:
        shape = ModelShape.from_config(values)
    except (TypeError, AttributeError, ArithmeticError):
        return None
    sizes = (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    return shape if all(type(size) is int and size > 0 for size in sizes) else None


def _has_template(path: Path) -> bool:
    if any((path / file).exists() for file in _TEMPLATES):
        return True
    config = path / "tokenizer_config.json"
    return config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")
