"""Which worker a job goes to: places for several jobs in each of some workers.

Jobs of one base model are put together, since they share an engine's passes there. Knows nothing
about processes or what a job is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from metatrainer.errors import PoolError


@dataclass(frozen=True)
class Lane:
    """A place in a worker, taken by one job."""

    worker: int
    slot: int
    """Its number in the whole pool."""


@dataclass(eq=False)
class _Waiting:
    base: str
    alone: bool
    lane: asyncio.Future[Lane]


@dataclass
class _Worker:
    number: int
    bases: dict[int, str] = field(default_factory=dict)
    """Slots that are taken, with the base model of the job in each."""
    alone: bool = False


class Lanes:
    """The lanes of all workers, and the line of those who wait for one."""

    def __init__(self, workers: int, packed: int):
        """packed: lanes of one worker."""
        self._packed = packed
        self._workers = [_Worker(number) for number in range(workers)]
        self._line: list[_Waiting] = []
        self._closed = False

    async def take(self, base: str, *, alone: bool = False) -> Lane:
        """Wait for a lane. Raises PoolError once the lanes are closed.

        base: the model that the job runs on. alone: in a worker without other jobs, and first.
        """
        waiting = _Waiting(base, alone, asyncio.get_running_loop().create_future())
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

    def give_back(self, lane: Lane) -> None:
        """Free a lane for the next job."""
        worker = self._workers[lane.worker]
        del worker.bases[lane.slot]
        worker.alone = False
        self._hand_out()

    def close(self) -> None:
        """Give no lane to anybody any more, and tell those in line."""
        self._closed = True
        self._hand_out()

    def _hand_out(self) -> None:
        open_to_all = self._workers
        for waiting in sorted(self._line, key=lambda waiting: not waiting.alone):
            if waiting.lane.done():  # cancelled just now
                continue
            if self._closed:
                self._leave(waiting).set_exception(PoolError("the pool is closed"))
            elif worker := self._choose(waiting, open_to_all):
                self._leave(waiting).set_result(self._occupy(worker, waiting))
            elif waiting.alone:  # keep the emptiest worker free of new jobs until it is empty
                kept = min(open_to_all, key=lambda worker: len(worker.bases), default=None)
                open_to_all = [worker for worker in open_to_all if worker is not kept]

    def _choose(self, waiting: _Waiting, workers: list[_Worker]) -> _Worker | None:
        """An idle worker; else one that has jobs on the same base; else the one with fewest."""
        most = 1 if waiting.alone else self._packed
        free = [worker for worker in workers if len(worker.bases) < most and not worker.alone]

        def rank(worker: _Worker) -> tuple[bool, bool, int]:
            bases = worker.bases.values()
            return bool(bases), waiting.base not in bases, len(bases)

        return min(free, key=rank, default=None)

    def _occupy(self, worker: _Worker, waiting: _Waiting) -> Lane:
        first = worker.number * self._packed
        slot = next(s for s in range(first, first + self._packed) if s not in worker.bases)
        worker.bases[slot] = waiting.base
        worker.alone = waiting.alone
        return Lane(worker.number, slot)

    def _leave(self, waiting: _Waiting) -> asyncio.Future[Lane]:
        """Take somebody out of the line, who is then told why."""
        self._line.remove(waiting)
        return waiting.lane
