"""A pool of warm workers, each of which takes several jobs at a time: what all back ends share.

Knows which worker gets a job and when one is given up. Knows nothing about where workers run, or
what a job does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from metatrainer.config import RunSettings
from metatrainer.errors import PoolError, WorkerFault
from metatrainer.pool import jobdir
from metatrainer.pool.base import LOST, JobOrder, JobResult, longest_seconds, slots_of
from metatrainer.pool.lanes import Lane, Lanes
from metatrainer.pool.pace import Pace
from metatrainer.students.score import Score

BODY = "metatrainer.pool.bench:Bench"
STARTS = 3
"""How many workers are tried for a job before the pool is taken for broken."""


class Worker(Protocol):
    """What runs requests somewhere."""

    async def start(self) -> None:
        """Make it ready, if it is not. Raises PoolError."""

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer; others may be under way. Raises WorkerFault."""

    async def close(self) -> None:
        """End it."""


class WorkerPool:
    """Workers with lanes for jobs; jobs wait in line for a free one."""

    def __init__(self, settings: RunSettings, workers: Sequence[Worker], grace_seconds: float):
        """grace_seconds: what a job may take beyond its training."""
        self.slots = slots_of(settings.pool)
        self._students = settings.students
        self._job_seconds = longest_seconds(settings, grace_seconds)
        self._eval_seconds = grace_seconds
        self._workers = workers
        self._lanes = Lanes(len(workers), settings.pool.packed)
        self._adopted: dict[str, Lane] = {}
        self._pace = Pace()
        self._suspects: set[str] = set()
        self._baselines: dict[str, asyncio.Task[list[Score]]] = {}
        self._closed = False

    async def start(self) -> None:
        """Start all workers. Raises PoolError with what the first broken one said."""
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers, idle ones in order and busy ones by force."""
        self._closed = True
        self._lanes.close()
        for task in self._baselines.values():
            task.cancel()
        await asyncio.gather(*(worker.close() for worker in self._workers))
        await asyncio.gather(*self._baselines.values(), return_exceptions=True)

    async def run(self, order: JobOrder) -> JobResult:
        """Run a job on the next free lane, or collect its result."""
        adopted = self._adopted.pop(attempt_key(order.job_id, order.attempt), None)
        if done := jobdir.read_result(order.job_dir, order.job_id):
            if adopted:
                self._lanes.give_back(adopted)
            return done
        # A job that went down with others may be why they did; with a worker to itself, it shows.
        alone = order.job_id in self._suspects
        async with self._lane(order.student, alone, self._pace.expected(order), adopted) as lane:
            request = {"order": order.model_dump(mode="json"), "slot": lane.slot}
            began, clock = time.time(), time.monotonic()
            try:
                answer = await self._workers[lane.worker].ask(request, self._job_seconds)
                result = JobResult.model_validate(answer["result"])
                self._pace.note(result, order)
                return result
            except WorkerFault as fault:
                lane.faulty = True
                if self._closed:  # not the job's fault: it stays open and is run again
                    raise PoolError(f"the pool was closed while {order.job_id} ran") from None
                seconds = time.monotonic() - clock
                return self._ended(order, fault, lane.slot, began, seconds)

    async def baselines(self, family: str) -> list[Score]:
        """Hidden scores of all untrained students, best first; measured once."""
        if family not in self._baselines:
            self._baselines[family] = asyncio.create_task(self._measure(family))
        return await asyncio.shield(self._baselines[family])

    def holds(self, job_id: str, attempt: int) -> bool:
        """Whether a worker is still at an attempt that an earlier controller has ordered."""
        return attempt_key(job_id, attempt) in self._adopted

    def _adopt(self, job_id: str, attempt: int, worker: int) -> None:
        """Keep a lane for an attempt that a worker was found to be at, until it is ordered."""
        self._adopted[attempt_key(job_id, attempt)] = self._lanes.occupy(worker)

    def _ended(
        self, order: JobOrder, fault: WorkerFault, slot: int, began: float, seconds: float
    ) -> JobResult:
        """A result for a job whose worker is gone: its own if it got that far, else the fault."""
        if done := jobdir.read_result(order.job_dir, order.job_id):
            return done
        # A job is to blame only for what went wrong between its start and its trained adapter.
        begun = jobdir.claimed(order.job_dir, order.attempt)
        trained = jobdir.read_trained(order.job_dir, order.job_id) is not None
        result = JobResult(
            job_id=order.job_id,
            attempt=order.attempt,
            outcome=fault.kind if begun and not trained else LOST,
            message=fault.message,
            slot=slot,
            began=began,
            seconds=seconds,
        )
        if result.outcome == LOST:
            self._suspects.add(order.job_id)
        else:
            jobdir.write_result(order.job_dir, result)
        return result

    async def _measure(self, family: str) -> list[Score]:
        scores = await asyncio.gather(*(self._baseline(family, s) for s in self._students))
        return sorted(scores, key=lambda score: -score.mean)

    async def _baseline(self, family: str, student: str) -> Score:
        request = {"family": family, "student": student}
        why = ""
        for alone in (False, True):
            # Jobs are judged against baselines, so that much waits for them: they go first.
            async with self._lane(student, alone, math.inf, None) as lane:
                try:
                    answer = await self._workers[lane.worker].ask(request, self._eval_seconds)
                    return Score.model_validate(answer["score"])
                except WorkerFault as fault:
                    lane.faulty = True
                    why = fault.message
                    if fault.kind != LOST:
                        break
        raise PoolError(f"no baseline of {student} on {family}: {why}")

    @asynccontextmanager
    async def _lane(
        self, student: str, alone: bool, expected: float, lane: Lane | None
    ) -> AsyncIterator[Lane]:
        lane = lane or await self._lane_of_live_worker(student, alone, expected)
        try:
            yield lane
        finally:
            self._lanes.give_back(lane)

    async def _lane_of_live_worker(self, student: str, alone: bool, expected: float) -> Lane:
        broken = PoolError("no worker was tried")
        for _ in range(STARTS):
            lane = await self._lanes.take(student, alone=alone, expected=expected)
            try:
                await self._workers[lane.worker].start()  # at once, unless it was killed
                return lane
            except PoolError as error:
                broken = error
                self._lanes.give_back_dead(lane)
            except BaseException:
                self._lanes.give_back(lane)
                raise
        raise broken


def attempt_key(job_id: str, attempt: int) -> str:
    """Names one attempt among all that workers may be at."""
    return f"{job_id}/{attempt}"
