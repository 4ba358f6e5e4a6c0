"""How long a job will take, guessed from what jobs on the same base model took before.

Knows nothing about who runs them.
"""

from __future__ import annotations

from metatrainer.pool.base import JobOrder, JobResult


class Pace:
    """Seconds for each rollout, by base model."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._rollouts: dict[str, int] = {}

    def note(self, result: JobResult, order: JobOrder) -> None:
        """Learn from a job that went well."""
        if result.outcome == "ok" and order.rollouts:
            student = order.student
            self._seconds[student] = self._seconds.get(student, 0.0) + result.seconds
            self._rollouts[student] = self._rollouts.get(student, 0) + order.rollouts

    def expected(self, order: JobOrder) -> float:
        """Seconds; until a job on this base model has ended, as on the others."""
        known = [order.student] if order.student in self._seconds else list(self._seconds)
        rollouts = sum(self._rollouts[student] for student in known)
        each = sum(self._seconds[student] for student in known) / rollouts if rollouts else 1.0
        return order.rollouts * each
