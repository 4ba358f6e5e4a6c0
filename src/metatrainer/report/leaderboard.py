"""Agents compared on the same tasks: means and paired differences, each with its interval.

Intervals are percentile bootstraps over tasks (Efron 1979), so they hold for tasks like these, not
for other trainings of the same agent. Knows nothing about how episodes are played.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from metatrainer.report.summary import Estimate

if TYPE_CHECKING:
    from metatrainer.play import Played

RESAMPLES = 5_000
TRAINED, HELDOUT = "trained", "held out"
"""Parts of a comparison: families that the settings train on, and those that they hold out."""


@dataclass(frozen=True)
class Row:
    """One agent on one part."""

    agent: str
    part: str
    reward: Estimate
    quality: Estimate
    validation: Estimate
    attempts: Estimate
    """Submissions in an episode."""
    students: dict[str, int]
    """Jobs by base model."""
    usd: float
    """What all its episodes cost, those in which it failed too."""
    failed: int
    """Episodes without a reward because the agent failed. Their tasks count for no agent."""


@dataclass(frozen=True)
class Difference:
    """First agent minus second, task by task."""

    first: str
    second: str
    part: str
    reward: Estimate
    quality: Estimate


@dataclass(frozen=True)
class Leaderboard:
    """Best mean reward on the trained families first."""

    rows: list[Row]
    differences: list[Difference]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rank(played: Sequence[Played], heldout: Sequence[str]) -> Leaderboard:
    """What came of the episodes. heldout: families that stand apart.

    A task on which an agent failed is left out for all of them, so that what is compared are the
    same tasks.
    """
    parts: dict[str, dict[str, list[Played]]] = defaultdict(lambda: defaultdict(list))
    left_out = {(p.family, p.index) for p in played if p.terms is None}
    for episode in sorted(played, key=lambda p: (p.family, p.index)):
        if (episode.family, episode.index) not in left_out:
            part = HELDOUT if episode.family in heldout else TRAINED
            parts[part][episode.agent].append(episode)
    rows, differences = [], []
    for part in (p for p in (TRAINED, HELDOUT) if p in parts):
        agents = parts[part]
        ranked = sorted(agents, key=lambda agent: -_mean(_rewards(agents[agent])))
        for agent in ranked:
            own = [
                p for p in played if p.agent == agent and (p.family in heldout) == (part == HELDOUT)
            ]
            rows.append(_row(agent, part, agents[agent], own))
        differences += [
            Difference(
                first,
                second,
                part,
                _paired(agents[first], agents[second], _rewards),
                _paired(agents[first], agents[second], _qualities),
            )
            for first, second in combinations(ranked, 2)
        ]
    return Leaderboard(rows, differences)


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of values with its 95 % percentile bootstrap interval."""
    array = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), (2.5, 97.5))
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def markdown(board: Leaderboard) -> str:
    """The leaderboard as Markdown tables."""
    lines = [
        "| part | agent | reward | quality | validation | attempts | students | $ | n | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in board.rows:
        students = ", ".join(f"{name} {count}" for name, count in row.students.items()) or "-"
        numbers = (row.reward, row.quality, row.validation, row.attempts)
        counts = (f"{row.usd:.2f}", str(row.reward.n), str(row.failed))
        cells = [row.part, row.agent, *map(str, numbers), students, *counts]
        lines.append(f"| {' | '.join(cells)} |")
    if board.differences:
        lines += ["", "| part | difference | reward | quality |", "|---|---|---|---|"]
    for each in board.differences:
        name = f"{each.first} - {each.second}"
        lines.append(f"| {each.part} | {name} | {each.reward} | {each.quality} |")
    return "\n".join(lines)


def _row(agent: str, part: str, episodes: list[Played], own: list[Played]) -> Row:
    """episodes: on the tasks that count. own: all of the agent in this part."""
    return Row(
        agent=agent,
        part=part,
        reward=bootstrap(_rewards(episodes)),
        quality=bootstrap(_qualities(episodes)),
        validation=bootstrap([e.terms.validation for e in episodes if e.terms]),
        attempts=bootstrap([e.attempts for e in episodes]),
        students=dict(Counter(e.student for e in episodes if e.student).most_common()),
        usd=sum(e.usd for e in own),
        failed=sum(e.terms is None for e in own),
    )


def _paired(
    first: list[Played], second: list[Played], values: Callable[[list[Played]], list[float]]
) -> Estimate:
    """Differences of episodes that had the same task; both lists are in the same order."""
    assert [(e.family, e.index) for e in first] == [(e.family, e.index) for e in second]
    return bootstrap([a - b for a, b in zip(values(first), values(second), strict=True)])


def _rewards(episodes: list[Played]) -> list[float]:
    return [episode.terms.total for episode in episodes if episode.terms]


def _qualities(episodes: list[Played]) -> list[float]:
    return [episode.terms.quality for episode in episodes if episode.terms]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
