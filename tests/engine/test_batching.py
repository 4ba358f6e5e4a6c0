"""Batches: every row once, within the budget, and shared beginnings kept together."""

import random

from metatrainer.engine.batching import common_prefix, families_of, micro_batches


def test_common_prefix_is_the_longest():
    assert common_prefix([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9]], 3) == 2
    assert common_prefix([[1, 2, 3]], 3) == 3
    assert common_prefix([[1, 2], [3, 4]], 2) == 0
    rng = random.Random(0)
    for _ in range(200):
        rows = [[rng.randint(0, 1) for _ in range(8)] for _ in range(3)]
        n = next((i for i in range(8) if len({r[i] for r in rows}) > 1), 8)
        assert common_prefix(rows, 8) == n


def test_every_row_comes_once_and_batches_fit():
    rng = random.Random(1)
    leads = [[lead] * 300 for lead in range(3)]
    rows = [rng.choice(leads) + [rng.randint(5, 9)] * rng.randint(1, 20) for _ in range(40)]
    rows += [[100 + i] * rng.randint(10, 60) for i in range(10)]
    batches = micro_batches(rows, 1500)
    assert sorted(i for batch in batches for i in batch) == list(range(50))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(rows[i]) for i in batch) <= 1500
        assert len({rows[i][0] for i in batch if rows[i][0] < 3}) <= 1
    assert len(families_of(rows)) == 4


def test_a_row_longer_than_the_budget_stands_alone():
    assert micro_batches([[1] * 50, [2] * 3], 10) == [[1], [0]]
