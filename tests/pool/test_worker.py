"""One attempt at a job, in this process: what is written and when."""

from __future__ import annotations

import threading
from pathlib import Path

import pool_bodies as bodies

from metatrainer.config import RunSettings
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.worker import Setup, answer, run_job

BODY = bodies.StandIn(Setup(slot=0, settings=RunSettings(), secret_seed=7))


def make_order(folder: Path, **changed: int) -> JobOrder:
    order = JobOrder(job_id="j", family="persona", job_dir=folder, student="nano-wren", seed=0)
    jobdir.create(order, {})
    return order.model_copy(update=changed)


def run(order: JobOrder) -> JobResult:
    return run_job(BODY, order, 3, threading.Event())


def test_a_result_is_on_disk_before_it_is_told(tmp_path: Path) -> None:
    result = run(make_order(tmp_path))
    assert (result.outcome, result.slot, result.seconds > 0) == ("ok", 3, True)
    assert jobdir.read_result(tmp_path, "j") == result


def test_an_attempt_that_is_asked_for_again_answers_what_came_of_it(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    first = run(order)
    assert run(order) == first
    assert len((tmp_path / "runs").read_text().split()) == 1


def test_an_attempt_that_was_overtaken_does_not_count(tmp_path: Path) -> None:
    late, next_one = make_order(tmp_path), make_order(tmp_path, attempt=2)
    assert jobdir.claim(next_one)  # the pool has given the first one up
    run(late)
    assert jobdir.read_result(tmp_path, "j") is None


def test_what_goes_wrong_with_a_request_is_its_answer() -> None:
    request = {"family": "broken", "student": "nano-wren"}
    said = answer(BODY, request, threading.Event())
    assert said == {"error": "RuntimeError: no such family"}
