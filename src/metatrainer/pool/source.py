"""metatrainer's own source as one archive, for machines that do not have it.

Knows nothing about where it goes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from functools import cache
from pathlib import Path

import metatrainer

PACKAGES = ("metatrainer", "metatrainer_harness")
_LEFT_OUT = ("__pycache__", "web")
MODELS = Path("metatrainer", "nano", "models")
"""The models that ship; they travel too, as they are students like any other."""


@cache
def packed() -> tuple[bytes, str]:
    """A gzipped tar of the packages, and a name for exactly these files."""
    root = Path(metatrainer.__file__).parent.parent
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*")):
                if path.is_file() and not set(_LEFT_OUT) & set(path.parts):
                    _add(tar, path, str(path.relative_to(root)))
    text = plain.getvalue()
    return gzip.compress(text, compresslevel=1, mtime=0), hashlib.sha256(text).hexdigest()[:16]


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """One file without what differs from machine to machine."""
    entry = tarfile.TarInfo(name)
    data = path.read_bytes()
    entry.size = len(data)
    entry.mode = 0o644
    tar.addfile(entry, io.BytesIO(data))
