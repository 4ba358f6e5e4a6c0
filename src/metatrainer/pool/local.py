"""A pool of warm worker processes on this machine. Knows how they are started, nothing more."""

from __future__ import annotations

from metatrainer.config import RunSettings
from metatrainer.pool.base import GRACE_SECONDS, gpus, slots_of
from metatrainer.pool.process import STOP_SECONDS, WorkerProcess
from metatrainer.pool.worker import Setup
from metatrainer.pool.workers import BODY, WorkerPool


class LocalPool(WorkerPool):
    """Worker processes, each with one torch thread, that end with this process."""

    def __init__(
        self,
        settings: RunSettings,
        secret_seed: int,
        *,
        body: str = BODY,
        grace_seconds: float = GRACE_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ):
        """body: what the workers run, as module:factory. stop_seconds: see WorkerProcess."""
        places: list[str | None] = [*gpus()] or [None]
        setups = [
            Setup(slot=n, settings=settings, secret_seed=secret_seed, gpu=places[n % len(places)])
            for n in range(slots_of(settings.pool) // settings.pool.packed)
        ]
        workers = [
            WorkerProcess(body, setup.model_dump(mode="json"), stop_seconds) for setup in setups
        ]
        super().__init__(settings, workers, grace_seconds)
        self._processes = workers

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.pid for worker in self._processes if worker.pid is not None]
