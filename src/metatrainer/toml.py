"""Plain data as the text of a TOML file.

Knows the format; knows nothing about what is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(data: Mapping[str, Any]) -> str:
    """TOML that tomllib reads back as the same. None has no form in TOML: raises TypeError."""
    return "\n".join(_table(data, ())).strip("\n") + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """A table's own values first, then the tables below it, since a header ends the table."""
    below = {key: value for key, value in data.items() if _is_table(value) or _is_array(value)}
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if k not in below]
    for key, value in below.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        if _is_array(value):
            for each in value:
                lines += ["", f"[[{name}]]", *_table(each, inner)]
        else:
            body = _table(value, inner)
            # A table of tables alone needs no header; an empty one is there by its header.
            header = ["", f"[{name}]"] if not body or body[0] else []
            lines += header + body
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_array(value: Any) -> bool:
    """A list of tables, which gets headers of its own."""
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _text(value)
        case datetime() | date() | time():
            return value.isoformat()
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"TOML has no form for {value!r}")


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for the delete character, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
