"""The agent's folder, kept in memory: a dict of path to text with path rules and edits.

Knows nothing about tools, tasks or validation. Refusals are written for the agent to read.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from metatrainer.errors import WorkspaceError

SUFFIXES = (".toml", ".py", ".md", ".json")
MAX_FILES = 32
MAX_FILE_CHARS = 32_000
MAX_TOTAL_CHARS = 128_000
MAX_PATH_CHARS = 100


class Workspace:
    """Files that the agent reads and writes. Raises WorkspaceError with a text that teaches."""

    def __init__(self, files: Mapping[str, str] | None = None, readonly: Collection[str] = ()):
        self._files = dict(files or {})
        self._readonly = frozenset(readonly)

    def paths(self) -> list[str]:
        """All paths, sorted."""
        return sorted(self._files)

    def read(self, path: str) -> str:
        """Text of one file."""
        path = clean_path(path)
        if path not in self._files:
            raise WorkspaceError(f"no file {path!r}; {self._nearest(path)}")
        return self._files[path]

    def write(self, path: str, content: str) -> None:
        """Create or replace one file."""
        path = clean_path(path)
        self._check_writable(path)
        self._check_size(path, content)
        self._files[path] = content

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must occur exactly once in the file, by `new`."""
        text = self.read(path)
        if not old:
            raise WorkspaceError("old is empty; give the exact text to replace")
        count = text.count(old)
        if count == 0:
            raise WorkspaceError(f"old text not found in {path}; {_closest_line(text, old)}")
        if count > 1:
            raise WorkspaceError(f"old text occurs {count} times in {path}; give a longer piece")
        self.write(path, text.replace(old, new))

    def submission(self) -> dict[str, str]:
        """The files that the agent may change: what is validated and run."""
        return {path: text for path, text in self._files.items() if path not in self._readonly}

    def _check_writable(self, path: str) -> None:
        if path in self._readonly:
            raise WorkspaceError(f"{path} is read-only; write job.toml or the environment")
        if path not in self._files and len(self._files) >= MAX_FILES:
            raise WorkspaceError(f"the workspace is full ({MAX_FILES} files); reuse a file")
        parents = {str(parent) for parent in PurePosixPath(path).parents}
        if blocking := parents & self._files.keys():
            raise WorkspaceError(f"{blocking.pop()} is a file, not a folder; use another path")
        if any(other.startswith(f"{path}/") for other in self._files):
            raise WorkspaceError(f"{path} is a folder; write a file inside it")

    def _check_size(self, path: str, content: str) -> None:
        if len(content) > MAX_FILE_CHARS:
            raise WorkspaceError(
                f"{path} would have {len(content)} characters; at most {MAX_FILE_CHARS}"
            )
        others = sum(len(text) for name, text in self._files.items() if name != path)
        if others + len(content) > MAX_TOTAL_CHARS:
            raise WorkspaceError(
                f"the workspace would pass {MAX_TOTAL_CHARS} characters; write shorter files"
            )

    def _nearest(self, path: str) -> str:
        close = difflib.get_close_matches(path, self._files, n=1, cutoff=0.5)
        if close:
            return f"did you mean {close[0]}?"
        return f"files: {', '.join(self.paths()) or 'none yet'}"


def clean_path(path: str) -> str:
    """The path in its one valid spelling. Raises WorkspaceError if it leaves the workspace."""
    pure = PurePosixPath(path)
    if not path or not pure.parts:
        raise WorkspaceError("path is empty; give one like job.toml")
    if pure.is_absolute() or ".." in pure.parts or "\\" in path:
        raise WorkspaceError(f"{_short(path)!r} is outside the workspace; use one like job.toml")
    if len(path) > MAX_PATH_CHARS or not path.isprintable():
        raise WorkspaceError(f"{_short(path)!r} is not a usable path; use a short plain one")
    if pure.suffix not in SUFFIXES:
        raise WorkspaceError(f"{path!r} has a wrong ending; allowed: {', '.join(SUFFIXES)}")
    return str(pure)


def _closest_line(text: str, old: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((line for line in old.splitlines() if line.strip()), old)
    close = difflib.get_close_matches(first, lines, n=1, cutoff=0.5)
    return f"the nearest line is {close[0]!r}" if close else "read_file shows the exact text"


def _short(path: str) -> str:
    return path if len(path) <= 40 else f"{path[:40]}..."
