"""Run in a network namespace of its own: a cluster of three nodes, and what is done to it.

Prints one JSON object. The parent process checks it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pool_bodies as bodies
from ray.cluster_utils import Cluster

from metatrainer.config import LimitSettings, PoolSettings, RunSettings
from metatrainer.errors import ConfigError
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.ray import RESOURCE, RayPool

WORKERS, PACKED = 3, 2


def pool_at(address: str, workers: int = WORKERS) -> RayPool:
    settings = RunSettings(
        pool=PoolSettings(kind="ray", workers=workers, packed=PACKED, address=address),
        limits=LimitSettings(max_seconds=5.0),
    )
    return RayPool(settings, 7, body="pool_bodies:StandIn", grace_seconds=10.0, stop_seconds=0.5)


def make_order(root: Path, name: str, seed: int = bodies.OK, attempt: int = 1) -> JobOrder:
    order = JobOrder(
        job_id=name,
        attempt=attempt,
        family="persona",
        job_dir=root / name,
        student="nano-wren",
        seed=seed,
    )
    jobdir.create(order, {"job.toml": ""})
    return order


def runs(order: JobOrder) -> list[int]:
    path = order.job_dir / "runs"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def started(order: JobOrder) -> int:
    while not runs(order):
        await asyncio.sleep(0.02)
    return runs(order)[-1]


def go(order: JobOrder) -> None:
    (order.job_dir / "go").touch()


async def until_over(pool: RayPool, order: JobOrder) -> JobResult:
    """What an episode does: the next attempt after one that was lost."""
    result = await pool.run(order)
    while result.outcome == "lost":
        order = order.model_copy(update={"attempt": order.attempt + 1})
        result = await pool.run(order)
    return result


async def a_batch(pool: RayPool, root: Path) -> dict[str, Any]:
    orders = [make_order(root, f"job-{n}") for n in range(12)]
    began = time.perf_counter()
    results = await asyncio.gather(*(pool.run(order) for order in orders))
    return {
        "outcomes": sorted({result.outcome for result in results}),
        "runs": [len(runs(order)) for order in orders],
        "processes": len({runs(order)[0] for order in orders}),
        "ms_per_job": 1e3 * (time.perf_counter() - began) / len(orders),
    }


async def a_hung_job(pool: RayPool, root: Path) -> dict[str, Any]:
    """It does not stop when told: its worker goes, and the others run on."""
    hung = make_order(root, "hung", bodies.HANG)
    heeding = make_order(root, "heeding", bodies.HEED)
    tasks = [asyncio.create_task(pool.run(hung))]
    pid = await started(hung)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    stopping = asyncio.create_task(pool.run(heeding))
    other = await started(heeding)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    after = await pool.run(make_order(root, "after-hung"))
    return {
        "hung_alive": Path(f"/proc/{pid}").exists(),
        "heeding_alive": Path(f"/proc/{other}").exists(),
        "open": [jobdir.read_result(o.job_dir, o.job_id) is None for o in (hung, heeding)],
        "after": after.outcome,
    }


async def a_node_that_dies(pool: RayPool, root: Path, cluster: Cluster) -> dict[str, Any]:
    """SIGKILL of everything on one node, and of the raylet alone on another, mid-job."""
    orders = [make_order(root, f"held-{n}", bodies.WAIT) for n in range(6)]
    tasks = [asyncio.create_task(until_over(pool, order)) for order in orders]
    for order in orders:
        await started(order)
    nodes = list(cluster.worker_nodes)
    nodes[0].kill_raylet()
    cluster.remove_node(nodes[1], allow_graceful=False)
    cluster.add_node(num_cpus=1, resources={RESOURCE: 3})
    for order in orders:
        go(order)
    results = await asyncio.wait_for(asyncio.gather(*tasks), 150)
    return {
        "outcomes": sorted({result.outcome for result in results}),
        "attempts": sum(result.attempt for result in results) - len(results),
        # No attempt runs twice: as many starts as there were attempts.
        "twice": [r.attempt - len(runs(o)) for r, o in zip(results, orders)],
    }


CONTROLLER = """
    import asyncio, sys
    from pathlib import Path
    import ray_scenario as scenario
    import pool_bodies as bodies

    async def main():
        pool = scenario.pool_at(sys.argv[1])
        await pool.start()
        order = scenario.make_order(Path(sys.argv[2]), "outlives", bodies.WAIT)
        await pool.run(order)

    asyncio.run(main())
"""


async def a_controller_that_dies(address: str, root: Path) -> dict[str, Any]:
    """Its job goes on, and the next controller hears how it ends."""
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONTROLLER), address, str(root)],
        stderr=subprocess.DEVNULL,
    )
    order = make_order(root, "outlives", bodies.WAIT)
    pid = await asyncio.wait_for(started(order), 60)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    await asyncio.sleep(2.0)
    pool = pool_at(address)
    await pool.start()
    held = pool.holds("outlives", 1)
    waiting = asyncio.create_task(pool.run(order))
    fresh = await pool.run(make_order(root, "fresh"))
    go(order)
    result = await asyncio.wait_for(waiting, 30)
    alive = Path(f"/proc/{pid}").exists()
    await pool.close()
    return {
        "held": held,
        "alive": alive,
        "outcomes": [result.outcome, fresh.outcome],
        "runs": runs(order) == [pid],
    }


async def what_cannot_be(address: str) -> dict[str, str]:
    said = {}
    for name, pool in {
        "few": pool_at(address, workers=99),
        "none": pool_at("127.0.0.1:1"),
    }.items():
        try:
            await pool.start()
        except ConfigError as error:
            said[name] = str(error)
    return said


async def main(root: Path) -> dict[str, Any]:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "resources": {RESOURCE: 1}}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={RESOURCE: 1})
    address = cluster.address
    try:
        report: dict[str, Any] = {"refused": await what_cannot_be(address)}
        report["restart"] = await a_controller_that_dies(address, root)
        pool = pool_at(address)
        await pool.start()
        report["batch"] = await a_batch(pool, root)
        report["hung"] = await a_hung_job(pool, root)
        report["nodes"] = await a_node_that_dies(pool, root, cluster)
        await pool.close()
        return report
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    print("REPORT" + json.dumps(asyncio.run(main(Path(sys.argv[1])))))
