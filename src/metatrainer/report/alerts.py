"""What is going wrong in a run, named from its episodes alone.

Knows rewards, outcomes and submissions; knows nothing about how alerts are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from metatrainer.ledger import Ledger
from metatrainer.pool.base import LOST
from metatrainer.report.entropy import entropy, surprises

DEAD_GROUPS = 0.5
"""More groups without any spread of reward leave the agent little to learn from."""
FAULTS = 0.05
"""A larger share of episodes whose job ended by a fault says that the run, not the agent, fails."""
SAME = 0.2
"""Fewer different submissions among the jobs of a step: the agent has stopped trying things."""
SURE = 0.2
"""Entropy of the agent's tokens below this part of the first step's: it has stopped exploring."""
ENOUGH = 8
"""Episodes, or jobs, below which shares say nothing."""
FAULT_OUTCOMES = frozenset({"crashed", LOST, "timeout", "env_error"})


@dataclass(frozen=True)
class Played:
    """What an alert can see of one episode."""

    group: int
    total: float
    outcome: str
    submission: str | None
    """A digest of the files of its job; None without a job."""


@dataclass(frozen=True)
class Alert:
    """Something a person should look at."""

    step: int
    kind: str
    text: str


# A job's id ends with the digest of its files.
_PLAYED = """
SELECT step, grp, total, outcome, (SELECT substr(id, -8) FROM job WHERE job.episode = episode.id)
FROM episode WHERE phase = 'train' AND done AND ? IN (step, -1)
"""


def alerts_of_run(ledger: Ledger) -> list[Alert]:
    """Alerts of all steps that are done, in order."""
    played, first = _played(ledger), _entropy(ledger, 0)
    return [
        alert
        for row in ledger.steps()
        for alert in alerts_of_step(row.n, played.get(row.n, []), first, _entropy(ledger, row.n))
    ]


def alerts_after(ledger: Ledger, step: int) -> list[Alert]:
    """Alerts of a step whose episodes are over."""
    played = _played(ledger, step).get(step, [])
    return alerts_of_step(step, played, _entropy(ledger, 0), _entropy(ledger, step))


def _entropy(ledger: Ledger, step: int) -> float | None:
    return entropy(list(surprises(ledger, step).values()))


def _played(ledger: Ledger, step: int = -1) -> dict[int, list[Played]]:
    """Training episodes by step; of one step, or of all."""
    found: dict[int, list[Played]] = defaultdict(list)
    for at, *rest in ledger.query(_PLAYED, step):
        found[at].append(Played(*rest))
    return found


def alerts_of_step(
    step: int, episodes: Sequence[Played], first: float | None = None, now: float | None = None
) -> list[Alert]:
    """Alerts of one finished step.

    first, now: entropy of the agent's tokens in the run's first step and in this one, in nats.
    """
    found: list[Alert] = []
    if len(episodes) < ENOUGH:
        return found
    rewards = {episode.total for episode in episodes if episode.outcome != LOST}
    if len(rewards) == 1:
        text = f"all {len(episodes)} rewards are {rewards.pop():.3f}: there is no gradient at all"
        return [Alert(step, "collapsed", text)]
    if (dead := dead_groups(episodes)) > DEAD_GROUPS:
        found.append(Alert(step, "dead groups", f"{dead:.0%} of the groups have equal rewards"))
    faults = sum(e.outcome in FAULT_OUTCOMES for e in episodes) / len(episodes)
    if faults > FAULTS:
        found.append(Alert(step, "faults", f"{faults:.0%} of the episodes ended by a fault"))
    jobs = [e.submission for e in episodes if e.submission]
    if len(jobs) >= ENOUGH and (different := len(set(jobs)) / len(jobs)) < SAME:
        text = f"only {len(set(jobs))} different submissions among {len(jobs)} jobs"
        found.append(Alert(step, "no novelty", f"{text} ({different:.0%})"))
    if first is not None and now is not None and now < SURE * first:
        text = f"the agent's tokens have an entropy of {now:.4f} nats, at first {first:.4f}"
        found.append(Alert(step, "low entropy", text))
    return found


def dead_groups(episodes: Sequence[Played]) -> float:
    """Share of groups whose rewards are all equal. A lost job is no reward."""
    rewards: dict[int, set[float]] = defaultdict(set)
    for episode in episodes:
        rewards[episode.group] |= set() if episode.outcome == LOST else {episode.total}
    return sum(len(values) < 2 for values in rewards.values()) / max(1, len(rewards))
