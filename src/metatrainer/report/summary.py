"""A run in numbers, computed from its ledger alone, finished or not.

Knows nothing about how the numbers are shown.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from metatrainer.config import MoneySettings
from metatrainer.errors import LedgerError
from metatrainer.ledger import EpisodeRow, EvalRow, Ledger
from metatrainer.money import Spending, spending
from metatrainer.pool.base import LOST
from metatrainer.report.learned import Learned, Table, learned

TERMS = ("validation", "quality", "speed")
WINDOW = 3
"""Steps at either end of a run that are averaged to say how far it came."""


@dataclass(frozen=True)
class Estimate:
    """A mean over n episodes with its 95 % interval (1.96 standard errors either way)."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Series:
    """One quantity in each step: its mean over the step's episodes, and every episode's value."""

    steps: list[int]
    per_step: list[float]
    episodes: list[list[float]]

    @property
    def first(self) -> float | None:
        """Mean of the first steps; None before there is one."""
        return _mean(self.per_step[:WINDOW])

    @property
    def last(self) -> float | None:
        """Mean of the last steps."""
        return _mean(self.per_step[-WINDOW:])


@dataclass(frozen=True)
class HeldOut:
    """A family that was never trained on, before and after training. None: not played yet."""

    before: Estimate | None
    after: Estimate | None
    quality_before: Estimate | None
    quality_after: Estimate | None

    @property
    def n(self) -> int:
        """Episodes behind the newest of the two."""
        newest = self.after or self.before
        return newest.n if newest else 0


@dataclass(frozen=True)
class Jobs:
    """Jobs that were handed to the pool; crashed counts all that ended other than well."""

    submitted: int
    succeeded: int
    crashed: int
    utilisation: float | None
    """Share of the slots' time that they held jobs, from each step's first job to its last."""


@dataclass(frozen=True)
class Summary:
    """Everything a report shows."""

    run: str
    preset: str
    steps: int
    steps_planned: int | None
    episodes: int
    errored: int
    """Of them, those whose job was lost for good: they count in no mean."""
    seconds: float
    jobs: Jobs
    reward: Series
    terms: dict[str, Series]
    heldout: dict[str, HeldOut]
    students_chosen: dict[str, int]
    baselines: list[EvalRow]
    spending: Spending
    learned: Learned

    def as_json(self) -> dict[str, Any]:
        """The numbers under the names that `report --json` promises."""
        return {
            "run": self.run,
            "preset": self.preset,
            "steps": self.steps,
            "episodes": self.episodes,
            "errored": self.errored,
            "seconds": round(self.seconds, 1),
            "jobs": {
                "submitted": self.jobs.submitted,
                "succeeded": self.jobs.succeeded,
                "crashed": self.jobs.crashed,
                "utilisation": _short(self.jobs.utilisation),
            },
            "reward": _series_json(self.reward),
            "quality": _series_json(self.terms["quality"]),
            "validation": _series_json(self.terms["validation"]),
            "heldout": {
                family: {
                    "before": held.before and _short(held.before.mean),
                    "after": held.after and _short(held.after.mean),
                    "n": held.n,
                }
                for family, held in self.heldout.items()
            },
            "students_chosen": self.students_chosen,
            "usd": {
                "total": _short(self.spending.total),
                "jobs": _short(self.spending.jobs),
                "lost_attempts": _short(self.spending.lost),
                "baselines": _short(self.spending.baselines),
                "tokens": _short(self.spending.tokens),
                "per_job": _short(self.spending.per_job),
                "per_step": [_short(usd) for usd in self.spending.per_step.values()],
            },
            "learned": self.learned.as_json(),
        }


def summarise(ledger: Ledger, table: Table | None = None) -> Summary:
    """Compute a run's summary. Raises LedgerError where the ledger holds no run yet.

    table: as `learned` takes it.
    """
    with ledger.transaction():
        run = ledger.run()
        if run is None:
            raise LedgerError(f"{ledger.path} holds no run yet")
        steps = [row.n for row in ledger.steps()]
        done = [row for row in ledger.episodes() if row.done]
        family_of = {task.id: task.family for task in ledger.tasks()}
        jobs = ledger.jobs()
        baselines = ledger.evals("baseline")
        seconds = ledger.seconds()
        prices = MoneySettings.model_validate(json.loads(run.config).get("money", {}))
        spent = spending(ledger, prices)
        held = ledger.query(_HELD)
        written = learned(ledger, table)
    # A job that was lost for good says nothing about its agent.
    counted = [row for row in done if row.outcome != LOST]
    trained = [row for row in counted if row.phase == "train"]
    ended = Counter(job.outcome == "ok" for job in jobs if job.done)
    return Summary(
        run=run.id,
        preset=run.preset,
        steps=len(steps),
        steps_planned=json.loads(run.config).get("outer", {}).get("steps"),
        episodes=len(done),
        errored=len(done) - len(counted),
        seconds=seconds,
        jobs=Jobs(
            submitted=len(jobs),
            succeeded=ended[True],
            crashed=ended[False],
            utilisation=_utilisation([tuple(row) for row in held]),
        ),
        reward=_series(trained, steps, "total"),
        terms={term: _series(trained, steps, term) for term in TERMS},
        heldout=_heldout(counted, family_of),
        students_chosen=dict(Counter(job.student for job in jobs).most_common()),
        baselines=baselines,
        spending=spent,
        learned=written,
    )


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and 95 % interval; None of nothing. The interval of one value is that value."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return estimate_by(mean, sum((v - mean) ** 2 for v in values), len(values))


def estimate_by(mean: float, deviation: float, n: int) -> Estimate:
    """The same from a mean of n values and the sum of their squared distances from it."""
    half = 1.96 * math.sqrt(max(0.0, deviation) / max(1, n - 1) / n)
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)


def _series(episodes: list[EpisodeRow], steps: list[int], column: str) -> Series:
    """A column of the training episodes, for the steps that are done and have any."""
    values: dict[int, list[float]] = defaultdict(list)
    for row in episodes:
        values[row.step].append(getattr(row, column))
    steps = [step for step in steps if values[step]]
    by_step = [values[step] for step in steps]
    return Series(steps=steps, per_step=[sum(v) / len(v) for v in by_step], episodes=by_step)


def _heldout(episodes: list[EpisodeRow], family_of: dict[str, str]) -> dict[str, HeldOut]:
    def values(phase: str, family: str, column: str) -> list[float]:
        return [
            getattr(row, column)
            for row in episodes
            if row.phase == phase and family_of[row.task] == family
        ]

    played = [row for row in episodes if row.phase.startswith("heldout_")]
    return {
        family: HeldOut(
            before=estimate(values("heldout_before", family, "total")),
            after=estimate(values("heldout_after", family, "total")),
            quality_before=estimate(values("heldout_before", family, "quality")),
            quality_after=estimate(values("heldout_after", family, "quality")),
        )
        for family in sorted({family_of[row.task] for row in played})
    }


_HELD = """
SELECT phase, step, json_extract(result, '$.slot') AS slot,
    json_extract(result, '$.began') AS began, job.seconds
FROM job JOIN episode ON episode.id = job.episode
WHERE job.done AND slot IS NOT NULL AND began IS NOT NULL
"""


def _utilisation(held: Sequence[tuple[str, int, int, float, float]]) -> float | None:
    """held: phase, step, slot, began and seconds of jobs. Slots are those that any job had."""
    slots = len({slot for _, _, slot, _, _ in held})
    whole = used = 0.0
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for phase, step, _, began, seconds in held:
        spans[phase, step].append((began, began + seconds))
    for batch in spans.values():
        whole += slots * (max(end for _, end in batch) - min(began for began, _ in batch))
        used += sum(end - began for began, end in batch)
    return used / whole if whole else None


def _series_json(series: Series) -> dict[str, Any]:
    return {
        "per_step": [_short(value) for value in series.per_step],
        "first3": _short(series.first),
        "last3": _short(series.last),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
