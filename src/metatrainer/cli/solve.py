"""`metatrainer solve`: a trained student for a task of one's own, within a budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metatrainer.cli.options import Config, Set
from metatrainer.cli.resumable import resumable
from metatrainer.errors import ConfigError

if TYPE_CHECKING:
    from metatrainer.config import RunSettings
    from metatrainer.play import Agent
    from metatrainer.rundir import RunDir
    from metatrainer.solve import Order, Solved

REFERENCE = "reference"


def solve(
    family: Annotated[
        str | None,
        typer.Argument(
            metavar="FAMILY_OR_FOLDER",
            help="What to teach: a family, or the folder of a package with one of your own.",
            show_default=False,
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Who writes the jobs: any agent of `metatrainer eval`.", show_default=REFERENCE
        ),
    ] = None,
    episodes: Annotated[int | None, typer.Option(help="Jobs to try, at most.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="After so long no further job begins.")
    ] = None,
    max_usd: Annotated[
        float | None, typer.Option(help="What all may cost, at the prices of the settings.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the run.", show_default="runs/solve-<family>-<date>-<n>"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Go on with this run; --episodes and --seconds replace its own."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Have an agent try jobs until the budget ends; hand over the best student that came of them.

    \b
    metatrainer solve persona --episodes 8
    metatrainer solve ./cover-family --agent nano-20250101-1 --seconds 600
    metatrainer solve --resume solve-persona-20250101-1 --episodes 16

    The run's solution/ gets the student's adapter (PEFT), the job that trained it, a card and a
    report. The best is chosen by the run's hidden items and reported on others, with the best
    untrained student beside it.
    """
    import tempfile

    from metatrainer import rundir
    from metatrainer.sandbox.unwalled import has_walls

    with tempfile.TemporaryDirectory(prefix="metatrainer-") as site:
        if resume is None:
            order, resolved = _begin(
                (family, agent, episodes, seconds, max_usd), Path(site), config, settings
            )
        elif family or agent or max_usd is not None or run_dir or config or settings:
            raise ConfigError(
                "--resume takes the run's own settings, but for --episodes and --seconds; "
                "what it may cost is money.max_usd in its config.toml"
            )
        else:
            order, resolved = _go_on(rundir.find(resume), episodes, seconds, Path(site))
        has_walls(resolved.unsafe_without_sandbox)

        from metatrainer.play import find_agent
        from metatrainer.solve import write_order

        found = find_agent(order.agent, resolved)
        if resume is None:
            run = rundir.create(resolved, run_dir, stem=f"solve-{order.family}")
        else:
            run = rundir.find(resume)
        write_order(run, order)
        _print(_solve(order, resolved, run, found), as_json)


def _begin(
    given: tuple[str | None, str | None, int | None, float | None, float | None],
    site: Path,
    config: Path | None,
    overrides: list[str],
) -> tuple[Order, RunSettings]:
    """What is asked for, and the settings it is done with."""
    from metatrainer.config import check_names, load_config
    from metatrainer.solve import NOTHING, Order, check, find_family

    name, agent, episodes, seconds, max_usd = given
    if name is None:
        raise ConfigError("name a family or a folder, or --resume a run; see: families list")
    if max_usd is not None and max_usd <= 0:
        raise ConfigError(NOTHING)
    if max_usd is not None:
        overrides = [*overrides, f"money.max_usd={max_usd}"]
    resolved = load_config(config, overrides)
    family, folder = find_family(name, site)
    resolved = resolved.model_copy(update={"families": (family,), "heldout": ()})
    order = Order(
        family=family, folder=folder, agent=agent or REFERENCE, episodes=episodes, seconds=seconds
    )
    check(order, resolved)
    check_names(resolved)
    return order, resolved


def _go_on(
    run: RunDir, episodes: int | None, seconds: float | None, site: Path
) -> tuple[Order, RunSettings]:
    from metatrainer.config import check_names
    from metatrainer.solve import check, find_family, read_order

    order = read_order(run)
    replaced = {"episodes": episodes, "seconds": seconds}
    order = order.model_copy(update={k: v for k, v in replaced.items() if v is not None})
    find_family(str(order.folder or order.family), site)
    check(order, run.settings)
    check_names(run.settings)
    return order, run.settings


def _solve(order: Order, settings: RunSettings, run: RunDir, agent: Agent) -> Solved:
    from rich.console import Console

    from metatrainer.console import share_shown
    from metatrainer.solve import solve as bring_about

    console = Console(stderr=True)
    console.print(f"run {run.path}", highlight=False)
    with resumable(f"solve --resume {run.path}"), share_shown(console) as at:
        return bring_about(order, settings, run, agent, at)


def _print(done: Solved, as_json: bool) -> None:
    if as_json:
        print(json.dumps(done.as_json(), indent=2))
        return
    for when, score in (("before", done.before), ("after", done.after)):
        print(
            f"{when:7} {score.student} {score.mean:.3f}, 95 % {score.low:.3f} to {score.high:.3f},"
            f" of {score.n} fresh hidden items"
        )
    print(f"gain    {done.gain:+.3f}, 95 % {done.low:+.3f} to {done.high:+.3f}")
    print(f"the best of {done.jobs} students, with its job, card and report: {done.folder}")
    if done.low <= 0:
        print("no improvement is shown: that interval includes 0", file=sys.stderr)
