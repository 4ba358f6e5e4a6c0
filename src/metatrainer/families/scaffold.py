"""Writes a package with a family of one's own, to change: a working family, its tests, a README.

The files are in template/, with NAME where the family's name belongs.
"""

from __future__ import annotations

import re
from pathlib import Path

from metatrainer import families, folders
from metatrainer.errors import ConfigError

TEMPLATE = Path(__file__).with_name("template")
_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")


def new(name: str, folder: Path) -> list[Path]:
    """Write the package. Returns the files.

    Raises ConfigError for a name that is taken or cannot be a module's, or a folder that holds
    something.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a family; use small letters, digits and _, such as parts"
        )
    if name in families.known():
        raise ConfigError(f"there is a family {name!r} already; choose another name")
    folders.check_new(folder)
    written = []
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file()):
        path = folder / _named(source, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        written.append(path)
    return written


def _named(source: Path, name: str) -> str:
    """The path of a template's file in the package; .txt keeps Python in it from being ours."""
    return source.relative_to(TEMPLATE).as_posix().removesuffix(".txt").replace("NAME", name)
