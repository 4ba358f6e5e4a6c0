"""A program under a keeper: one start, one end, nothing left. See inner/keeper.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from metatrainer.inner import keeper

SAID_BYTES = 1_500
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "USER", "LOGNAME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TORCH", "VLLM_", "XDG_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


class Kept:
    """A running program. Its output goes to a log."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], folder: Path, log: Path
    ):
        """environment: added to what is passed on of ours; no key or token is."""
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", keeper.__file__, str(os.getpid()), *command],
                env={**_passed(), **environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """Exit status (128 + n for signal n), None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it with all that it started, and wait until they are gone."""
        self._process.terminate()
        self._process.wait()


def said(log: Path) -> str:
    """The end of what a program printed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - SAID_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _passed() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if (key in _PASSED or key.startswith(_PASSED_PREFIXES))
        and not any(word in key.upper() for word in _SECRET)
    }
