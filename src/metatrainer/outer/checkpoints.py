"""tinker-cookbook's list of a run's checkpoints: one line after every step, the last one twice.

Knows where the list lies and how a crash may leave it; knows nothing about what a checkpoint holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "checkpoints.jsonl"


def exist(logs: Path) -> bool:
    """Whether a run has left a list in its folder of logs."""
    return (logs / NAME).exists()


def records(logs: Path, key: str) -> list[dict[str, Any]]:
    """The records that have a key, old to new."""
    path = logs / NAME
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if key in (record := json.loads(line))]


def last(logs: Path, key: str) -> dict[str, Any] | None:
    """The newest record that has a key."""
    found = records(logs, key)
    return found[-1] if found else None


def mend(logs: Path) -> None:
    """Cut off a record that a crash left half written: tinker-cookbook would stumble over it."""
    path = logs / NAME
    if not path.exists():
        return
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
