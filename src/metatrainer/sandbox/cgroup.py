"""Control groups: limits of memory and processes that hold for a whole session, where they can
be had.

Works on version 2 and version 1, as root or where a group has been handed to the user; elsewhere
there is none, and the limits of single processes and the keeper's own count of memory remain.
Knows nothing about sandboxes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "metatrainer"
MEMORY = 1536 << 20
"""Bytes of a session, files in its folders among them; the keeper ends it well before."""
PROCESSES = 48
"""Processes and threads of a session."""

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

_LIMITS = {
    2: {"memory.max": MEMORY, "memory.swap.max": 0, "pids.max": PROCESSES},
    1: {"memory.limit_in_bytes": MEMORY, "pids.max": PROCESSES},
}
_OPTIONAL = ("memory.swap.max",)
_log = logging.getLogger(__name__)
_numbers = itertools.count()
_left: list[Group] = []
"""Groups whose last process was still ending."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Home:
    """Where groups can be made: one folder in version 2, one a controller in version 1."""

    version: int
    folders: tuple[Path, ...]


class Group:
    """The group of one session. Made with its limits set."""

    def __init__(self, home: Home, name: str):
        self.folders = tuple(folder / name for folder in home.folders)
        for folder in self.folders:
            folder.mkdir()
        _set_limits(self.folders, home.version)

    def add(self, pid: int) -> None:
        """Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> bool:
        """Whether the group is gone; it stays as long as a process of it does."""
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError:
                    return False
        return True


def limit(pid: int) -> Group | None:
    """Put a process into a new group, with all that it starts from now on. None where none is."""
    if (found := home()) is None:
        return None
    try:
        group = Group(found, f"{PREFIX}-{os.getpid()}-{next(_numbers)}")
    except OSError:
        return None
    try:
        group.add(pid)
    except OSError:
        group.remove()
        return None
    return group


def remove(group: Group) -> None:
    """Remove a group, now or, if a process of it is still ending, with a later one."""
    with _lock:
        _left.append(group)
    remove_left()


def remove_left() -> None:
    """Remove groups that could not be removed before."""
    with _lock:
        _left[:] = [group for group in _left if not group.remove()]


@functools.cache
def home() -> Home | None:
    """The first place, from our own group upwards, where a group with limits can be made."""
    for candidate in _candidates():
        _sweep(candidate)
        try:
            trial = Group(candidate, f"{PREFIX}-{os.getpid()}-trial")
        except OSError:
            for folder in candidate.folders:
                with contextlib.suppress(OSError):
                    (folder / f"{PREFIX}-{os.getpid()}-trial").rmdir()
            continue
        trial.remove()
        return candidate
    _log.info("no control groups to be had: memory and processes are limited one by one")
    return None


def _candidates() -> Iterator[Home]:
    own = _own_groups()
    if "" in own and (ROOT / "cgroup.controllers").is_file():
        yield from (Home(2, (folder,)) for folder in _upwards(ROOT, own[""]))
    if "memory" in own and "pids" in own:
        pairs = itertools.zip_longest(
            *(list(_upwards(ROOT / name, own[name])) for name in ("memory", "pids"))
        )
        for memory, pids in pairs:
            yield Home(1, (memory or ROOT / "memory", pids or ROOT / "pids"))


def _own_groups() -> dict[str, str]:
    """Controller -> our path in its hierarchy; the one of version 2 has no name."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split(":", 2) for line in lines]
    return {name: path for _, names, path in parts for name in names.split(",")}


def _upwards(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.lstrip("/")
    yield from (f for f in (folder, *folder.parents) if f.is_relative_to(root) and f.is_dir())


def _set_limits(folders: tuple[Path, ...], version: int) -> None:
    """Write each limit into the folder that has it. Raises OSError where none has."""
    for file, value in _LIMITS[version].items():
        places = [folder / file for folder in folders if (folder / file).exists()]
        if not places and file not in _OPTIONAL:
            raise FileNotFoundError(f"no {file}")
        for place in places:
            place.write_text(str(value))


def _sweep(home: Home) -> None:
    """Remove what processes that were killed have left; a group in use cannot be removed."""
    for folder in home.folders:
        for left in folder.glob(f"{PREFIX}-*"):
            if not Path(f"/proc/{left.name.split('-')[1]}").exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
