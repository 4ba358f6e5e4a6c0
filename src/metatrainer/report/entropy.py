"""How sure the agent was of what it wrote, from the log-probabilities that the ledger keeps.

The mean surprise of sampled tokens estimates the entropy of the distributions they came from. In
nats. Knows nothing about steps or alerts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metatrainer.ledger import Ledger


@dataclass(frozen=True)
class Surprise:
    """Of some tokens together."""

    total: float
    tokens: int


def surprises(ledger: Ledger, step: int | None = None) -> dict[str, Surprise]:
    """By episode; of one training step, or of all episodes."""
    found: dict[str, Surprise] = {}
    for episode, blob in ledger.query(_TURNS, step, step):
        logprobs = np.frombuffer(blob)
        before = found.get(episode, Surprise(0.0, 0))
        total = before.total - float(logprobs.sum())
        found[episode] = Surprise(total, before.tokens + len(logprobs))
    return found


def entropy(found: Sequence[Surprise]) -> float | None:
    """Nats a token; None of nothing."""
    tokens = sum(each.tokens for each in found)
    return sum(each.total for each in found) / tokens if tokens else None


_TURNS = """
SELECT turn.episode, logprobs FROM turn JOIN episode ON episode.id = turn.episode
WHERE ? IS NULL OR (phase = 'train' AND step = ?)
"""
