"""The command `metatrainer status`: how far a run is, from a second shell."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatrainer.cli.options import Json
from metatrainer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from metatrainer.report.summary import Estimate
    from metatrainer.web.views import Head

TERMS = ("reward", "validation", "quality", "speed")


@dataclass(frozen=True)
class Status:
    """What is said of a run."""

    head: Head
    last: dict[str, Estimate]
    """Reward and its terms in the last step that is done; empty before the first."""
    outcomes: dict[str, int]
    """Episodes by how their jobs ended."""
    usd: float
    """Spent so far on jobs and, where it is priced, on the agent."""
    alerts: list[str]
    """Of the last step that has any."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def status(
    run: Annotated[
        str | None,
        typer.Argument(help="A run's folder, or its name in runs/.", show_default="the newest"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how far a run is. Reads its ledger only, so it may be asked at any time, from anywhere.

    \b
    metatrainer status
    metatrainer status nano-20250101-1 --json
    watch -n 10 metatrainer status
    """
    found = status_of(_folder(run))
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    _print(found)


def status_of(folder: Path) -> Status:
    """The status of a run. Raises ConfigError where it has not begun."""
    from metatrainer.config import MoneySettings
    from metatrainer.ledger import Ledger
    from metatrainer.money import spending
    from metatrainer.web import views

    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        view = views.run_view(ledger)
        prices = MoneySettings.model_validate(view.config.get("money", {}))
        usd = spending(ledger, prices).total
    latest = max((alert.step for alert in view.alerts), default=None)
    return Status(
        head=view.head,
        last={term: points[-1] for term, points in view.curves.items() if points},
        outcomes=view.outcomes,
        usd=usd,
        alerts=[alert.text for alert in view.alerts if alert.step == latest],
    )


def _folder(run: str | None) -> Path:
    from metatrainer import rundir
    from metatrainer.web.views import runs

    if run is not None:
        return rundir.find(run).path
    if not (there := runs(rundir.RUNS)):
        raise ConfigError(
            f"no runs in {rundir.RUNS}/; begin one: metatrainer train configs/nano.toml"
        )
    return there[0]


def _print(found: Status) -> None:
    from metatrainer.report.text import duration
    from metatrainer.shown import one_line

    head = found.head
    left = "" if head.left is None else f", about {duration(head.left)} left"
    print(
        f"{head.name}: {head.state}, step {head.steps} of {head.steps_planned}, "
        f"{head.episodes} episodes in {duration(head.seconds)}{left}"
    )
    for term in TERMS if found.last else ():
        print(f"  {term:10} {found.last[term]}")
    jobs = ", ".join(f"{word} {n}" for word, n in sorted(found.outcomes.items()))
    print(f"  episodes   {one_line(jobs, 200) or 'none ended yet'}")
    if found.usd:
        print(f"  USD        {found.usd:.2f}")
    for alert in found.alerts:
        print(f"  alert      {one_line(alert, 200)}")
