"""The families of tasks, by name: those that ship, one module each, and those of other packages.

An installed package adds families through the entry point group `metatrainer.families`, whose
names are the families' own.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from metatrainer.errors import ConfigError
from metatrainer.families import calendar, inventory, ledger, persona, routes, triage
from metatrainer.families.base import Family, Item, Tool

GROUP = "metatrainer.families"
_SHIPPED = {f.FAMILY.name: f.FAMILY for f in (persona, inventory, ledger, routes, calendar, triage)}
NAMES = tuple(_SHIPPED)
"""Those that ship: the nano students are pretrained on them."""


def known() -> tuple[str, ...]:
    """Names of all families that can be had here: shipped ones first.

    Raises ConfigError if an installed package takes a name that is another family's.
    """
    return (*NAMES, *sorted(_installed()))


def get(name: str) -> Family:
    """The family of that name.

    Raises ConfigError that names the nearest one, or says what is wrong with the package that
    should bring it.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]
    if name not in known():
        from metatrainer.config import nearest

        raise ConfigError(f"unknown family {name!r}; {nearest(name, list(known()))}")
    return _load(name)


def forget() -> None:
    """Look anew, at the next call, for what other packages bring."""
    _installed.cache_clear()


@cache
def _load(name: str) -> Family:
    entry = _installed()[name]
    try:
        found = entry.load()
    except Exception as error:  # whatever somebody else's package raises
        raise ConfigError(
            f"family {name!r} cannot be loaded from {entry.value}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Family):
        raise ConfigError(f"{entry.value} is a {type(found).__name__}, not a family")
    if found.name != name:
        raise ConfigError(
            f"{entry.value} calls itself {found.name!r}, its entry point {name!r}; use one name"
        )
    return found


@cache
def _installed() -> dict[str, EntryPoint]:
    """Entry points of other packages, by the family's name."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = entries.setdefault(entry.name, entry)
        if entry.name in _SHIPPED or other.value != entry.value:
            owner = "metatrainer itself" if entry.name in _SHIPPED else other.value
            raise ConfigError(
                f"two families are called {entry.name!r}: of {entry.value} and of {owner}; "
                "rename one, or uninstall its package"
            )
    return entries


__all__ = ["GROUP", "NAMES", "Family", "Item", "Tool", "forget", "get", "known"]
