"""Scores: the interval against known values, and before and after on the same items."""

import pytest

from metatrainer import families
from metatrainer.config import EvalSettings
from metatrainer.engine import Engine
from metatrainer.students import catalogue
from metatrainer.students.evaluate import evaluate
from metatrainer.students.score import wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Values of Wilson's interval as published calculators give them.
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson(right, n, low, high):
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize("student", catalogue.shipped())
def test_untrained_students_are_neither_lost_nor_done(student):
    """Each student has a family at 10-40 % untrained, and none that it already masters."""
    engine = Engine(catalogue.verified_folder(student))
    scores = {}
    for name in families.NAMES:
        family = families.get(name)
        items = family.items("hidden", 11, 128)
        score = evaluate(engine, None, family, items, EvalSettings(), seed=1)
        again = evaluate(engine, None, family, items, EvalSettings(), seed=1)
        assert score == again
        assert score.low <= score.mean <= score.high
        scores[name] = score.mean
    assert any(0.10 <= mean <= 0.40 for mean in scores.values())
    assert max(scores.values()) < 0.60


def test_students_differ_by_family():
    """Which student is the better one depends on the family."""
    best = {}
    for name in ("persona", "inventory"):
        family = families.get(name)
        items = family.items("hidden", 12, 128)
        means = {
            student: evaluate(
                Engine(catalogue.verified_folder(student)), None, family, items, EvalSettings(), 0
            ).mean
            for student in catalogue.shipped()
        }
        best[name] = max(means, key=means.__getitem__)
    assert best["persona"] != best["inventory"]
