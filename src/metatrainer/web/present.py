"""How values look on a page: numbers and times as text, charts as data for the browser.

Pure functions. Knows nothing about HTTP or ledgers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metatrainer.report.summary import Estimate
from metatrainer.report.text import duration
from metatrainer.shown import visible
from metatrainer.web.views import Head, JobView, PoolView, RunView

TITLES = {
    "reward": "Reward",
    "validation": "Validation: is the job valid",
    "quality": "Quality: did the student learn",
    "speed": "Speed: time left unused",
}
NONE = "\N{EN DASH}"
"""What stands for no value."""
SHADES = 10
"""Steps of the heat map's scale."""
_TEXT = 20_000
"""Characters of one text on a page; what is cut is said."""


@dataclass(frozen=True)
class Chart:
    """A line chart: x, named series of values (None: no value), and where a click leads."""

    title: str
    x: list[float]
    series: list[dict[str, Any]]
    """Each: name, values, and, where there is an interval, low and high."""
    href: str | None = None
    """Address of a point; {x} stands for its x."""
    unit: str = "step"

    @property
    def data(self) -> str:
        """For the browser's script."""
        shown = {"x": self.x, "series": self.series, "href": self.href, "unit": self.unit}
        return json.dumps(shown, allow_nan=False)

    @property
    def rows(self) -> list[list[Any]]:
        """The same as a table: x, then each series' value."""
        return [[x, *(s["values"][i] for s in self.series)] for i, x in enumerate(self.x)]


def run_charts(view: RunView) -> list[Chart]:
    """Reward and its terms, the reward of each family, the students chosen."""
    href = f"/run/{view.head.name}/train/{{x}}"
    steps = [float(s) for s in view.steps]
    charts = [
        Chart(TITLES[term], steps, [_band(term, points)], href)
        for term, points in view.curves.items()
    ]
    families = [
        _line(name, [_mean(points.get(step)) for step in view.steps])
        for name, points in view.families.items()
    ]
    charts.append(Chart("Reward by family", steps, families, href))
    chosen = [_line(name, [float(n) for n in counts]) for name, counts in view.chosen.items()]
    charts.append(Chart("Students chosen (jobs)", steps, chosen, href))
    return [chart for chart in charts if chart.series]


def comparison(term: str, runs: Sequence[tuple[str, RunView]]) -> Chart:
    """One term of several runs."""
    steps = sorted({step for _, view in runs for step in view.steps})
    series = []
    for name, view in runs:
        known = dict(zip(view.steps, view.curves[term])) if view.steps else {}
        series.append(_line(name, [_mean(known.get(step)) for step in steps]))
    return Chart(TITLES[term], [float(s) for s in steps], series)


def job_charts(view: JobView) -> list[Chart]:
    """The training curve of a job: its reward, then whatever else its steps say."""
    curve = view.result.get("curve") or []
    x = [float(row["step"]) for row in curve]
    names = [n for n in (curve[0] if curve else {}) if n not in ("step", "reward", "seconds")]
    return [
        Chart(name.replace("_", " "), x, [_line(name, [_finite(row.get(name)) for row in curve])])
        for name in ("reward", *names)
        if curve
    ]


def standings(runs: Sequence[tuple[str, RunView]]) -> list[dict[str, Any]]:
    """Runs by the held-out reward of their trained agents, else by their last training steps."""
    rows = []
    for name, view in runs:
        held = [points["after"] for points in view.heldout.values() if "after" in points]
        last = [point.mean for point in view.curves.get("reward", [])[-3:]]
        quality = [point.mean for point in view.curves.get("quality", [])[-3:]]
        rows.append(
            {
                "run": name,
                "head": view.head,
                "heldout": held[0] if held else None,
                "before": next((p["before"] for p in view.heldout.values() if "before" in p), None),
                "last": sum(last) / len(last) if last else None,
                "quality": sum(quality) / len(quality) if quality else None,
            }
        )
    return sorted(rows, key=lambda r: (-(r["heldout"].mean if r["heldout"] else -2), r["run"]))


def lanes(view: PoolView) -> list[dict[str, Any]]:
    """The slots' jobs over time, for drawing: x and width in thousandths of the whole."""
    whole = max((s["ended"] for s in view.spans), default=0.0) or 1.0
    slots: dict[int, list[dict[str, Any]]] = {}
    for span in view.spans:
        width = max(1.0, 1000 * (span["ended"] - span["began"]) / whole)
        place = {"x": round(1000 * span["began"] / whole, 2), "width": round(width, 2)}
        slots.setdefault(span["slot"], []).append({**span, **place})
    return [{"slot": slot, "jobs": jobs} for slot, jobs in sorted(slots.items())]


def prometheus(heads: Sequence[Head]) -> str:
    """Gauges of every run."""
    lines = []
    gauges: tuple[tuple[str, str, Callable[[Head], float]], ...] = (
        ("metatrainer_steps", "Outer steps that are done.", lambda h: h.steps),
        ("metatrainer_steps_planned", "Outer steps of the whole run.", lambda h: h.steps_planned),
        ("metatrainer_episodes", "Episodes that have their reward.", lambda h: h.episodes),
        ("metatrainer_seconds", "Seconds that the run has taken.", lambda h: h.seconds),
        ("metatrainer_running", "1 while the run goes on.", lambda h: h.state == "running"),
    )
    for name, text, value in gauges:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{{run={json.dumps(h.name)}}} {float(value(h)):g}" for h in heads]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return NONE if value is None else f"{value:.{digits}f}"


def interval(point: Estimate | None) -> str:
    """A mean with its interval."""
    return NONE if point is None else str(point)


def shade(value: float | None) -> str:
    """Class of a heat map's cell: rewards from -0.25 to 1 in SHADES steps."""
    if value is None:
        return "open"
    place = round((value + 0.25) / 1.25 * (SHADES - 1))
    return f"h{min(SHADES - 1, max(0, place))}"


def clock(seconds: float | None) -> str:
    """A duration as a person says it."""
    return NONE if seconds is None else duration(seconds)


def pretty(value: Any) -> str:
    """JSON to read."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def words(value: Any) -> str:
    """Anything that an agent, a student or a job wrote, safe to look at."""
    return visible(value if isinstance(value, str) else pretty(value), _TEXT)


FILTERS: dict[str, Callable[..., str]] = {
    "number": number,
    "interval": interval,
    "shade": shade,
    "clock": clock,
    "words": words,
}


def _line(name: str, values: list[float | None]) -> dict[str, Any]:
    return {"name": name, "values": values}


def _band(name: str, points: Sequence[Estimate]) -> dict[str, Any]:
    return {
        "name": name,
        "values": [p.mean for p in points],
        "low": [p.low for p in points],
        "high": [p.high for p in points],
    }


def _mean(point: Estimate | None) -> float | None:
    return None if point is None else point.mean


def _finite(value: Any) -> float | None:
    good = isinstance(value, int | float) and value == value and abs(value) != float("inf")
    return float(value) if good else None
