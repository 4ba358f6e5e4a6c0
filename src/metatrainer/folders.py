"""Folders that are handed over: new ones only, and whole or not at all.

Knows nothing about what goes into them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metatrainer.errors import ConfigError


def check_new(folder: Path) -> None:
    """See that there is nothing yet that would be written over. Raises ConfigError."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; name a folder that is new or empty")


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name once all is written; after an error it is gone.

    Raises ConfigError where the name is taken or nothing can be written.
    """
    check_new(folder)
    unfinished = folder.absolute().with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.replace(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
