"""The folder of a run: where its parts lie, how it is made and found.

Knows nothing about what the parts hold, but for the config that a resumed run starts from.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from metatrainer.config import RunSettings, load_config, nearest, to_toml
from metatrainer.errors import ConfigError

RUNS = Path("runs")
"""Where runs lie unless they are told otherwise, below the working directory."""


@dataclass(frozen=True)
class RunDir:
    """One run's folder. It also holds logs/, jobs/ and checkpoints/, each its maker's own."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.resolve().name

    @property
    def config(self) -> Path:
        """The settings as resolved when the run began."""
        return self.path / "config.toml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def settings(self) -> RunSettings:
        """What the run was begun with."""
        return load_config(self.config)


def create(settings: RunSettings, path: Path | None = None, stem: str | None = None) -> RunDir:
    """Make a new run's folder and write down its settings.

    path: left out, runs/<stem>-<date>-<n>. stem: left out, the preset. Raises ConfigError where
    there is something already.
    """
    stem = f"{stem or settings.preset}-{date.today():%Y%m%d}"
    run = RunDir(_numbered(stem) if path is None else path)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(
                f"{path} is not empty; go on with a run by --resume {path}, or name another folder"
            )
    run.config.write_text(to_toml(settings))
    return run


def find(name: str) -> RunDir:
    """A run by its folder or by its name in runs/. Raises ConfigError that names the nearest."""
    for path in (Path(name), RUNS / name):
        if (path / "config.toml").is_file():
            return RunDir(path)
    there = sorted(p.parent.name for p in RUNS.glob("*/config.toml"))
    hint = nearest(Path(name).name, there) if there else f"{RUNS}/ holds none yet"
    raise ConfigError(f"no run at {name}; {hint}")


def _numbered(stem: str) -> Path:
    """Make and return the first of stem-1, stem-2, ... that is not there."""
    n = 1
    while True:
        path = RUNS / f"{stem}-{n}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            n += 1
