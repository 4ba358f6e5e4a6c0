"""How sequences are put into batches, so that shared beginnings are computed once.

Pure functions of token lists.
"""

from __future__ import annotations

from collections.abc import Sequence

Tokens = list[int]
WORTH_A_BATCH = 1024
"""Tokens that a cluster must save to be computed apart: a batch of its own costs about as much as
a few hundred tokens of the smallest models."""
_CUTS = 64
"""Lengths that a batch may end at."""


def common_prefix(rows: Sequence[Tokens], limit: int) -> int:
    """Number of tokens, at most `limit`, that all rows begin with."""
    length = limit
    for row in rows[1:]:
        low, high = 0, length
        while low < high:  # by bisection: slices of lists compare fast
            middle = (low + high + 1) // 2
            same = row[:middle] == rows[0][:middle]
            low, high = (middle, high) if same else (low, middle - 1)
        length = low
    return length


def families_of(rows: Sequence[Tokens]) -> list[list[int]]:
    """Row numbers in clusters of rows that share their first half and so save a good many tokens.

    All other rows come together in a last cluster.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i])
    clusters: list[list[int]] = []
    for i in order:
        half = (len(rows[i]) + 1) // 2
        if clusters and rows[clusters[-1][0]][:half] == rows[i][:half]:
            clusters[-1].append(i)
        else:
            clusters.append([i])
    worth = [c for c in clusters if (len(c) - 1) * len(rows[c[0]]) // 2 >= WORTH_A_BATCH]
    others = [i for c in clusters if c not in worth for i in c]
    return worth + ([others] if others else [])


def micro_batches(
    lengths: Sequence[int], budget: int, owners: Sequence[int] | None = None, fixed: int = 0
) -> list[list[int]]:
    """Row numbers in batches of similar length, each within `budget` padded tokens if it can be.

    fixed: what a batch costs by itself, in tokens; so few batches and little padding that both
    together cost least. owners: whose each row is; rows of one stay together where it costs little.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    batches: list[list[int]] = []
    for start, end in _spans([lengths[i] for i in order], budget, fixed):
        width, batch = lengths[order[end - 1]], list[int]()
        for i in sorted(order[start:end]):
            if batch and (len(batch) + 1) * width > budget:
                batches.append(batch)
                batch = _cut_off(batch, owners, owners[i]) if owners else []
            batch.append(i)
        batches.append(batch)
    return batches


def _spans(lengths: list[int], budget: int, fixed: int) -> list[tuple[int, int]]:
    """Where to cut ascending lengths so that padding and batches cost least, by dynamic programming
    over at most _CUTS places."""
    step = max(1, lengths[-1] // _CUTS) if lengths else 1
    ends = [
        i + 1
        for i, n in enumerate(lengths)
        if i + 1 == len(lengths) or -(-n // step) < -(-lengths[i + 1] // step)
    ]
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # of the first rows: cost, last cut
    for end in ends:
        width = lengths[end - 1]
        costs = []
        for start, (before, _) in best.items():
            tokens = (end - start) * width
            costs.append((before + tokens + fixed * -(-tokens // budget), start))
        best[end] = min(costs)
    spans, end = [], len(lengths)
    while end:
        spans.append((best[end][1], end))
        end = best[end][1]
    return spans[::-1]


def _cut_off(batch: list[int], owners: Sequence[int], owner: int) -> list[int]:
    """The last rows of a batch that are `owner`'s, if they are less than half of it."""
    start = len(batch)
    while start and owners[batch[start - 1]] == owner:
        start -= 1
    tail = batch[start:] if start > len(batch) // 2 else []
    del batch[len(batch) - len(tail) :]
    return tail
