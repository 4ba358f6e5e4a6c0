"""Submitted code without a sandbox, where none can be had and the user has asked for it.

Limits of single processes and the filter of system calls remain; files, processes and memory of
this user are open to it. Knows nothing about sandboxes that work.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from metatrainer.errors import SandboxUnavailable
from metatrainer.sandbox import bwrap

WARNING = """
!!! NO SANDBOX: {reason}
!!! unsafe_without_sandbox is set, so code that a model writes runs as this user: it can read keys
!!! and hidden items, change files and other jobs, and set its own score. Trust no result.
"""


@functools.cache
def has_walls(unsafe: bool) -> bool:
    """Whether a sandbox works here. Where none does: a warning, once, if `unsafe` accepts that.

    Raises SandboxUnavailable where it does not.
    """
    try:
        bwrap.require()
    except SandboxUnavailable as error:
        if not unsafe:
            raise
        print(WARNING.format(reason=error), file=sys.stderr, flush=True)
        return False
    return True


def command(folder: Path, data: dict[str, bytes]) -> list[str]:
    """The command that runs the guest from a folder of its own.

    data: the guest's files by name; written into the folder.
    """
    for name, content in data.items():
        (folder / name).write_bytes(content)
    shown = bwrap.runtime()
    back = {tree.target: tree.source for tree in shown.trees}
    python, *sites = (bwrap.outside(path, back) for path in (shown.python, *shown.sites))
    given = {"HOME": folder, "JOB": folder / "job", "OMP_NUM_THREADS": 1, "PYTHONHASHSEED": 0}
    environment = [f"{name}={value}" for name, value in given.items()]
    start = ["env", "-i", *environment, python, "-s", "-S", "-B", str(folder / "guest.py")]
    return [*bwrap.limits(), *start, "--unwalled", *sites]
