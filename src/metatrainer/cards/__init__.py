"""Texts that go with a model that is handed over: its card, and an example of its use.

One template each, filled with plain values. Knows nothing about where the values come from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

_HERE = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled. Raises jinja2.UndefinedError where a value is missing."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
