"""The figure of a run: reward in each step, its three terms apart, the held-out families.

Knows nothing about the ledger. Needs matplotlib, which is imported only to draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metatrainer.errors import MetatrainerError
from metatrainer.report.summary import WINDOW, Estimate, Series, Summary, estimate
from metatrainer.report.text import duration

_INK = "#22272e"
_FAINT = "#8a929c"
_RULE = "#e4e7eb"
_COLOURS = {
    "reward": "#1d4f91",
    "validation": "#5c6672",
    "quality": "#c2410c",
    "speed": "#4d7c0f",
}
_TITLES = {
    "validation": "Validation: is the job valid",
    "quality": "Quality: did the student learn",
    "speed": "Speed: time left unused",
}
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.titlelocation": "left",
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "metatrainer",
}
_SUFFIXES = (".png", ".svg", ".pdf")


def draw(summary: Summary, path: Path) -> list[Path]:
    """Draw the figure. A path without a suffix gives a PNG and an SVG. Returns what was written."""
    paths = [path] if path.suffix else [path.with_suffix(s) for s in (".png", ".svg")]
    if paths[0].suffix not in _SUFFIXES:
        allowed = ", ".join(_SUFFIXES)
        raise MetatrainerError(f"cannot draw a {path.suffix} file; allowed: {allowed}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MetatrainerError(
            "figures need matplotlib: pip install 'metatrainer[train]'"
        ) from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.2), layout="constrained")
        _compose(figure, summary)
        for target in paths:
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target, dpi=160, metadata=_metadata(target))
    return paths


def _compose(figure: Any, summary: Summary) -> None:
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, hspace=0.04, wspace=0.02)
    grid = figure.add_gridspec(2, 6, height_ratios=(1.35, 1))
    figure.suptitle(_title(summary), x=0.012, ha="left", fontsize=12.5, fontweight="bold")
    reward = figure.add_subplot(grid[0, :4] if summary.heldout else grid[0, :])
    _line_panel(reward, "reward", summary.reward, "Mean reward of a step, 95 % interval")
    _name_levels(reward, summary.reward)
    _dots(reward, summary.reward)
    if summary.heldout:
        _heldout(figure.add_subplot(grid[0, 4:]), summary)
    for i, (term, series) in enumerate(summary.terms.items()):
        axes = figure.add_subplot(grid[1, 2 * i : 2 * i + 2])
        _line_panel(axes, term, series, _TITLES[term])
        # Shares are shown on their whole scale; quality is small and has no upper end to show.
        axes.set_ylim(*((0, 1.04) if term != "quality" else ()))


def _title(summary: Summary) -> str:
    counts = f"{summary.steps} steps, {summary.episodes} episodes, {summary.jobs.submitted} jobs"
    return f"{summary.run}   {counts}, {duration(summary.seconds)}"


def _line_panel(axes: Any, name: str, series: Series, title: str) -> None:
    """A quantity over the steps, with the means of the first and the last steps written beside."""
    colour = _COLOURS[name]
    _frame(axes, title, colour)
    axes.yaxis.grid(True, color=_RULE, linewidth=0.8)
    axes.set_xlabel("step")
    if not series.steps:
        _empty(axes, "no step is done yet")
        return
    spreads = [estimate(values) for values in series.episodes]
    low, high = [s.low for s in spreads if s], [s.high for s in spreads if s]
    axes.fill_between(series.steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(series.steps, series.per_step, color=colour, linewidth=2, solid_capstyle="round")
    first, last = series.steps[0], series.steps[-1]
    axes.set_xticks([t for t in _ticks(first, last) if first <= t <= last])
    axes.margins(x=0.23, y=0.12)
    for steps, value, side, offset in _levels(series):
        ends = [steps[0], steps[-1]]
        axes.plot(ends, [value] * 2, color=colour, lw=5, alpha=0.35, solid_capstyle="butt")
        x = steps[0] if side == "right" else steps[-1]
        axes.annotate(
            f"{value:.2f}", (x, value), (offset, 0), textcoords="offset points",
            ha=side, va="center", color=colour, fontweight="bold",
        )  # fmt: skip


def _levels(series: Series) -> list[tuple[list[int], float, str, int]]:
    """The means of the first and the last steps, where the two do not share a step.

    Each with its steps, the side on which its text is aligned and the text's offset.
    """
    if len(series.steps) < 2 * WINDOW or series.first is None or series.last is None:
        return []
    return [
        (series.steps[:WINDOW], series.first, "right", -8),
        (series.steps[-WINDOW:], series.last, "left", 8),
    ]


def _name_levels(axes: Any, series: Series) -> None:
    """Say in one panel what the thick bars of all panels are."""
    for steps, value, side, offset in _levels(series):
        name, x = ("first", steps[0]) if side == "right" else ("last", steps[-1])
        axes.annotate(
            f"{name} {WINDOW}", (x, value), (offset, -11), textcoords="offset points",
            ha=side, va="center", color=_FAINT, fontsize=8,
        )  # fmt: skip
    axes.margins(x=0.1)


def _dots(axes: Any, series: Series) -> None:
    """Every episode as a dot, spread sideways a little so that equal rewards can be told."""
    if not series.steps:
        return
    points = [
        (step + 0.4 * ((i + 0.5) / len(values) - 0.5), value)
        for step, values in zip(series.steps, series.episodes, strict=True)
        for i, value in enumerate(values)
    ]
    xs, ys = zip(*points, strict=True)
    axes.scatter(xs, ys, s=8, color=_COLOURS["reward"], alpha=0.3, linewidths=0)
    axes.text(
        0.998, 0.02, "one dot: one episode", transform=axes.transAxes,
        ha="right", va="bottom", color=_FAINT, fontsize=8,
    )  # fmt: skip


def _frame(axes: Any, title: str, colour: str) -> None:
    axes.set_title(title, color=colour, fontweight="bold", fontsize=10)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def _ticks(first: int, last: int) -> list[int]:
    from matplotlib.ticker import MaxNLocator

    return [int(t) for t in MaxNLocator(nbins=8, integer=True).tick_values(first, last)]


def _heldout(axes: Any, summary: Summary) -> None:
    _frame(axes, "Held out, never trained on", _INK)
    axes.xaxis.grid(True, color=_RULE, linewidth=0.8)
    axes.set_xlabel("mean and 95 % interval")
    labels: list[str] = []
    for family, held in summary.heldout.items():
        for name, before, after in (
            ("reward", held.before, held.after),
            ("quality", held.quality_before, held.quality_after),
        ):
            _dumbbell(axes, -len(labels), before, after, _COLOURS[name])
            labels.append(f"{family}\n{name}")
    axes.set_yticks([-i for i in range(len(labels))], labels, color=_INK)
    axes.set_ylim(-len(labels) + 0.3, 0.7)
    axes.margins(x=0.12)


def _dumbbell(
    axes: Any, y: float, before: Estimate | None, after: Estimate | None, colour: str
) -> None:
    for value, dy, shade, name in (
        (before, 0.13, _FAINT, "before"),
        (after, -0.13, colour, "after"),
    ):
        if value is None:
            continue
        axes.plot([value.low, value.high], [y + dy] * 2, color=shade, linewidth=2.2, alpha=0.45)
        axes.plot([value.mean], [y + dy], "o", color=shade, markersize=6.5)
        axes.annotate(
            f"{name} {value.mean:.2f}", (value.mean, y + dy), (0, 7 if dy > 0 else -7),
            textcoords="offset points", ha="center", va="bottom" if dy > 0 else "top",
            color=shade, fontsize=8.5, fontweight="bold",
        )  # fmt: skip


def _empty(axes: Any, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_FAINT)


def _metadata(path: Path) -> dict[str, None] | None:
    """No date in an SVG: the same run gives the same file."""
    return {"Date": None} if path.suffix == ".svg" else None
