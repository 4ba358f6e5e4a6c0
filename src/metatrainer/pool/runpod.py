"""A pool on pods rented from Runpod: one worker on each, which takes one job or several.

A runner on the pod outlives the controller: the next one finds the pod by its name, with the jobs
that the runner has. Pods stay warm between jobs, are ended when idle and with the pool, and end
themselves if their controller is gone. Knows nothing about what a job does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from metatrainer.config import RunSettings
from metatrainer.errors import PoolError
from metatrainer.ledger import Ledger
from metatrainer.pool import ssh
from metatrainer.pool.base import GRACE_SECONDS
from metatrainer.pool.pods import POLL_SECONDS, Fleet
from metatrainer.pool.process import STOP_SECONDS
from metatrainer.pool.remote import PodWorker, job_of
from metatrainer.pool.runpod_api import Runpod, key_from_environment
from metatrainer.pool.worker import Setup
from metatrainer.pool.workers import BODY, WorkerPool

BEATS = 10
"""Heartbeats in the time after which a pod without one ends itself."""


class RunpodPool(WorkerPool):
    """Rented pods, found again by the run that rented them."""

    def __init__(
        self,
        settings: RunSettings,
        secret_seed: int,
        ledger: Ledger,
        *,
        body: str = BODY,
        grace_seconds: float = GRACE_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ):
        """ledger: has the run entered. body: what the runners run, as module:factory.

        stop_seconds: see PodWorker. poll_seconds: between two looks at the list of pods.
        Raises ConfigError without a key.
        """
        self._rented = settings.runpod
        self._packed = settings.pool.packed
        self._api = Runpod(settings.runpod.url, key_from_environment(), poll_seconds)
        self.fleet = Fleet(settings, ledger, self._api, poll_seconds)
        self._pods = [
            PodWorker(
                number,
                body,
                Setup(slot=number, settings=settings, secret_seed=secret_seed),
                settings.runpod,
                self.fleet,
                stop_seconds,
            )
            for number in range(settings.pool.workers or 0)
        ]
        super().__init__(settings, self._pods, grace_seconds)
        self._coming: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self, *, all_pods: bool = False) -> None:
        """Find the run's pods, end those that are too many, rent the others.

        Returns once those that were there are found and one is up, or all_pods are; the others come
        while jobs run. Raises ConfigError, BudgetError, or PoolError with what the first pod that
        did not come up said if none did; then none is left.
        """
        try:
            there = await self.fleet.settle()
            self._coming = [asyncio.create_task(self._bring(n)) for n in range(len(self._pods))]
            await self._wait_for(self._coming[slot] for slot in sorted(there))
            if all_pods:
                await self._wait_for(self._coming)
            elif not there:
                await self._first()
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.close()
            raise

    async def close(self, *, keep_pods: bool = False) -> None:
        """End all pods, and with them what they were asked for.

        keep_pods: leave them to the next controller, or to their switches.
        """
        tasks = [*self._coming, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()
        try:
            if not keep_pods:
                await self.fleet.end_all()
        finally:
            await self._api.close()

    async def _bring(self, number: int) -> None:
        """Have a pod up; until it is, nobody is given a place on it."""
        worker = self._pods[number]
        lanes = [self._lanes.occupy(number) for _ in range(self._packed)]
        try:
            await worker.start()
        except PoolError:
            self._lanes.give_back_dead(lanes.pop())
            raise
        finally:
            for lane in lanes:
                self._lanes.give_back(lane)
        for key in worker.held[: self._packed]:
            if job := job_of(key):
                self._adopt(*job, number)

    async def _wait_for(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Wait for pods; one that does not come up is none, unless all of the pool are so."""
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        faults = [error for error in ended if isinstance(error, BaseException)]
        for error in faults:
            if not isinstance(error, PoolError) or len(faults) == len(self._pods):
                raise error

    async def _first(self) -> None:
        """Wait until one pod is up. Raises what the first said if none is, or will be."""
        left = set(self._coming)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return
                if not isinstance(error, PoolError):
                    raise error
        await self._coming[0]

    async def _watch(self) -> None:
        """Keep pods alive that are wanted, and end those that are not."""
        seconds = min(self._rented.deadman_seconds / BEATS, self._rented.idle_seconds / 2)
        while True:
            await asyncio.sleep(seconds)
            calls = [call for pod in self._pods for call in (pod.beat(), pod.rest())]
            await asyncio.gather(*calls, return_exceptions=True)


def check() -> None:
    """See that there are a key and an ssh client. Raises ConfigError."""
    key_from_environment()
    ssh.check_installed()
