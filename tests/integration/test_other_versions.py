"""A run of another version: its flags may be newer or gone, its defaults others, and some of its
values refused now.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragen_mega.commands import replayed_step
from ragen_mega.commands.convert import main as convert_command
from ragen_mega.commands.evaluate import main as evaluate_command
from ragen_mega.commands.replay import main as replay_command
from ragen_mega.config import parse
from ragen_mega.run.build import build
from ragen_mega.storage.integrity import MANIFEST, read_manifest, write_manifest
from tests.support.faulty_runs import WARM_START, open_run, replay_arguments
from tests.support.refusals import refused
from tests.support.runs import finish

NOTE = "this version does not know these settings of the run: lora.old, old.flag"


@contextmanager
def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The settings in config.json or in the manifest of a checkpoint, to be changed."""
    if path.name != MANIFEST:
        content = json.loads(path.read_text())
        yield content
        path.write_text(json.dumps(content))
        return
    manifest = read_manifest(path.parent)
    yield manifest["config"]
    write_manifest(path.parent, manifest, manifest["files"])


def make_older(run: Path) -> None:
    """Make a run one of another version, as far as its files tell."""
    for path in (run / "config.json", *run.glob(f"checkpoints/*/{MANIFEST}")):
        with recorded(path) as settings:
            del settings["model"]["experts_per_token"], settings["guard"]
            settings["lora"] |= {"lora_lr_factor": 10.0, "old": 1}
            settings["old"] = {"flag": 2}
            settings["evaluation"] |= {"eval_prompts": 0}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("older")
    finish(open_run(output, "start", *WARM_START))
    run = finish(open_run(output, "run"))
    make_older(run)
    return run


def test_a_run_of_another_version_goes_on(
    older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(older, tmp_path / "run")
    words = ["--resume", str(run), "--num-steps", "5"]
    with pytest.raises(ValueError, match=f"eval_prompts must be at least 1.*recorded in {run}; a"):
        parse(words)
    finish(build(parse([*words, "--eval-prompts", "2"])))
    said = [line for line in capsys.readouterr().out.splitlines() if "resume:" in line]
    assert f"resume: {NOTE}" in said
    assert "resume: lora.lora_lr_factor was 10.0 and is None now" in said
    assert not any("experts_per_token" in line for line in said)


def test_a_run_of_another_version_is_replayed(
    older: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replayed_step.replay(replay_arguments(older, 3))
    assert result["equal"] and result["largest_difference"] == 0.0
    with pytest.raises(SystemExit):
        replay_command(["--run", str(older), "--step", "77"])
    assert NOTE in capsys.readouterr().err


def test_a_run_of_another_version_is_converted_and_evaluated(
    older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from", older, "--to", tmp_path / "model", "--format", "huggingface"]
    convert_command([*map(str, words)])
    assert (tmp_path / "model" / "model.safetensors").exists()
    capsys.readouterr()
    words = ["--load", str(older), "--samples-per-prompt", "1"]
    said = refused(capsys, evaluate_command, words)
    assert "eval_prompts must be at least 1" in said and f"recorded in {older}" in said
    evaluate_command([*words, "--num-prompts", "2"])
    assert NOTE in " ".join(capsys.readouterr().out.split())
