"""The commands `metatrainer pool ...`: rented pods, seen and ended by hand.

Reads arguments and prints; the work is elsewhere and is imported when a command runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from metatrainer.cli.options import Config, Json, Set
from metatrainer.errors import ConfigError

if TYPE_CHECKING:
    from metatrainer.config import RunSettings
    from metatrainer.pool.rented import Rented
    from metatrainer.rundir import RunDir

pool = typer.Typer(help="Pods that are rented for runs.", no_args_is_help=True)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, do nothing.")]
Run = Annotated[str, typer.Argument(help="A run's folder, or its name in runs/.")]


class _Row(Protocol):
    def as_json(self) -> dict[str, Any]: ...


@pool.command()
def up(
    config: Annotated[
        str, typer.Argument(help="A TOML file of settings, for a new run; or a run.")
    ],
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the new run.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Rent a run's pods and wait until all are up. They wait for `train --resume`.

    \b
    metatrainer pool up configs/seed.toml --dry-run
    metatrainer pool up configs/seed.toml --run-dir runs/seed-1

    Pods that no run takes up end themselves after runpod.deadman_seconds.
    """
    from metatrainer import rundir
    from metatrainer.config import check_names, load_config

    new = config.endswith(".toml")
    resolved = load_config(Path(config), settings) if new else rundir.find(config).settings
    if resolved.pool.kind != "runpod":
        raise ConfigError(f'pool.kind is "{resolved.pool.kind}"; only "runpod" has pods to rent')
    if dry_run:
        _print_bodies(resolved, as_json)
        return
    check_names(resolved)
    run = rundir.create(resolved, run_dir) if new else rundir.find(config)
    print(f"run {run.path}", file=sys.stderr)
    rows = asyncio.run(_up(run, resolved))
    _print(rows, as_json)
    print(f"go on with: metatrainer train --resume {run.path}", file=sys.stderr)


@pool.command()
def status(
    run: Annotated[str | None, typer.Argument(help="Only this run's.")] = None,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Show the pods that are there, and whether anybody still uses them.

    \b
    metatrainer pool status
    metatrainer pool status seed-20250101-1 --json
    """
    _print(asyncio.run(_look(config, run)), as_json)


@pool.command()
def down(run: Run, dry_run: DryRun = False, as_json: Json = False) -> None:
    """End all pods of a run that no controller is at.

    \b
    metatrainer pool down seed-20250101-1
    """
    rows = asyncio.run(_look(None, run))
    if any(row.state == "live" for row in rows):
        raise ConfigError(f"{run} is going on: stop it first, it ends its pods itself")
    _end(_url(None, run), rows, dry_run, as_json)


@pool.command()
def sweep(
    everything: Annotated[
        bool,
        typer.Option("--all", help="Pods of runs that are not in runs/ here, too."),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """End the pods of all runs in runs/ that no controller is at.

    \b
    metatrainer pool sweep --dry-run
    metatrainer pool sweep
    """
    wanted = ("dead", "unknown") if everything else ("dead",)
    rows = [row for row in asyncio.run(_look(config, None)) if row.state in wanted]
    _end(_url(config, None), rows, dry_run, as_json)


@pool.command()
def cost(run: Run, as_json: Json = False) -> None:
    """Compare what a run has counted for its pods with the provider's bill.

    \b
    metatrainer pool cost seed-20250101-1
    """
    from metatrainer import rundir
    from metatrainer.pool import rented

    found = rundir.find(run)

    async def ask() -> list[rented.Cost]:
        async with rented.account(found.settings.runpod.url) as api:
            return await rented.costs(api, found)

    rows = asyncio.run(ask())
    _print(rows, as_json)
    if not as_json:
        counted, billed = (sum(getattr(r, k) or 0.0 for r in rows) for k in ("counted", "billed"))
        print(f"counted {counted:.2f}, billed {billed:.2f} USD; bills come an hour late")


async def _up(run: RunDir, settings: RunSettings) -> list[Rented]:
    from metatrainer.experiment import enter
    from metatrainer.ledger import Ledger
    from metatrainer.pool import rented
    from metatrainer.pool.kinds import make_pool
    from metatrainer.pool.runpod import RunpodPool

    with Ledger(run.ledger) as ledger:
        made = make_pool(settings, enter(ledger, run.name, settings), ledger)
        assert isinstance(made, RunpodPool)
        await made.start(all_pods=True)
        await made.close(keep_pods=True)
    async with rented.account(settings.runpod.url) as api:
        return [row for row in await rented.rented(api, [run]) if row.run == str(run.path)]


async def _look(config: Path | None, run: str | None) -> list[Rented]:
    from metatrainer import rundir
    from metatrainer.pool import rented

    only = rundir.find(run) if run else None
    async with rented.account(_url(config, run)) as api:
        rows = await rented.rented(api, [only] if only else [])
    return [row for row in rows if only is None or row.run == str(only.path)]


def _url(config: Path | None, run: str | None) -> str:
    from metatrainer import rundir
    from metatrainer.config import load_config

    settings = rundir.find(run).settings if run else load_config(config)
    return settings.runpod.url


def _end(url: str, rows: Sequence[Rented], dry_run: bool, as_json: bool) -> None:
    from metatrainer.pool import rented

    async def ask() -> None:
        async with rented.account(url) as api:
            await rented.end(api, rows)

    if not dry_run:
        asyncio.run(ask())
    _print(rows, as_json)
    if not as_json:
        print(f"{len(rows)} {'would be' if dry_run else 'were'} ended")


def _print_bodies(settings: RunSettings, as_json: bool) -> None:
    from metatrainer.pool.pods import pod_body

    body = pod_body(settings, "<run>-slot-00", settings.runpod.gpus[0], "<the run's own key>")
    workers = settings.pool.workers or 0
    if as_json:
        print(json.dumps({"pods": workers, "gpus": settings.runpod.gpus, "body": body}, indent=2))
        return
    print(f"{workers} pods, of the cheapest in stock of: {', '.join(settings.runpod.gpus)}")
    print(json.dumps(body, indent=2))


def _print(rows: Sequence[_Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    if not rows:
        print("no pods")
        return
    table = Table(*rows[0].as_json())
    for row in rows:
        table.add_row(*(_cell(value) for value in row.as_json().values()))
    Console().print(table)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
