"""The families of tasks, by name. Each module holds one."""

from __future__ import annotations

from metatrainer.errors import ConfigError
from metatrainer.families import inventory, persona, triage
from metatrainer.families.base import Family, Item, Tool

_ALL = {f.FAMILY.name: f.FAMILY for f in (persona, inventory, triage)}
NAMES = tuple(_ALL)


def get(name: str) -> Family:
    """The family of that name. Raises ConfigError that names the nearest one."""
    if name not in _ALL:
        from metatrainer.config import nearest

        raise ConfigError(f"unknown family {name!r}; {nearest(name, list(NAMES))}")
    return _ALL[name]


__all__ = ["NAMES", "Family", "Item", "Tool", "get"]
