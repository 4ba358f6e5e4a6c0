"""What a step handled by policy instead of learning from it, and how: see docs/concepts/outer-loop.

An episode errored if its job was lost for good by no fault of its own. Its reward says nothing
about the agent, so it gets the mean of its group: neither it nor the baseline moves the agent.
Knows nothing about how episodes are played or shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from metatrainer.episode import CONTEXT_FULL
from metatrainer.ledger import Ledger
from metatrainer.pool.base import LOST
from metatrainer.report.alerts import Played, dead_groups
from metatrainer.reward import Terms


def errored(outcome: str | None) -> bool:
    """Whether an episode's reward says nothing about its agent."""
    return outcome == LOST


def rewards(group: Sequence[Terms]) -> list[float]:
    """What the episodes of a group are trained on; 0 for all if none of them has a reward."""
    counted = [terms.total for terms in group if not errored(terms.outcome)]
    if not counted:
        return [0.0] * len(group)
    # Not the rounded mean of equal rewards: such a group has to stay one without spread.
    mean = counted[0] if len(set(counted)) == 1 else fmean(counted)
    return [mean if errored(terms.outcome) else terms.total for terms in group]


@dataclass(frozen=True)
class Handled:
    """Counts of one training step."""

    messages: int
    """That the agent wrote."""
    unread: int
    """Of them, those without a call that could be read: answered with a hint."""
    episodes: int
    context_full: int
    """Episodes that ended because the next message would not have fitted."""
    errored: int
    """Episodes without a reward of their own."""
    groups: int
    dead_groups: int
    """Groups without any spread of reward: left out of the update."""

    def __str__(self) -> str:
        """What there is to tell, in one line; empty if all went its way."""
        parts = (
            (self.unread, self.messages, "messages held no call"),
            (self.context_full, self.episodes, "episodes filled the context"),
            (self.errored, self.episodes, "episodes lost their job and do not count"),
            (self.dead_groups, self.groups, "groups had equal rewards and were left out"),
        )
        return ", ".join(f"{n} of {whole} {what}" for n, whole, what in parts if n)


def of_step(ledger: Ledger, step: int) -> Handled:
    """Counts of a step whose episodes are over."""
    episodes = ledger.episodes_of("train", step)
    (said,) = ledger.query(_MESSAGES, step)
    played = [Played(row.grp, row.total or 0.0, row.outcome or "", None) for row in episodes]
    groups = len({row.grp for row in episodes})
    return Handled(
        messages=said["messages"],
        unread=said["unread"],
        episodes=len(episodes),
        context_full=sum(row.outcome == CONTEXT_FULL for row in episodes),
        errored=sum(errored(row.outcome) for row in episodes),
        groups=groups,
        dead_groups=round(dead_groups(played) * groups),
    )


_MESSAGES = """
SELECT count(*) AS messages, coalesce(sum(json_array_length(content, '$.errors') > 0
    OR json_array_length(content, '$.tool_calls') = 0), 0) AS unread
FROM message JOIN episode ON episode.id = message.episode
WHERE phase = 'train' AND step = ? AND role = 'assistant'
"""
