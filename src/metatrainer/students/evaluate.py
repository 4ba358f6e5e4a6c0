"""Scoring a student on items: the share of exact answers, with its interval.

Sees a base model, an adapter and items; never an environment, a reward function or a job.
"""

from __future__ import annotations

import math

from pydantic import BaseModel

from metatrainer.config import EvalSettings
from metatrainer.engine import Engine
from metatrainer.families import Family, Item
from metatrainer.inner.rollout import Limits, Question, roll_out


class Score(BaseModel):
    """A student's score on a family's items."""

    student: str
    family: str
    n: int
    mean: float
    """Share of right answers, in [0, 1]."""
    low: float
    """Lower end of the 95 % Wilson interval."""
    high: float
    """Upper end of the same."""


def evaluate(
    engine: Engine,
    adapter: int | None,
    family: Family,
    items: list[Item],
    settings: EvalSettings,
    seed: int,
) -> Score:
    """Score the base model (adapter None) or an adapter. The same seed and items for both: a pair."""
    rollouts = roll_out(
        engine,
        adapter,
        family,
        [Question(item.prompt, item.world) for item in items],
        Limits(settings.max_turns, settings.max_tokens, settings.temperature),
        [seed * 1_000_003 + i for i in range(len(items))],
    )
    right = sum(
        family.correct(rollout.reply, item.answer) for rollout, item in zip(rollouts, items)
    )
    low, high = wilson(right, len(items))
    return Score(
        student=engine.folder.name,
        family=family.name,
        n=len(items),
        mean=right / len(items),
        low=low,
        high=high,
    )


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927)."""
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
