"""Options of the command line that several commands take.

Knows nothing about any command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, as in outer.steps=4."),
]
Config = Annotated[
    Path | None,
    typer.Option(help="Settings that apply.", show_default="the nano preset's"),
]
