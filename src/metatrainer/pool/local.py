"""A pool of warm worker processes on this machine.

Knows how slots are shared and when a worker is killed; knows nothing about what a job does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from metatrainer.config import RunSettings
from metatrainer.errors import PoolError, WorkerFault
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.process import WorkerProcess
from metatrainer.pool.worker import Setup
from metatrainer.students.score import Score

BODY = "metatrainer.pool.bench:Bench"
GRACE_SECONDS = 120.0
"""What a job may take beyond its training: loading, the hidden evaluation, saving."""


class LocalPool:
    """Worker processes, each with one torch thread; jobs wait in line for a free one."""

    def __init__(
        self,
        settings: RunSettings,
        secret_seed: int,
        *,
        body: str = BODY,
        grace_seconds: float = GRACE_SECONDS,
    ):
        """body: what the workers run, as module:factory."""
        self.slots = settings.pool.slots or os.cpu_count() or 1
        self._students = settings.students
        self._job_seconds = settings.limits.max_seconds + grace_seconds
        self._eval_seconds = grace_seconds
        self._workers = [
            WorkerProcess(
                body,
                Setup(slot=slot, settings=settings, secret_seed=secret_seed).model_dump_json(),
            )
            for slot in range(self.slots)
        ]
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._baselines: dict[str, asyncio.Task[list[Score]]] = {}
        self._closed = False

    async def start(self) -> None:
        """Start all workers. Raises PoolError with what the first broken one said."""
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End all workers, idle ones in order and busy ones by force."""
        self._closed = True
        for task in self._baselines.values():
            task.cancel()
        await asyncio.gather(*self._baselines.values(), return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def run(self, order: JobOrder) -> JobResult:
        """Run a job on the next free slot, or collect its result."""
        if done := jobdir.read_result(order.job_dir, order.job_id):
            return done
        async with self._slot() as worker:
            try:
                answer = await worker.ask(
                    {"order": order.model_dump(mode="json")}, self._job_seconds
                )
                return JobResult.model_validate(answer["result"])
            except WorkerFault as fault:
                if self._closed:  # not the job's fault: it stays open and is run again
                    raise PoolError(f"the pool was closed while {order.job_id} ran") from None
                return _result_of_fault(order, fault)

    async def baselines(self, family: str) -> list[Score]:
        """Hidden scores of all untrained students, best first; measured once."""
        if family not in self._baselines:
            self._baselines[family] = asyncio.create_task(self._measure(family))
        return await asyncio.shield(self._baselines[family])

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def _measure(self, family: str) -> list[Score]:
        scores = await asyncio.gather(*(self._baseline(family, s) for s in self._students))
        return sorted(scores, key=lambda score: -score.mean)

    async def _baseline(self, family: str, student: str) -> Score:
        async with self._slot() as worker:
            try:
                answer = await worker.ask(
                    {"family": family, "student": student}, self._eval_seconds
                )
            except WorkerFault as fault:
                raise PoolError(f"no baseline of {student} on {family}: {fault.message}") from None
            return Score.model_validate(answer["score"])

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[WorkerProcess]:
        worker = await self._idle.get()
        try:
            if self._closed:
                raise PoolError("the pool is closed")
            await worker.start()  # at once, unless its last request killed it
            yield worker
        finally:
            self._idle.put_nowait(worker)


def _result_of_fault(order: JobOrder, fault: WorkerFault) -> JobResult:
    """A result for a job whose worker is gone: its own if it got that far, else the fault."""
    if done := jobdir.read_result(order.job_dir, order.job_id):
        return done
    result = JobResult(
        job_id=order.job_id, attempt=order.attempt, outcome=fault.kind, message=fault.message
    )
    jobdir.write_result(order.job_dir, result)
    return result
