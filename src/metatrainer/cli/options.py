"""What several commands of the command line share: options, and the folder that --keep names.

Knows nothing about any command.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from metatrainer.config import RunSettings

Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, as in outer.steps=4."),
]
Config = Annotated[
    Path | None,
    typer.Option(help="Settings that apply.", show_default="the nano preset's"),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def folder_of(settings: RunSettings, keep: Path | None) -> Iterator[Path]:
    """Where episodes outside of a run lie: a new run's folder that stays, or one that is deleted.

    Raises ConfigError where there is something already.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="metatrainer-") as folder:
            yield Path(folder)
        return
    from metatrainer import rundir

    yield rundir.create(settings, keep).path
