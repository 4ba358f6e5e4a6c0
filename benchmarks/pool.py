"""The pool: how full it keeps its slots, and what it costs a job.

    python benchmarks/pool.py [--jobs 200] [--repeats 3] [--ray] [--ssh] [--json]

Utilisation is simulated: the pool's own scheduling, with virtual time in place of workers, runs 54
batches of 40 jobs over 16 slots. Durations are spread as the pod bills of the original experiment
imply (0.13 to 0.30 dollars a job at 2.69 an hour: 174 to 401 s); 3 % of the attempts fail in a
random moment and are run again; a job's length is guessed with an error of 15 %. Episodes of a
batch become valid over the first minute. The share of slot time that went into jobs that ended well
is given from a batch's first job to its last (waste of the scheduling) and over the whole run, with
a minute for the agent's update between batches; for 16 workers of one slot, longest first and as
they come, and for 4 workers of 4 slots, whose jobs slow each other down as measured on a GPU (4
packed jobs get 1.92 times the work of one done) and so end sooner when they get fewer.

Overhead is measured: the time of a job that does nothing, through a real worker process, one after
another and many at a time; with --ray also through an actor of a cluster that is started here (on
a machine without a network: unshare -n sh -c 'ip link set lo up; python benchmarks/pool.py --ray');
with --ssh also through a rented pod: the tests' stand-in for Runpod, whose pod is a real sshd on
the loopback, so that the way to a real pod and back comes on top. Quote the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metatrainer.config import MoneySettings, PoolSettings, RunpodSettings, RunSettings
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.lanes import Lanes
from metatrainer.pool.local import LocalPool
from metatrainer.pool.ray import RESOURCE, RayPool
from metatrainer.pool.runpod import RunpodPool
from metatrainer.pool.workers import WorkerPool

BODY = "pool:NoWork"
ONE = PoolSettings(workers=1, packed=4)
BATCHES, JOBS, SLOTS = 54, 40, 16
SHORTEST, LONGEST = 174.0, 401.0
FAILURES, GUESS_ERROR = 0.03, 0.15
ARRIVAL, UPDATE = 60.0, 60.0
PACKING_GAIN = 0.47
"""k packed jobs get k to this power of the work of one done: 1.92 for 4."""


class NoWork:
    """A worker's body that has nothing to do."""

    def __init__(self, setup: Any): ...

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        return JobResult(job_id=order.job_id, attempt=order.attempt, outcome="ok")

    def close(self) -> None: ...


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing that happens."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, heapq.nsmallest(1, self._scheduled)[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Shared:
    """A worker whose jobs share it: the more there are, the slower is each."""

    def __init__(self) -> None:
        self._jobs = 0
        self._changed = asyncio.Event()

    async def work(self, seconds: float) -> None:
        """Take what `seconds` of a worker of one's own would do."""
        self._change(1)
        loop = asyncio.get_running_loop()
        left = seconds
        while left > 1e-6:
            began, speed = loop.time(), self._jobs ** (PACKING_GAIN - 1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left / speed)
            left -= (loop.time() - began) * speed
        self._change(-1)

    def _change(self, by: int) -> None:
        self._jobs += by
        self._changed.set()
        self._changed = asyncio.Event()


def simulate(seed: int, packed: int, longest_first: bool) -> dict[str, float]:
    """Utilisation within batches and over the run, jobs done and attempts lost."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_run(random.Random(seed), packed, longest_first))
    finally:
        loop.close()


async def _run(rng: random.Random, packed: int, longest_first: bool) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    lanes = Lanes(SLOTS // packed, packed)
    workers = [Shared() for _ in range(SLOTS // packed)]
    done = lost = 0
    busy = held = 0.0
    began: list[float] = []

    async def job(seconds: float, arrives: float) -> None:
        nonlocal done, lost, busy
        await asyncio.sleep(arrives)
        guess = seconds * (1 + rng.uniform(-GUESS_ERROR, GUESS_ERROR)) if longest_first else 0.0
        while True:
            lane = await lanes.take("student", expected=guess)
            began_at = loop.time()
            began.append(began_at)
            fails = rng.random() < FAILURES
            await workers[lane.worker].work(seconds * rng.random() if fails else seconds)
            busy += 0.0 if fails else loop.time() - began_at
            lane.faulty = fails
            lanes.give_back(lane)
            lost += fails
            if not fails:
                done += 1
                return

    for _ in range(BATCHES):
        began.clear()
        lengths = [rng.uniform(SHORTEST, LONGEST) for _ in range(JOBS)]
        await asyncio.gather(*(job(length, rng.uniform(0, ARRIVAL)) for length in lengths))
        held += SLOTS * (loop.time() - min(began))
        await asyncio.sleep(UPDATE)
    return {
        "batches": busy / held,
        "whole_run": busy / (SLOTS * loop.time()),
        "jobs": done,
        "lost_attempts": lost,
    }


async def overhead(
    jobs: int, make: Callable[[RunSettings], WorkerPool], settings: RunSettings
) -> dict[str, float]:
    """Milliseconds of a job that does nothing: one after another, and all at once."""
    with tempfile.TemporaryDirectory() as folder:
        orders = [_order(Path(folder), n) for n in range(2 * jobs)]
        pool = make(settings)
        await pool.start()
        try:
            began = time.perf_counter()
            for order in orders[:jobs]:
                await pool.run(order)
            after = time.perf_counter()
            await asyncio.gather(*(pool.run(order) for order in orders[jobs:]))
            end = time.perf_counter()
        finally:
            await pool.close()
    return {"one_by_one_ms": 1e3 * (after - began) / jobs, "at_once_ms": 1e3 * (end - after) / jobs}


def _order(folder: Path, n: int) -> JobOrder:
    order = JobOrder(
        job_id=f"job-{n}", family="persona", job_dir=folder / f"job-{n}", student="s", seed=0
    )
    jobdir.create(order, {"job.toml": ""})
    return order


def here(jobs: int) -> dict[str, float]:
    """In a worker process of this machine."""

    def make(settings: RunSettings) -> WorkerPool:
        return LocalPool(settings, 0, body=BODY)

    return asyncio.run(overhead(jobs, make, RunSettings(pool=ONE)))


def on_ray(jobs: int, repeats: int) -> list[dict[str, float]]:
    """The same on a cluster of one node."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "resources": {RESOURCE: 1}}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    where = {"kind": "ray", "address": cluster.address}
    settings = RunSettings(pool=ONE.model_copy(update=where))

    def make(settings: RunSettings) -> WorkerPool:
        return RayPool(settings, 0, body=BODY)

    try:
        return [asyncio.run(overhead(jobs, make, settings)) for _ in range(repeats)]
    finally:
        cluster.shutdown()


def over_ssh(jobs: int) -> dict[str, float]:
    """On a pod behind an sshd."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/pool"))
    import runpod_server

    os.environ["RUNPOD_API_KEY"] = runpod_server.OWNER_KEY
    with (
        tempfile.TemporaryDirectory() as folder,
        runpod_server.serving(Path(folder, "pods")) as fake,
        Ledger(Path(folder, "run/ledger.sqlite")) as ledger,
    ):
        ledger.create_run("bench", "nano", "{}", 0, {}, 0)
        rented = {"gpus": (runpod_server.CHEAP,), "url": fake.url, "python": sys.executable}
        settings = RunSettings(
            pool=ONE.model_copy(update={"kind": "runpod"}),
            runpod=RunpodSettings.model_validate(rented),
            money=MoneySettings(usd_per_slot_hour=1.0),
        )

        def make(settings: RunSettings) -> WorkerPool:
            return RunpodPool(settings, 0, ledger, body=BODY, poll_seconds=0.1)

        return asyncio.run(overhead(jobs, make, settings))


def measure(jobs: int, repeats: int, ray: bool, ssh: bool) -> dict[str, Any]:
    """All figures."""
    import _machine  # here, as workers import this file for their body

    simulated = {
        name: _median([simulate(seed, packed, longest_first) for seed in range(repeats)])
        for name, packed, longest_first in (
            ("packed_by_4", 4, True),
            ("one_a_worker", 1, True),
            ("one_a_worker_as_they_come", 1, False),
        )
    }
    spent = {"local": _median([here(jobs) for _ in range(repeats)])}
    if ray:
        spent["ray"] = _median(on_ray(jobs, repeats))
    if ssh:
        spent["ssh"] = _median([over_ssh(jobs) for _ in range(repeats)])
    return {**_machine.facts(), "utilisation": simulated, "overhead": spent}


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--ssh", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, sys.path)])
    figures = measure(given.jobs, given.repeats, given.ray, given.ssh)
    if given.json:
        print(json.dumps(figures, indent=2))
        return
    for name, row in figures["utilisation"].items():
        print(f"{name}: {row['batches']:.1%} of slot time in jobs, {row['whole_run']:.1%} of all")
    for name, row in figures["overhead"].items():
        print(f"{name}: {row['one_by_one_ms']:.2f} ms a job, {row['at_once_ms']:.2f} ms packed")


if __name__ == "__main__":
    main()
