"""Shows a run's events on a terminal as bars with rate and time left, elsewhere as plain lines.

Knows nothing about what emits the events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from metatrainer.progress import MeanTerms, Progress
from metatrainer.report.text import duration
from metatrainer.reward import Terms

_LINE_SECONDS = 2.0


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """Progress that is shown on a console as fits it, until the context ends."""
    if not console.is_terminal:
        yield Lines(console)
        return
    bars = Bars(console)
    with bars.rich:
        yield bars


@contextmanager
def share_shown(console: Console) -> Iterator[Callable[[float, str], None]]:
    """Shows a part of some work that is done, in [0, 1], what it was and the time left.

    Elsewhere than on a terminal a line every few seconds.
    """
    began = last = time.monotonic()

    def line(done: float, text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _LINE_SECONDS:
            last = now
            left = duration((now - began) * (1 - done) / done)
            console.print(f"{done:4.0%}  {text}, left {left}", markup=False, highlight=False)

    if not console.is_terminal:
        yield line
        return
    columns = (BarColumn(), TextColumn("{task.percentage:.0f} %"), TextColumn("left"))
    with RichProgress(
        *columns, TimeRemainingColumn(), TextColumn("{task.description}"), console=console
    ) as bars:
        bar = bars.add_task("", total=1.0)
        yield lambda done, text: bars.update(bar, completed=done, description=text)


class Lines:
    """One line for each step and each phase, with the time that is left."""

    def __init__(self, console: Console):
        self._console = console
        self._pace = _Pace()

    def run_started(self, steps: int, episodes: int) -> None:
        self._pace = _Pace(episodes)
        self._say(f"{steps} steps, {episodes} episodes to go")

    def phase(self, name: str, episodes: int = 0) -> None:
        self._say(f"{name}: {episodes} episodes" if episodes else name)

    def episode_finished(self, id: str, terms: Terms) -> None:
        self._pace.count(terms)

    def step_finished(self, step: int, mean: float, terms: MeanTerms, seconds: float) -> None:
        self._say(f"{step_line(step, mean, terms, seconds)}  {self._pace.left()}")

    def message(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bars:
    """A bar for the run's steps and one for its episodes; steps leave a line above them."""

    def __init__(self, console: Console):
        self._console = console
        self._pace = _Pace()
        self.rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # Episodes of a step end together: the speed is taken over several of them.
            speed_estimate_period=300,
        )
        self._steps = self.rich.add_task("steps", total=None, note="")
        self._episodes = self.rich.add_task("episodes", total=None, note="getting ready")

    def run_started(self, steps: int, episodes: int) -> None:
        self._pace = _Pace(episodes)
        self.rich.update(self._steps, total=steps)
        self.rich.update(self._episodes, total=episodes)

    def phase(self, name: str, episodes: int = 0) -> None:
        self.rich.update(self._steps, note=name)

    def episode_finished(self, id: str, terms: Terms) -> None:
        self._pace.count(terms)
        note = f"{self._pace.jobs} jobs ok"
        self.rich.update(self._episodes, advance=1, note=note)

    def step_finished(self, step: int, mean: float, terms: MeanTerms, seconds: float) -> None:
        self.rich.update(self._steps, advance=1)
        self.message(step_line(step, mean, terms, seconds))

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def step_line(step: int, mean: float, terms: MeanTerms, seconds: float) -> str:
    """A finished step in one line."""
    return (
        f"step {step:3d}  reward {mean:6.3f}  validation {terms.validation:5.3f}"
        f"  quality {terms.quality:6.3f}  speed {terms.speed:5.3f}  {duration(seconds)}"
    )


class _Pace:
    """How many episodes are over, and how long the rest will take."""

    def __init__(self, total: int = 0):
        self._total = total
        self._began = time.monotonic()
        self._done = 0
        self.jobs = 0
        """Episodes whose job succeeded."""

    def count(self, terms: Terms) -> None:
        self._done += 1
        self.jobs += terms.outcome == "ok"

    def left(self) -> str:
        if self._done == 0:
            return ""
        each = (time.monotonic() - self._began) / self._done
        return f"{1 / max(each, 1e-9):.1f} episodes/s, left {duration(self._remaining(each))}"

    def _remaining(self, each: float) -> float:
        return each * max(0, self._total - self._done)


class _Rate(ProgressColumn):
    """How many a minute; nothing until that is known."""

    def render(self, task: Task) -> Text:
        return Text(f"{60 * task.speed:.1f}/min" if task.speed else "", style="progress.data.speed")
