"""What every durable file of a run relies on: bytes that are on the disk, and checksums that tell
whether they still are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Return when the disk has the file, or the names in the directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256, as manifests state them."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest without its field `sha256`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
