"""The models that ship with metatrainer, by name, each with the hash of its weights.

A job names a student of this catalogue, never a path: a submission can't bring a model of its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metatrainer.errors import ConfigError

MODELS = Path(__file__).parent.parent / "nano" / "models"
"""Model folders and manifest.json, which `metatrainer nano build` writes."""


@dataclass(frozen=True)
class Model:
    """One shipped model."""

    name: str
    role: str
    """student or agent."""
    parameters: int
    sha256: str
    """Of model.safetensors."""

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return MODELS / self.name


@cache
def models() -> dict[str, Model]:
    """All shipped models by name. Raises ConfigError if they were never built."""
    path = MODELS / "manifest.json"
    if not path.exists():
        raise ConfigError(f"no models at {MODELS}; make them with: metatrainer nano build")
    return {entry["name"]: Model(**entry) for entry in json.loads(path.read_text())}


def students() -> tuple[str, ...]:
    """Names of the students, in the catalogue's order."""
    return tuple(m.name for m in models().values() if m.role == "student")


def get(name: str, role: str = "student") -> Model:
    """The model of that name and role. Raises ConfigError that names the nearest one."""
    known = {m.name: m for m in models().values() if m.role == role}
    if name not in known:
        from metatrainer.config import nearest

        raise ConfigError(f"unknown {role} {name!r}; {nearest(name, list(known))}")
    return known[name]


def sha256(folder: Path) -> str:
    """Hash of a model folder's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def verified_folder(name: str, role: str = "student") -> Path:
    """A model's folder, after its weights were found to be the ones in the catalogue."""
    model = get(name, role)
    if (found := sha256(model.folder)) != model.sha256:
        raise ConfigError(
            f"the weights of {name} are not the catalogue's (sha256 {found[:12]}, "
            f"expected {model.sha256[:12]}); restore {model.folder} or rebuild the models"
        )
    return model.folder


def agent_folder(model: str) -> Path:
    """Where a trainer agent is: a folder given as such, or the catalogue's of that name."""
    return Path(model) if Path(model).is_dir() else verified_folder(model, role="agent")
