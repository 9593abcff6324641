"""The wheel as a user of pip has it: no checkout, another directory, every command and its data."""

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ragen_mega", "kernels", "setup.py", "pyproject.toml", "constraints.txt")
LICENSES = ("LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, because setuptools writes beside its sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in (*SOURCES, "constraints-h100.txt", *LICENSES):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return copy / "dist" / done.stdout.split()[-1]


def test_the_wheel_holds_what_the_commands_read(wheel: Path) -> None:
    """Data that the repository has beside the code of the package, symbolic links resolved."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    package = ROOT / "ragen_mega"
    data = [
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    ]
    assert len(data) > 30
    for path in data:
        assert packed.get(str(path.relative_to(ROOT))) == path.read_bytes(), path
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    assert modules <= packed.keys()
    for name in LICENSES:
        assert any(path.endswith(f"licenses/{name}") for path in packed), name
    assert not [name for name in packed if name.startswith(("tests", "tools", "docs"))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_works_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    """Installed into a fresh environment; what it depends on comes from the tests' environment."""
    home, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    (place,) = home.glob("lib/python*/site-packages")
    # Behind its own packages, and without this repository, which is installed there in place.
    (place / "dependencies.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    install = ("install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel)
    subprocess.run([home / "bin" / "pip", *install], check=True)
    bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str, code: int = 0) -> str:
        command = [str(home / "bin" / "ragen-mega"), *words]
        done = subprocess.run(
            command, cwd=empty, env=bare | {"NPROC_PER_NODE": "1"}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    assert "make-boards" in run("--help")
    where = [home / "bin" / "python", "-c", "import ragen_mega; print(ragen_mega.__file__)"]
    found = subprocess.run(where, cwd=empty, env=bare, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(place)
    assert run("doctor").endswith("ready for cpu\n")
    assert "bandit_thoughts" in run("study", "--list")
    assert "fits: peak" in run("plan", "--model", "Qwen2.5-7B", "--num-gpus", "8")
    assert "no command 'tarin' (did you mean train?)" in run("tarin", code=2)
    short = "--warm-start-steps 2 --warm-start-first-turn-steps 2 --eval-prompts 8".split()
    said = run("train", "--recipe", "bandit", "--num-steps", "1", *short)
    assert "ragen-mega view runs/bandit" in said
    (finished,) = (empty / "runs").glob("[!.]*")  # beside its lock
    assert (finished / "summary.json").exists()
    assert '"command": "ragen-mega train --recipe bandit' in (finished / "config.json").read_text()
    assert run("view", str(finished)).startswith("file://")
