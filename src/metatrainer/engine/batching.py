"""How sequences are put into batches, so that shared beginnings are computed once.

Pure functions of token lists.
"""

from __future__ import annotations

from collections.abc import Sequence

Tokens = list[int]
WORTH_A_BATCH = 1024
"""Tokens that a cluster must save to be computed apart: a batch of its own costs about as much as
a few hundred tokens of the smallest models."""


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
    lengths: list[int], budget: int, owners: Sequence[int] | None = None
) -> list[list[int]]:
    """Row numbers in batches of similar length, each within `budget` padded tokens if it can be.

    owners: whose each row is; rows of one owner are kept together where it costs little.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > budget:
            batches.append(_cut_off(batches[-1], owners, owners[i]) if batches and owners else [])
        batches[-1].append(i)
    return batches


def _cut_off(batch: list[int], owners: Sequence[int], owner: int) -> list[int]:
    """The last rows of a batch that are `owner`'s, if they are less than half of it."""
    start = len(batch)
    while start and owners[batch[start - 1]] == owner:
        start -= 1
    tail = batch[start:] if start > len(batch) // 2 else []
    del batch[len(batch) - len(tail) :]
    return tail
