from __future__ import annotations

from pathlib import Path

import pytest

from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.pace import Pace


def order(student: str, rollouts: int) -> JobOrder:
    return JobOrder(
        job_id="j",
        family="persona",
        job_dir=Path(),
        student=student,
        seed=0,
        rollouts=rollouts,
    )


def test_a_job_is_expected_to_take_what_others_on_its_model_took() -> None:
    pace = Pace()
    assert pace.expected(order("wren", 200)) > pace.expected(order("wren", 100)) > 0

    def note(student: str, rollouts: int, seconds: float, outcome: str = "ok") -> None:
        pace.note(JobResult(job_id="j", outcome=outcome, seconds=seconds), order(student, rollouts))

    note("wren", 100, 10.0)
    note("wren", 300, 10.0)
    note("wren", 100, 999.0, "timeout")  # says nothing of jobs that go well
    assert pace.expected(order("wren", 200)) == pytest.approx(10.0)
    assert pace.expected(order("finch", 200)) == pytest.approx(10.0)
    note("finch", 100, 40.0)
    assert pace.expected(order("finch", 200)) == pytest.approx(80.0)
    assert pace.expected(order("wren", 200)) == pytest.approx(10.0)
