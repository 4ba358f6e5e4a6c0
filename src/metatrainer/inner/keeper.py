"""Runs one command and leaves nothing of it behind, however the command or its owner ends.

Started as `python -m metatrainer.inner.keeper OWNER_PID COMMAND...`; ends with the command's exit
status (128 + n for signal n). Processes that leave their group or their parent come to the keeper,
as it is their subreaper. Standard library only; knows nothing about what it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 10.0
"""From asking a command's processes to end until they are killed."""
STRAY_SECONDS = 1.0
"""The same for what a command has left behind that ended by itself."""
POLL_SECONDS = 0.05
_PR_SET_CHILD_SUBREAPER = 36


def main(owner: int, command: list[str]) -> int:
    """Run the command until it ends, the owner is gone, or SIGTERM says so."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, frame: told.append(n))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    # The owner is polled: a signal at a parent's end comes at that of its thread already.
    while child.poll() is None and not told and os.getppid() == owner:
        time.sleep(POLL_SECONDS)
    sweep(GRACE_SECONDS if child.poll() is None else STRAY_SECONDS)
    status = child.wait()
    _reap()
    return status if status >= 0 else 128 - status


def sweep(grace: float) -> None:
    """End all descendants of this process: asked first, killed after `grace` seconds."""
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    while pids := descendants(os.getpid()):
        late = time.monotonic() > deadline
        for pid in pids if late else pids - asked:
            asked.add(pid)
            _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def descendants(root: int) -> set[int]:
    """Live processes below one, in any group or session."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _parent(path)) is not None:
            children.setdefault(parent, []).append(int(path.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _parent(process: Path) -> int | None:
    """Parent of a process that is alive; None for one that has ended."""
    try:
        # The name stands in brackets, and may hold some.
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    """Take note of the ends of those that came here; nobody else may do so."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
