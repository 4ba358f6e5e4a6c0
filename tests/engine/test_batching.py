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
    lengths = [rng.randint(1, 60) for _ in range(50)]
    batches = micro_batches(lengths, 300)
    assert sorted(i for batch in batches for i in batch) == list(range(50))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 300 for batch in batches)
    assert micro_batches([], 300) == []


def test_rows_of_one_owner_stay_together_where_they_can():
    owners = [0] * 4 + [1] * 4 + [2] * 4
    assert micro_batches([10] * 12, 60, owners) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert micro_batches([10] * 8, 30, [0] * 8) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    uneven = micro_batches([3, 9, 4, 8, 5, 7], 20, [0, 1, 0, 1, 0, 1])
    assert sorted(i for batch in uneven for i in batch) == list(range(6))
    assert all(len(b) * max([3, 9, 4, 8, 5, 7][i] for i in b) <= 20 for b in uneven)


def test_a_row_longer_than_the_budget_stands_alone():
    assert micro_batches([50, 3], 10) == [[1], [0]]


def test_rows_that_share_much_are_found():
    leads = [[lead] * 300 for lead in range(3)]
    rows = [leads[i % 3] + [100 + i] for i in range(30)] + [[500 + i] * 9 for i in range(4)]
    clusters = families_of(rows)
    assert sorted(map(len, clusters)) == [4, 10, 10, 10]
    assert all(len({rows[i][0] for i in c}) == 1 for c in clusters if len(c) == 10)
