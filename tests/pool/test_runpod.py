"""The Runpod back end on the loopback: a stand-in for the service, real sshds as its pods."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pool_bodies as bodies
from runpod_server import CHEAP, DEAR, RARE, FakeRunpod
from test_local import alive, make_order, runs, started

from metatrainer.config import RunSettings, parse_config
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.pods import fleet_name
from metatrainer.pool.runpod import RunpodPool

STAND_IN = "pool_bodies:OnPod"
SEED = 7


def settings(fake: FakeRunpod, workers: int = 1, packed: int = 1, **more: Any) -> RunSettings:
    given: dict[str, Any] = {
        "pool": {"kind": "runpod", "workers": workers, "packed": packed},
        "runpod": {"gpus": [DEAR, CHEAP], "url": fake.url, "boot_seconds": 20.0},
        "money": {"usd_per_slot_hour": 5.0},
        "limits": {"max_seconds": 15.0},
    }
    given["runpod"]["python"] = sys.executable
    for table, values in more.items():
        given[table] = {**given.get(table, {}), **values}
    return parse_config(given)


def open_ledger(folder: Path, chosen: RunSettings) -> Ledger:
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.create_run("run", "nano", chosen.model_dump_json(), 0, {}, SEED)
    return ledger


def make(chosen: RunSettings, ledger: Ledger, body: str = STAND_IN) -> RunpodPool:
    return RunpodPool(
        chosen, SEED, ledger, body=body, grace_seconds=15.0, stop_seconds=0.3, poll_seconds=0.05
    )


def with_pool(
    fake: FakeRunpod,
    folder: Path,
    action: Callable[[RunpodPool, Ledger], Awaitable[None]],
    chosen: RunSettings | None = None,
    body: str = STAND_IN,
    all_pods: bool = True,
) -> None:
    """Run an action on a started pool, and check that no pod outlives it."""
    chosen = chosen or settings(fake)

    async def main() -> None:
        with open_ledger(folder, chosen) as ledger:
            pool = make(chosen, ledger, body)
            await pool.start(all_pods=all_pods)
            try:
                await action(pool, ledger)
            finally:
                await pool.close()
            assert all(row.ended is not None for row in ledger.pods())

    asyncio.run(main())
    assert not fake.pods


def test_jobs_share_warm_pods_and_each_runs_once(runpod: FakeRunpod, tmp_path: Path) -> None:
    orders = [make_order(tmp_path, f"job-{i}") for i in range(5)]

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        results = await asyncio.gather(*(pool.run(order) for order in orders))
        assert [r.job_id for r in results] == [o.job_id for o in orders]
        assert {r.outcome for r in results} == {"ok"}
        assert {(row.gpu, row.usd_per_hour) for row in ledger.pods()} == {(CHEAP, 0.5)}
        assert len(await pool.baselines("persona")) == 2

    with_pool(runpod, tmp_path, action, settings(runpod, workers=2))
    assert len(runpod.created) == 2
    assert [len(runs(order)) for order in orders] == [1] * 5
    for order in orders:
        done = jobdir.read_result(order.job_dir, order.job_id)
        assert done and done.adapter == order.job_dir / "adapter"
        # A pod sends back what is asked for and nothing else.
        names = {path.name for path in done.adapter.iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_kind_that_is_out_of_stock_is_followed_by_the_next(
    runpod: FakeRunpod, tmp_path: Path
) -> None:
    runpod.no_stock.add(CHEAP)

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        assert [row.gpu for row in ledger.pods()] == [DEAR]

    with_pool(runpod, tmp_path, action, settings(runpod, runpod={"gpus": [DEAR, RARE, CHEAP]}))
    # The one that the catalogue says is out of stock was not asked for.
    assert runpod.calls.count("POST /pods") == 2


def test_limits_and_passing_faults_are_waited_out(runpod: FakeRunpod, tmp_path: Path) -> None:
    runpod.answers = [
        (429, {"RateLimit": '"default";r=0;t=1'}, {"detail": "too many requests"}),
        (503, {}, {"detail": "maintenance"}),
        (429, {"Retry-After": "0.1"}, {"detail": "too many requests"}),
    ]
    order = make_order(tmp_path, "job")

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        assert (await pool.run(order)).outcome == "ok"

    with_pool(runpod, tmp_path, action)


def test_a_pod_whose_creation_was_not_confirmed_is_found(
    runpod: FakeRunpod, tmp_path: Path
) -> None:
    runpod.lost_creates = 1
    order = make_order(tmp_path, "job")

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        assert (await pool.run(order)).outcome == "ok"

    with_pool(runpod, tmp_path, action, all_pods=False)
    assert len(runpod.created) == 1


def test_pods_that_move_are_followed(runpod: FakeRunpod, tmp_path: Path) -> None:
    order = make_order(tmp_path, "job", bodies.WAIT)

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        task = asyncio.create_task(pool.run(order))
        await started(order)
        await asyncio.to_thread(runpod.move, runpod.by_name("slot-00"))
        (order.job_dir / "go").touch()
        assert (await task).outcome == "ok"

    runpod.stale.add(f"{fleet_name('run', SEED)}-slot-00")
    with_pool(runpod, tmp_path, action)
    assert not runpod.stale
    assert len(runs(order)) == len(runpod.created) == 1


def test_a_pod_that_vanishes_costs_an_attempt_and_no_job(
    runpod: FakeRunpod, tmp_path: Path
) -> None:
    order = make_order(tmp_path, "job", bodies.WAIT)

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        task = asyncio.create_task(pool.run(order))
        await started(order)
        await asyncio.to_thread(runpod.vanish, runpod.by_name("slot-00"))
        lost = await task
        assert (lost.outcome, lost.message) == ("lost", "its pod is gone")
        assert jobdir.read_result(order.job_dir, "job") is None
        (order.job_dir / "go").touch()
        again = await pool.run(order.model_copy(update={"attempt": 2}))
        assert (again.outcome, again.attempt) == ("ok", 2)
        assert [row.ended is None for row in ledger.pods()] == [False, True]

    with_pool(runpod, tmp_path, action)
    assert len(runs(order)) == len(runpod.created) == 2


def test_a_crash_is_the_jobs_and_a_hung_job_is_ended(runpod: FakeRunpod, tmp_path: Path) -> None:
    crash, hang = make_order(tmp_path, "crash", bodies.EXIT), make_order(tmp_path, "h", bodies.HANG)
    heed = make_order(tmp_path, "heed", bodies.HEED)

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        crashed = await pool.run(crash)
        assert (crashed.outcome, "out of memory" in crashed.message) == ("crashed", True)
        for order in (heed, hang):
            task = asyncio.create_task(pool.run(order))
            pid = await started(order)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert alive(pid) == (order is heed)
            assert jobdir.read_result(order.job_dir, order.job_id) is None
        assert (await pool.run(make_order(tmp_path, "after"))).outcome == "ok"

    with_pool(runpod, tmp_path, action)
    assert len(runpod.created) == 1  # a runner that dies is started again on its pod


def test_an_idle_pod_is_ended_and_another_rented_for_the_next_job(
    runpod: FakeRunpod, tmp_path: Path
) -> None:
    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        assert (await pool.run(make_order(tmp_path, "first"))).outcome == "ok"
        while runpod.pods:
            await asyncio.sleep(0.02)
        assert (await pool.run(make_order(tmp_path, "second"))).outcome == "ok"

    with_pool(runpod, tmp_path, action, settings(runpod, runpod={"idle_seconds": 0.2}))
    assert len(runpod.created) == 2


def test_a_pod_whose_controller_is_gone_ends_itself(runpod: FakeRunpod, tmp_path: Path) -> None:
    chosen = settings(runpod, runpod={"deadman_seconds": 1.0})
    order = make_order(tmp_path, "job", bodies.WAIT)

    async def main() -> None:
        with open_ledger(tmp_path, chosen) as ledger:
            pool = make(chosen, ledger)
            await pool.start()
            await asyncio.sleep(2.0)
            assert runpod.pods  # while the controller lives, so does the pod
            task = asyncio.create_task(pool.run(order))
            pid = await started(order)
            for each in asyncio.all_tasks() - {asyncio.current_task()}:  # kill -9, for the pod
                each.cancel()
            monkey = pool.fleet._api
            await monkey.close()
            await asyncio.gather(task, return_exceptions=True)
            deadline = asyncio.get_running_loop().time() + 20
            while runpod.pods or alive(pid):
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.05)

    asyncio.run(main())
