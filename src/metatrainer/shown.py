"""Text that agents, students and jobs wrote, made safe to look at: the one way to show it.

Control characters, terminal escapes and marks that reorder text become visible codes; long lines
and long texts are cut, and say so. Escaping for HTML is the template's, quoting is the caller's.
"""

from __future__ import annotations

import unicodedata

LINE_CHARS = 2_000
"""Longer lines are cut."""
_KEPT = "\n\t"
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp")
"""Unicode categories whose characters have no look of their own, bidi marks among them."""


def visible(text: str, limit: int) -> str:
    """At most about `limit` characters of a text, none of which does anything but show."""
    cut = text[:limit]
    lines = [_line(line) for line in cut.split("\n")]
    rest = len(text) - len(cut)
    return "\n".join(lines) + (f"\n… {rest} more characters" if rest else "")


def one_line(text: str, limit: int) -> str:
    """The same, for a place that has room for one line of at most `limit` characters."""
    shown = " ".join(_line(text).split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _line(line: str) -> str:
    shown = line[:LINE_CHARS]
    rest = len(line) - len(shown)
    if not shown.isprintable():
        shown = "".join(_character(c) for c in shown)
    return shown + (f" … {rest} more characters" if rest else "")


def _character(c: str) -> str:
    if c in _KEPT or unicodedata.category(c) not in _HIDDEN:
        return c
    return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
