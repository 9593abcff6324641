"""Durability of the files of a run: bytes that have reached the disk, and checksums that tell
whether they are intact.
"""

import errno
import fnmatch
import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from ragen_mega import __version__
from ragen_mega.system.paths import dangling, named

MANIFEST = "manifest.json"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_UNANSWERED = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN}
_LIBRARIES = ("torch", "megatron-core", "transformers")


def describe_error(error: OSError, directory: Path | str = "its output") -> str:
    """Describe an error of the operating system in one line, for a run or a command that writes to
    `directory`: the unreadable or unwritable path, the reason, and the remedy.
    """
    if error.filename and (problem := dangling(str(error.filename))):
        return f"{problem}; make that folder or give another path"
    if error.errno in _UNANSWERED:
        place = error.filename or f"a file of {directory} or one that is read"
        return (
            f"cannot read or write {place}: {error.strerror}; nothing was deleted; start again once"
            " the storage answers"
        )
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{error}: each rank may have {limit}, sockets included; raise it by ulimit -n"
    if error.errno not in _FULL | _FORBIDDEN:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    place = error.filename or directory
    return f"cannot write {place}: {error.strerror}; {write_remedy(error)}"


def write_remedy(error: OSError) -> str:
    """Name the remedy for a file that could not be written."""
    if error.errno in _FORBIDDEN:
        return "choose another --output"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f, or that of the file system)"
    return "free space or choose another --output"


def system_error(error: Exception, path: Path) -> OSError | None:
    """Return the error of the operating system that a library written in Rust has put into words,
    as one about `path`; None if it is another error.
    """
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path)) if found else None


def sync(path: Path) -> None:
    """Return when the disk has the file, or the names in the directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all: it is renamed once it is on disk. Raises
    OSError, and then leaves the old file.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.unlink(missing_ok=True)  # of a killed process, or a link to another file
        with named(path), unfinished.open("xb") as file:
            file.write(data)
        sync(unfinished)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def cut_lines(path: Path, stays: Callable[[bytes], bool], ending: bytes = b"\n") -> None:
    """Cut off the lines of a file behind the last one that `stays`, and close that one by `ending`
    in place of commas and line feeds. Lines are read from the last one back, and nothing is written
    where the file ends so already. Raises OSError.
    """
    with named(path), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while (line := _line_before(file, end)) and not stays(line):
            end -= len(line)
        ending = ending if line else b""
        end -= len(line) - len(line.rstrip(b",\n"))
        file.seek(end)
        if file.read(len(ending) + 1) != ending:
            file.truncate(end)
            file.seek(end)
            file.write(ending)
            file.flush()
            os.fsync(file.fileno())


def _line_before(file: BinaryIO, end: int) -> bytes:
    """Return the line of a file that ends at byte `end`; none at its beginning."""
    size = 1 << 12
    while True:
        start = max(0, end - size)
        file.seek(start)
        text = file.read(end - start)
        _, feed, line = text[:-1].rpartition(b"\n")
        if feed or not start:
            return line + text[-1:]
        size *= 2


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` that gets its name when the block succeeds, and is deleted if
    it fails.
    """
    if problem := dangling(str(target)):
        raise ValueError(f"{problem}; make that folder or give another name")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"{target} exists already and stays untouched; delete it or give another name"
        )
    target = target.absolute()
    unfinished = target.with_name(f".{target.name}.unfinished")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.mkdir()
    except FileExistsError:
        raise ValueError(
            f"{unfinished} exists: another conversion is at work or was killed; delete it if"
            " none is"
        ) from None
    try:
        yield unfinished
        for path in [*unfinished.iterdir(), unfinished]:
            sync(path)
        unfinished.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_manifest(directory: Path, facts: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Record in a directory what its files are (name -> `describe_file`), and which versions
    wrote them.
    """
    versions = {name: version(name) for name in _LIBRARIES} | {"ragen_mega": __version__}
    manifest = {**facts, "versions": versions, "files": files}
    text = json.dumps(manifest | {"sha256": _manifest_sha256(manifest)}, indent=2) + "\n"
    write_whole(directory / MANIFEST, text.encode())


def read_manifest(directory: Path, **expected: object) -> dict[str, Any]:
    """Read the facts that `write_manifest` recorded. Raises ValueError if the manifest is missing,
    damaged or lacks one of the `expected` facts, and OSError if it cannot be read, which says
    nothing about damage.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        own = manifest.pop("sha256")
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({type(error).__name__})") from None
    if own != _manifest_sha256(manifest):
        raise ValueError(f"{MANIFEST} does not have the SHA-256 that it states")
    for name, value in expected.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"its {name} is {manifest.get(name)!r}, and this program reads {value!r}"
            )
    return manifest


def check_files(
    directory: Path, files: Mapping[str, Any], pattern: str = "*", share: slice = slice(None)
) -> None:
    """Raise ValueError that names the first file that differs from the manifest, or that
    matches `pattern` but is not in it; OSError if one cannot be read. Of the manifest's files only
    the `share` is compared.
    """
    present = fnmatch.filter(os.listdir(directory), pattern)  # a glob hides what it cannot read
    if added := sorted({*present} - {MANIFEST, *files}):
        raise ValueError(f"{added[0]} is not in its manifest")
    for name, stated in [*files.items()][share]:
        path = directory / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if size != stated["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {stated['bytes']}")
        if describe_file(path) != stated:
            raise ValueError(f"{name} does not have the SHA-256 in the manifest")


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256, as manifests hold them."""
    with named(path), path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its field `sha256`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
