"""Caches of the user: folders that others could have filled, and files that have changed."""

import os
import stat
from pathlib import Path

import pytest

from ragen_mega.models import directory
from ragen_mega.models.directory import content_digest
from ragen_mega.ranks.launcher import cache_folder, keep_caches_at_home


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep"


def modes(root: Path) -> list[str]:
    return [oct(stat.S_IMODE(path.stat().st_mode)) for path in (root, *root.rglob("*"))]


def test_no_umask_opens_a_cache(home: Path):
    before = os.umask(0)
    try:
        cache_folder("gguf")
    finally:
        os.umask(before)
    assert set(modes(home)) == {"0o700"} and len(modes(home)) == 4


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
@pytest.mark.parametrize("name", ["gguf", ""])
def test_a_folder_that_others_can_write_is_not_taken(mode: int, name: str):
    folder = cache_folder("gguf")
    (folder if name else folder.parent).chmod(mode)
    with pytest.raises(ValueError, match=r"must be yours alone to write.*XDG_CACHE_HOME"):
        cache_folder("gguf")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_not_taken():
    os.chown(cache_folder("gguf"), 12345, -1)
    with pytest.raises(ValueError, match="is of user 12345"):
        cache_folder("gguf")


def test_compilers_get_a_new_folder_then(monkeypatch: pytest.MonkeyPatch):
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    cache_folder("torchinductor").chmod(0o777)
    keep_caches_at_home()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert used != cache_folder("triton").with_name("torchinductor")
    assert set(modes(used)) == {"0o700"}
    assert os.environ["TRITON_CACHE_DIR"] == str(cache_folder("triton"))


def test_a_relative_cache_is_that_of_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("x") == tmp_path / ".cache/ragen_mega/x"


def test_a_digest_sees_every_byte_and_reads_a_large_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_SECONDS_OF_CLOCK", -1.0)
    monkeypatch.setattr(directory, "_LARGE", 1 << 16)
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    times, seen = file.stat(), {content_digest(file)}
    for place in (0, 70_001, (1 << 20) - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as before, as `cp -p` does
        seen.add(content_digest(file))
    assert len(seen) == 4
    reads = []
    monkeypatch.setattr(
        directory.hashlib, "file_digest", lambda *arguments: reads.append(arguments)
    )
    assert content_digest(file) in seen and not reads


def test_a_file_that_has_just_changed_is_read_again(tmp_path, monkeypatch):
    """Its times could be the same after another change."""
    monkeypatch.setattr(directory, "_LARGE", 1)
    monkeypatch.setattr(directory, "_SECONDS_OF_CLOCK", 1e9)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    content_digest(file)
    assert not [*cache_folder("digests").iterdir()]
