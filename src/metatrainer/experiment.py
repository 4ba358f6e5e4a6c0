"""Puts a run together: ledger, pool, validator, outer loop, and the report at its end.

Knows which parts there are; knows nothing about what they do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Protocol

from metatrainer import __version__
from metatrainer.agent.validator import Validator
from metatrainer.config import RunSettings
from metatrainer.ledger import Ledger
from metatrainer.outer import loop
from metatrainer.outer.episodes import episode_maker
from metatrainer.pool.kinds import make_pool
from metatrainer.pool.workers import WorkerPool
from metatrainer.progress import Progress
from metatrainer.report import figure, text
from metatrainer.report.summary import Summary, summarise
from metatrainer.rundir import RunDir

_NOTED = ("numpy", "peft", "ray", "tinker", "tinker-cookbook", "torch", "transformers", "verifiers")
"""Packages whose versions a run is entered with."""


async def run(settings: RunSettings, run_dir: RunDir, *, resume: bool, progress: Progress) -> None:
    """Begin a run, or go on with it, and bring it to its end."""
    with Ledger(run_dir.ledger) as ledger:
        hidden_seed = enter(ledger, run_dir.name, settings)
        async with staff(settings, hidden_seed, ledger) as (pool, validator):
            make_episode = episode_maker(settings, run_dir.path, ledger, pool, validator)
            await loop.train(
                settings,
                run_dir.path,
                ledger,
                pool,
                make_episode,
                resume=resume,
                progress=progress,
            )


def enter(ledger: Ledger, name: str, settings: RunSettings) -> int:
    """Enter a run in its ledger, once; returns its hidden seed."""
    ledger.create_run(name, settings.preset, settings.model_dump_json(), settings.seed, versions())
    row = ledger.run()
    assert row is not None  # it was entered by the line above
    return row.hidden_seed


def write_report(run_dir: RunDir) -> Summary:
    """Write report.json, report.md, figure.png and .svg and csv/ into a run's folder."""
    folder = run_dir.path
    with Ledger(run_dir.ledger, readonly=True) as ledger:
        summary = summarise(ledger)
        ledger.export_csv(folder / "csv")
    figure.draw(summary, folder / "figure")
    (folder / "report.json").write_text(json.dumps(summary.as_json(), indent=2) + "\n")
    (folder / "report.md").write_text(text.markdown(summary, "figure.png"))
    return summary


def versions() -> dict[str, str]:
    """Versions of metatrainer and of the packages that its results rest on, where installed."""
    found = {"metatrainer": __version__}
    for name in _NOTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class _Part(Protocol):
    async def start(self) -> None: ...
    async def close(self) -> None: ...


@asynccontextmanager
async def staff(
    settings: RunSettings, hidden_seed: int, ledger: Ledger, sandboxes: int = 2
) -> AsyncIterator[tuple[WorkerPool, Validator]]:
    """What episodes need, started: the pool that runs their jobs, the validator before it.

    ledger: gets what the pool rents. sandboxes: of the validator.
    """
    pool = make_pool(settings, hidden_seed, ledger)
    validator = Validator(sandboxes, settings.unsafe_without_sandbox)
    async with running(pool), running(validator):
        yield pool, validator


@asynccontextmanager
async def running(part: _Part) -> AsyncIterator[None]:
    """A part of a run, started, and closed however the run ends."""
    await part.start()
    try:
        yield
    finally:
        await part.close()
