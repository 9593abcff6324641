"""Sources of a model: a directory, a GGUF file, the hub of Hugging Face."""

import sys
from pathlib import Path
from textwrap import shorten

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ragen_mega.config.recorded import beside
from ragen_mega.models.directory import check_hub_name, find_gguf
from ragen_mega.models.huggingface import brief
from ragen_mega.ranks.collectives import is_main
from ragen_mega.storage.gguf_files import dequantised


def local_directory(name: str, revision: str | None = None, *, fetch: bool = True) -> Path:
    """Return the model directory that `name` means: itself, its GGUF file after it was dequantised,
    or that model of the hub, downloaded unless `fetch` is False. The last part of a download's path
    is its commit: `revision`, by default the newest.
    """
    path = Path(name)
    if file := find_gguf(path):
        return dequantised(file)
    if path.is_dir():
        return path
    check_hub_name("--load", name)
    if revision is None and is_main():
        print(
            f"--load {name}: there is no such directory, so the hub is asked for it as owner/name",
            file=sys.stderr,
            flush=True,
        )
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
                local_files_only=not fetch,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"--load {name} is no directory here, and the hub does not give it"
            f" ({shorten(brief(error), 80)}){beside(path)}; check the name, or the network"
        ) from None
