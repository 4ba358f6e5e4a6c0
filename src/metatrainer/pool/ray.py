"""A pool on a Ray cluster: every worker is a detached actor on some node, each takes several jobs.

An actor outlives the controller: the next one finds it by name, with the jobs that it runs. All
nodes see the run's folder under the same path; job folders and results are files there, as on one
machine. Ray itself retries nothing, so that the ledger knows of every attempt.

Knows nothing about what a job does. Never starts a cluster, only joins one.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from metatrainer.config import PoolSettings, RunSettings
from metatrainer.errors import ConfigError, PoolError, WorkerFault
from metatrainer.pool.base import GRACE_SECONDS, LOST, slots_of
from metatrainer.pool.process import STOP_SECONDS
from metatrainer.pool.worker import Setup, answer, make_body
from metatrainer.pool.workers import BODY, WorkerPool, attempt_key

RESOURCE = "metatrainer_worker"
"""Custom resource of a node: how many workers it takes."""
START_SECONDS = 120.0
KNOCK_SECONDS = 10.0
IDLE_SECONDS = 1800.0
"""An actor that nobody has asked for anything for so long ends: its run does not come back."""


class RayPool(WorkerPool):
    """Detached actors, found again by the run that started them."""

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
        self._where = settings.pool
        # A name that all controllers of the run know, from the one thing that is the run's alone.
        digest = hashlib.sha256(f"metatrainer {secret_seed}".encode()).hexdigest()
        self._namespace = f"metatrainer-{digest[:16]}"
        actors = [
            RayWorker(
                f"worker-{number}",
                body,
                Setup(slot=number, settings=settings, secret_seed=secret_seed),
                settings.pool.packed,
                stop_seconds,
            )
            for number in range(slots_of(settings.pool) // settings.pool.packed)
        ]
        super().__init__(settings, actors, grace_seconds)
        self._actors = actors

    async def start(self) -> None:
        """Join the cluster, find the run's actors there, start those that are missing.

        Raises ConfigError without Ray or a cluster, PoolError if its nodes take too few workers.
        """
        await asyncio.to_thread(_join, self._where, self._namespace, len(self._actors))
        await super().start()
        for number, actor in enumerate(self._actors):
            for key in actor.held:
                job_id, _, attempt = key.rpartition("/")
                if job_id:  # else a baseline, which is measured again
                    self._adopt(job_id, int(attempt), number)

    async def close(self) -> None:
        """End all actors and leave the cluster."""
        await super().close()
        await asyncio.to_thread(_leave)


class RayWorker:
    """One actor as seen from the pool; asked in the same way as a WorkerProcess."""

    def __init__(self, name: str, factory: str, setup: Setup, packed: int, stop_seconds: float):
        self._name = name
        self._factory = factory
        self._setup = setup
        self._packed = packed
        self._stop_seconds = stop_seconds
        self._actor: Any = None
        self._starting = asyncio.Lock()
        self.held: list[str] = []
        """Attempts that it was already at when it was found."""

    async def start(self) -> None:
        """Find the actor or make it, and wait until it is ready. Raises PoolError."""
        async with self._starting:
            if self._actor is not None:
                return
            actor = await asyncio.to_thread(self._find_or_make)
            try:
                self.held = await asyncio.wait_for(_result(actor.held.remote()), START_SECONDS)
            except TimeoutError:
                await asyncio.to_thread(_kill, actor)
                raise PoolError(
                    f"{self._name} is not up after {START_SECONDS:.0f} s; do the cluster's nodes"
                    f" have {RESOURCE} left? see: ray status"
                ) from None
            except _ray_error() as error:
                raise PoolError(f"{self._name} does not start: {_first_line(error)}") from None
            self._actor = actor

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer; others may be under way. Raises WorkerFault.

        An actor that dies may have been on a node that did, so no job in it is to blame.
        """
        actor = self._actor
        if actor is None:
            raise WorkerFault(LOST, "its worker is gone")
        order = request.get("order")
        id = attempt_key(order["job_id"], order["attempt"]) if order else os.urandom(8).hex()
        future = _result(actor.ask.remote(id, request))
        try:
            given = await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            await self._stop(actor, id, future)
            raise WorkerFault("timeout", f"no answer in {seconds:.0f} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._stop(actor, id, future))
            raise
        except _ray_error() as error:
            self._forget(actor)
            raise WorkerFault(LOST, f"its actor is gone: {_first_line(error)}") from None
        if "error" in given:
            raise WorkerFault(LOST, given["error"])
        return dict(given)

    async def close(self) -> None:
        """Kill the actor, and what it was asked for with it."""
        if actor := self._actor:
            self._forget(actor)
            await asyncio.to_thread(_kill, actor)

    def _find_or_make(self) -> Any:
        import ray

        remote = ray.remote(
            name=self._name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=self._packed + _SPARE_THREADS,
            num_cpus=0,
            resources={RESOURCE: 1},
        )
        return remote(Host).remote(self._factory, self._setup.model_dump(mode="json"))

    async def _stop(self, actor: Any, id: str, future: asyncio.Future[Any]) -> None:
        """Bring a request to its end: by asking, else by killing the actor."""
        actor.cancel.remote(id)
        done, _ = await asyncio.wait([future], timeout=self._stop_seconds)
        if not done:
            self._forget(actor)
            await asyncio.to_thread(_kill, actor)
            await asyncio.wait([future])
        future.exception()  # nobody waits for it any more

    def _forget(self, actor: Any) -> None:
        if self._actor is actor:
            self._actor = None


@dataclass
class _Request:
    stop: threading.Event = field(default_factory=threading.Event)
    answer: Future[dict[str, Any]] = field(default_factory=Future)


_SPARE_THREADS = 2
"""Threads of an actor for calls that are no jobs."""


class Host:
    """What an actor is: a body, and the requests that it is at. Ray calls it in several threads."""

    def __init__(self, factory: str, setup: dict[str, Any]):
        self._body = make_body(factory, Setup.model_validate(setup))
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._asked_at = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def held(self) -> list[str]:
        """The requests that are under way."""
        return list(self._requests)

    def ask(self, id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked, or wait for it where somebody has asked it before."""
        with self._lock:
            known = self._requests.get(id)
            mine = self._requests.setdefault(id, _Request())
            self._asked_at = time.monotonic()
        if known is not None:
            return known.answer.result()
        mine.answer.set_result(answer(self._body, request, mine.stop))
        with self._lock:
            del self._requests[id]
            self._asked_at = time.monotonic()
        return mine.answer.result()

    def cancel(self, id: str) -> None:
        """Tell a request to stop."""
        if request := self._requests.get(id):
            request.stop.set()

    def _watch(self) -> None:
        """End the process once nobody wants it any more."""
        while self._requests or time.monotonic() - self._asked_at < IDLE_SECONDS:
            time.sleep(IDLE_SECONDS / 100)
        os._exit(0)


def check(settings: PoolSettings) -> str:
    """See that Ray is installed and that a cluster's head listens; returns its address.

    Raises ConfigError.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'pool.kind is "ray", which is not installed; pip install "metatrainer[ray]"'
        )
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        raise ConfigError(
            'pool.kind is "ray": give the address of its head in pool.address or RAY_ADDRESS'
        )
    host, _, port = address.rpartition(":")
    if host and port.isdigit():  # Ray itself would wait for it without end
        try:
            socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, settings.workers, error) from None
    return address


def _join(settings: PoolSettings, namespace: str, workers: int) -> None:
    address = check(settings)
    import ray

    try:
        ray.init(address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, workers, error) from None
    there = int(ray.cluster_resources().get(RESOURCE, 0))
    if there < workers:
        _leave()
        raise ConfigError(
            f"pool.workers is {workers}, but the nodes of {address} take {there} by their resource"
            f" {RESOURCE}; lower it, or start nodes with: ray start --address={address}"
            f" --resources='{{\"{RESOURCE}\": N}}'"
        )


def _no_cluster(address: str, workers: int | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"no Ray cluster at {address} ({_first_line(error)}); start one with: ray start --head"
        f" --resources='{{\"{RESOURCE}\": {workers}}}'"
    )


def _leave() -> None:
    import ray

    ray.shutdown()


def _kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def _result(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


def _ray_error() -> type[Exception]:
    import ray

    error: type[Exception] = ray.exceptions.RayError
    return error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
