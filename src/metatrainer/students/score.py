"""A student's score on a family's items, with its interval.

Plain numbers: knows nothing about engines, so that whoever only reads scores loads none.
"""

from __future__ import annotations

import math

from pydantic import BaseModel


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

    @classmethod
    def of(cls, student: str, family: str, right: int, n: int) -> Score:
        """The score of so many right answers."""
        low, high = wilson(right, n)
        return cls(student=student, family=family, n=n, mean=right / n, low=low, high=high)


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927)."""
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference(after: Score, before: Score) -> tuple[float, float]:
    """95 % interval of after's mean minus before's, from theirs (Newcombe 1998, method 10).

    It is that of independent samples: for scores on the same items it is too wide, if anything.
    """
    gain = after.mean - before.mean
    down = math.hypot(after.mean - after.low, before.high - before.mean)
    up = math.hypot(after.high - after.mean, before.mean - before.low)
    return gain - down, gain + up
