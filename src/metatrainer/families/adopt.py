"""A family straight from the folder of its package, without installing it.

The folder gets what an installation would give it: a place on the path of this process and of those
that it starts, and an entry point. Knows nothing about what a family is.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from metatrainer import families
from metatrainer.errors import ConfigError

PROJECT = "pyproject.toml"


def adopt(folder: Path, site: Path) -> str:
    """Make the family of a package's folder known under its name, which is returned.

    site: a folder that is kept as long as the family is in use. Raises ConfigError for a folder
    that is no such package and a family that cannot be loaded.
    """
    name, value = _entry(folder)
    info = site / f"{name}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{families.GROUP}]\n{name} = {value}\n")
    source = folder / "src" if (folder / "src").is_dir() else folder
    places = [str(path.resolve()) for path in (site, source)]
    sys.path[:0] = places
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *([before] if before else [])])
    families.forget()
    families.get(name)
    return name


def _entry(folder: Path) -> tuple[str, str]:
    """Name and object of the one family that a package says it has."""
    try:
        project = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8"))
        entries = dict(project["project"]["entry-points"][families.GROUP])
    except (OSError, KeyError, TypeError, ValueError):
        entries = {}
    if len(entries) != 1:
        raise ConfigError(
            f"{folder} is no package with one family; write one with: metatrainer families new NAME"
        )
    ((name, value),) = entries.items()
    return name, value
