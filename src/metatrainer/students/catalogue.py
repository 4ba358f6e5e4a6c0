"""The models that a run may name: those that ship with metatrainer, and those that a user added.

Each has the hash of its weights. A job names a student of this catalogue, never a path: a
submission can't bring a model of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from metatrainer.errors import ConfigError

MODELS = Path(__file__).parent.parent / "nano" / "models"
"""Model folders and manifest.json, which `metatrainer nano build` writes."""
HOME = "METATRAINER_HOME"
"""Environment variable: the folder of what a user added."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Model:
    """One model."""

    name: str
    role: str
    """student or agent."""
    parameters: int
    sha256: str
    """Of its weights."""
    path: str = ""
    """Folder or GGUF file of one that was added; those that ship have none."""
    hub: str = ""
    """Name on the Hugging Face hub of one that is fetched from there where it is needed."""

    @property
    def folder(self) -> Path:
        """Where its files are: a folder, or one GGUF file. Of one on the hub, where they may be."""
        if self.hub:
            return _fetched.get(self.name, Path(self.hub))
        return Path(self.path) if self.path else MODELS / self.name


HUB = (
    Model("qwen3-0.6b", "student", 600_000_000, "", hub="Qwen/Qwen3-0.6B"),
    Model("qwen3-1.7b", "student", 1_700_000_000, "", hub="Qwen/Qwen3-1.7B"),
)
"""Students of the original experiment. Their weights are held to what the first look at them found:
who fetches them has the hub's word for the rest."""
_fetched: dict[str, Path] = {}
_found: dict[str, str] = {}
"""Hashes of weights that came from the hub, by name, since this process began."""


@cache
def models() -> dict[str, Model]:
    """All models by name. Raises ConfigError if those that ship were never built."""
    if not (MODELS / MANIFEST).exists():
        raise ConfigError(f"no models at {MODELS}; make them with: metatrainer nano build")
    return {model.name: model for model in [*_read(MODELS), *HUB, *_read(home())]}


def home() -> Path:
    """Where added models are listed, and where those that metatrainer makes lie."""
    given = os.environ.get(HOME)
    return (Path(given) if given else Path.home() / ".local/share/metatrainer") / "models"


def students() -> tuple[str, ...]:
    """Names of the students, in the catalogue's order."""
    return tuple(m.name for m in models().values() if m.role == "student")


def shipped() -> tuple[str, ...]:
    """Names of the students that come with metatrainer."""
    return tuple(m.name for m in models().values() if m.role == "student" and not (m.path or m.hub))


def add(name: str, path: Path) -> Model:
    """Put a student in the catalogue. It stays where it is.

    path: a Hugging Face folder or a GGUF file. Raises ConfigError for a name that is taken or no
    name, and for what the engine or the chat format cannot use.
    """
    from metatrainer.chat import ChatFormat
    from metatrainer.engine import Engine

    check_new(name)
    engine = Engine(path)
    ChatFormat(engine.tokenizer)
    model = Model(name, "student", engine.base.count, sha256(path), str(path.resolve()))
    _write([*_read(home()), model])
    return model


def check_new(name: str) -> None:
    """Raises ConfigError for what cannot be the name of a student that is added."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name; take small letters, digits, '.', '_' and '-'")
    if name in models():
        raise ConfigError(f"there is a model {name!r} already; take another name")


def download(hub_name: str) -> Path:
    """A model from the Hugging Face hub, in the hub's own cache. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(hub_name, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
        )
    except HFValidationError:
        raise ConfigError(f"no file or folder {hub_name}, nor is it a name on the hub") from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"no file or folder {hub_name}, and the hub cannot be reached to look for it there"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"the hub does not give {hub_name}: {error}") from None


def remove(name: str) -> None:
    """Take an added student out of the catalogue; its files stay. Raises ConfigError."""
    added = {model.name: model for model in _read(home())}
    if name not in added:
        from metatrainer.config import nearest

        hint = nearest(name, list(added)) if added else "none was added"
        raise ConfigError(f"no student {name!r} was added; {hint}")
    del added[name]
    _write(list(added.values()))


def get(name: str, role: str = "student") -> Model:
    """The model of that name and role. Raises ConfigError that names the nearest one."""
    known = {m.name: m for m in models().values() if m.role == role}
    if name not in known:
        from metatrainer.config import nearest

        raise ConfigError(f"unknown {role} {name!r}; {nearest(name, list(known))}")
    return known[name]


def sha256(path: Path) -> str:
    """Hash of a model's weights: of a GGUF file, or of all of a folder's shards in order."""
    found = hashlib.sha256()
    for shard in sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]:
        with shard.open("rb") as file:
            while block := file.read(1 << 24):
                found.update(block)
    return found.hexdigest()


def verified_folder(name: str, role: str = "student") -> Path:
    """A model's folder or file, after its weights were found to be the ones in the catalogue."""
    model = get(name, role)
    if model.hub:
        _fetched.setdefault(name, download(model.hub))
    if not model.folder.exists():
        raise ConfigError(f"{name} is gone from {model.folder}; {_mend(model)}")
    found = sha256(model.folder)
    expected = model.sha256 or _found.setdefault(name, found)
    if found != expected:
        raise ConfigError(
            f"the weights of {name} are not the catalogue's (sha256 {found[:12]}, "
            f"expected {expected[:12]}); {_mend(model)}"
        )
    return model.folder


def agent_folder(model: str) -> Path:
    """Where a trainer agent is: a folder given as such, or the catalogue's of that name."""
    return Path(model) if Path(model).is_dir() else verified_folder(model, role="agent")


def _mend(model: Model) -> str:
    if model.hub:
        return f"delete {model.folder}, so that it is fetched anew"
    if not model.path:
        return f"restore {model.folder} or rebuild the models"
    return f"restore it, or: metatrainer students remove {model.name}"


def _read(folder: Path) -> list[Model]:
    path = folder / MANIFEST
    if not path.exists():
        return []
    try:
        return [Model(**entry) for entry in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} does not list models ({error}); mend or delete it") from None


def _write(added: list[Model]) -> None:
    path = home() / MANIFEST
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps([asdict(model) for model in added], indent=2) + "\n")
    draft.replace(path)
    models.cache_clear()
