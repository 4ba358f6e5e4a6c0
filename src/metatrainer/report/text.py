"""A run's summary as text: tables for a terminal and a Markdown page.

Knows nothing about the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from metatrainer.report.learned import SETTINGS, Cell
from metatrainer.report.summary import WINDOW, Estimate, Series, Summary

_BARS = "▁▂▃▄▅▆▇█"
_SHAPE = "each step"
_Rows = list[list[str]]


def render(summary: Summary) -> Group:
    """The report as rich tables."""
    parts: list[Table | Text] = [Text(summary.run, style="bold"), Text(headline(summary))]
    for title, header, rows in _tables(summary):
        table = Table(box=SIMPLE_HEAD, header_style="", pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if name in ("", _SHAPE) or i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        parts += [Text(f"\n{title}", style="bold"), table]
    return Group(*parts)


def markdown(summary: Summary, figure: str | None = None) -> str:
    """The report as a Markdown page. figure: address of the picture to show."""
    lines = [f"# {summary.run}", "", headline(summary), ""]
    if figure:
        lines += [f"![Reward, its terms and the held-out families]({figure})", ""]
    for title, header, rows in _tables(summary):
        lines += [f"## {title}", "", _line(header), _line(["---"] * len(header))]
        lines += [*(_line(row) for row in rows), ""]
    return "\n".join(lines)


def headline(summary: Summary) -> str:
    """How far the run came and what it took, in one line."""
    planned = summary.steps_planned
    steps = f"{summary.steps} of {planned}" if planned not in (None, summary.steps) else planned
    jobs = summary.jobs
    lost = f" ({summary.errored} without a reward)" if summary.errored else ""
    return (
        f"{steps or summary.steps} steps, {summary.episodes} episodes{lost}, {jobs.submitted} jobs"
        f" ({jobs.succeeded} succeeded, {jobs.crashed} crashed), {duration(summary.seconds)}"
        + (f", slots {jobs.utilisation:.0%} full" if jobs.utilisation is not None else "")
    )


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def sparkline(values: list[float]) -> str:
    """The shape of a series in one line of characters."""
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in values)


def print_report(summary: Summary, console: Console) -> None:
    """Show the report on a terminal."""
    console.print(render(summary))


def _tables(summary: Summary) -> Iterator[tuple[str, list[str], _Rows]]:
    series = {"reward": summary.reward, **summary.terms}
    rows = [_series_row(name, s) for name, s in series.items()]
    yield "Training", ["", "first 3 steps", "last 3 steps", "change", _SHAPE], rows
    if cells := summary.learned.training():
        header = ["", "first 3 steps", "last 3 steps", _SHAPE]
        yield "What the agent writes", header, list(_habits(cells))
        by_family = [_by_family(f, summary.learned.training(f)) for f in summary.learned.families]
        yield "By family (first 3 steps it had > last 3)", ["family", *_RUNGS.values()], by_family
    if summary.heldout:
        rows = []
        for family, held in summary.heldout.items():
            rows.append(_before_after(family, held.before, held.after))
            rows.append(_before_after(f"{family} quality", held.quality_before, held.quality_after))
        yield "Held out (mean reward, 95 % interval)", ["family", "before", "after", "n"], rows
    if summary.students_chosen:
        chosen = [[name, str(n)] for name, n in summary.students_chosen.items()]
        yield "Students chosen", ["student", "jobs"], chosen
    if summary.spending.total:
        yield "Cost (US dollars)", ["", "total", "per job", "per step"], _costs(summary)
    if summary.baselines:
        yield "Untrained students (hidden items)", *_baseline_rows(summary)


def _series_row(name: str, series: Series) -> list[str]:
    first, last = series.first, series.last
    change = "" if first is None or last is None else f"{last - first:+.3f}"
    return [name, _number(first), _number(last), change, sparkline(series.per_step)]


_RUNGS = {"valid": "valid", "quality": "quality", "best_chosen": "best student"}
"""What is shown of each family, by its name in a cell."""
_HABITS = {
    **_RUNGS,
    "first_try": "valid at once",
    "attempts": "submissions",
    "tasks": "practice tasks",
    "rewards": "reward functions",
    "exact": "exact reward",
    "calls": "reward sees calls",
    "novelty": "new submissions",
    "entropy": "entropy (nats)",
    "dead_groups": "dead groups",
}


def _habits(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """How jobs were written in the course of the training; what no step has is left out."""
    series = {title: _known(cells, name) for name, title in _HABITS.items()}
    for name in SETTINGS:
        values = [cell.settings[name] for cell in cells if name in cell.settings]
        series[name.replace("_", " ")] = values
    for title, values in series.items():
        if values:
            yield [title, *(f"{end:.3g}" for end in _ends(values)), sparkline(values)]


def _by_family(family: str, cells: Sequence[Cell]) -> list[str]:
    ends = [_ends(values) if (values := _known(cells, name)) else None for name in _RUNGS]
    return [family, *(f"{end[0]:.2f} > {end[1]:.2f}" if end else "-" for end in ends)]


def _known(cells: Sequence[Cell], name: str) -> list[float]:
    """A quantity in the steps that have it."""
    return [value for cell in cells if (value := getattr(cell, name)) is not None]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    first, last = values[:WINDOW], values[-WINDOW:]
    return sum(first) / len(first), sum(last) / len(last)


def _before_after(name: str, before: Estimate | None, after: Estimate | None) -> list[str]:
    newest = after or before
    return [name, _interval(before), _interval(after), str(newest.n) if newest else ""]


def _baseline_rows(summary: Summary) -> tuple[list[str], _Rows]:
    students = sorted({row.student for row in summary.baselines})
    families = sorted({row.family for row in summary.baselines})
    scores = {(row.family, row.student): row.mean for row in summary.baselines}
    rows = [[family, *(_number(scores.get((family, s))) for s in students)] for family in families]
    return ["family", *students], rows


def _costs(summary: Summary) -> _Rows:
    spent = summary.spending
    steps = spent.per_step.values()
    return [
        ["jobs", _usd(spent.jobs), _usd(spent.per_job), ""],
        ["of them lost attempts", _usd(spent.lost), "", ""],
        ["untrained students", _usd(spent.baselines), "", ""],
        ["the agent's tokens", _usd(spent.tokens), "", ""],
        ["all", _usd(spent.total), "", _usd(sum(steps) / len(steps)) if steps else ""],
    ]


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(value: Estimate | None) -> str:
    return "-" if value is None else str(value)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.strip() for cell in cells)} |"
