"""Which worker a job goes to: places for several jobs in each of some workers.

Jobs of one base model are put together, since they share an engine's passes there. Knows nothing
about processes or what a job is.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from metatrainer.errors import PoolError

COOL_SECONDS = 10.0
"""Rest of a worker that failed twice in a row; it doubles with every further failure."""
MAX_COOL_SECONDS = 300.0
ONE_FAULT_SECONDS = 1.0
"""Failures of one worker that are no further apart are one: its jobs go down together."""


@dataclass
class Lane:
    """A place in a worker, taken by one job."""

    worker: int
    slot: int
    """Its number in the whole pool."""
    faulty: bool = False
    """Set by the taker if the worker, not the job, failed."""


@dataclass(eq=False)
class _Waiting:
    base: str
    alone: bool
    expected: float
    lane: asyncio.Future[Lane]

    @property
    def rank(self) -> tuple[bool, float]:
        return not self.alone, -self.expected


@dataclass
class _Worker:
    number: int
    bases: dict[int, str] = field(default_factory=dict)
    """Slots that are taken, with the base model of the job in each."""
    alone: bool = False
    faults: int = 0
    """Failures in a row."""
    failed_at: float = -math.inf
    rests_until: float = -math.inf

    def note(self, faulty: bool, now: float) -> None:
        """Learn how a job ended; after the second failure in a row, rest."""
        if not faulty:
            self.faults = 0
        elif now - self.failed_at > ONE_FAULT_SECONDS:
            self.faults += 1
            self.failed_at = now
            if self.faults > 1:
                self.rest(now)

    def rest(self, now: float) -> None:
        """Get no jobs for a while, longer each time."""
        seconds = COOL_SECONDS * 2 ** min(max(0, self.faults - 2), 10)
        self.rests_until = now + min(seconds, MAX_COOL_SECONDS)


class Lanes:
    """The lanes of all workers, and the line of those who wait for one."""

    def __init__(self, workers: int, packed: int):
        """packed: lanes of one worker."""
        self._packed = packed
        self._workers = [_Worker(number) for number in range(workers)]
        self._line: list[_Waiting] = []
        self._closed = False

    async def take(self, base: str, *, alone: bool = False, expected: float = 0.0) -> Lane:
        """Wait for a lane. Raises PoolError once the lanes are closed.

        base: the model that the job runs on. alone: in a worker without other jobs, and first.
        expected: seconds; who will take longest is served first, so that no long job is left
        over when the others have ended.
        """
        waiting = _Waiting(base, alone, expected, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self._hand_out()
        try:
            return await waiting.lane
        except asyncio.CancelledError:
            if waiting in self._line:
                self._line.remove(waiting)
            elif not waiting.lane.cancelled() and not waiting.lane.exception():
                self.give_back(waiting.lane.result())
            raise

    def occupy(self, worker: int) -> Lane:
        """Take a lane of a worker for a job that is in it already."""
        return self._occupy(self._workers[worker], base="", alone=False)

    def give_back(self, lane: Lane) -> None:
        """Free a lane for the next job."""
        worker = self._workers[lane.worker]
        del worker.bases[lane.slot]
        worker.alone = False
        loop = asyncio.get_running_loop()
        worker.note(lane.faulty, loop.time())
        if worker.rests_until > loop.time():
            loop.call_at(worker.rests_until, self._hand_out)
        self._hand_out()

    def give_back_dead(self, lane: Lane) -> None:
        """Free a lane of a worker that cannot be started; it rests at once."""
        lane.faulty = True
        worker = self._workers[lane.worker]
        now = asyncio.get_running_loop().time()
        worker.failed_at, worker.faults = now, worker.faults + 1
        worker.rest(now)
        self.give_back(lane)

    def close(self) -> None:
        """Give no lane to anybody any more, and tell those in line."""
        self._closed = True
        self._hand_out()

    def _hand_out(self) -> None:
        open_to_all = self._rested()
        for waiting in sorted(self._line, key=lambda waiting: waiting.rank):
            if waiting.lane.done():  # cancelled just now
                continue
            if self._closed:
                self._leave(waiting).set_exception(PoolError("the pool is closed"))
            elif worker := self._choose(waiting, open_to_all):
                self._leave(waiting).set_result(self._occupy(worker, waiting.base, waiting.alone))
            elif waiting.alone:  # keep the emptiest worker free of new jobs until it is empty
                kept = min(open_to_all, key=lambda worker: len(worker.bases), default=None)
                open_to_all = [worker for worker in open_to_all if worker is not kept]

    def _rested(self) -> list[_Worker]:
        """Workers that may be given jobs: those that have not failed just now, else all."""
        now = asyncio.get_running_loop().time()
        return [w for w in self._workers if w.rests_until <= now] or self._workers

    def _choose(self, waiting: _Waiting, workers: list[_Worker]) -> _Worker | None:
        """An idle worker; else one that has jobs on the same base; else the one with fewest."""
        most = 1 if waiting.alone else self._packed
        free = [worker for worker in workers if len(worker.bases) < most and not worker.alone]

        def rank(worker: _Worker) -> tuple[bool, bool, int]:
            bases = worker.bases.values()
            return bool(bases), waiting.base not in bases, len(bases)

        return min(free, key=rank, default=None)

    def _occupy(self, worker: _Worker, base: str, alone: bool) -> Lane:
        first = worker.number * self._packed
        slot = next(s for s in range(first, first + self._packed) if s not in worker.bases)
        worker.bases[slot] = base
        worker.alone = alone
        return Lane(worker.number, slot)

    def _leave(self, waiting: _Waiting) -> asyncio.Future[Lane]:
        """Take somebody out of the line, who is then told why."""
        self._line.remove(waiting)
        return waiting.lane
