"""The Runpod back end on the loopback: a stand-in for the service, real sshds as its pods."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pool_bodies as bodies
import pytest
import runpod_server
from runpod_server import CHEAP, DEAR, OWNER_KEY, RARE, FakeRunpod
from test_local import alive, make_order, runs, started

from metatrainer.config import RunSettings, parse_config
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.runpod import RunpodPool

pytestmark = pytest.mark.skipif(
    shutil.which("sshd") is None and not Path("/usr/sbin/sshd").exists(),
    reason="needs sshd; scripts/sshd installs it",
)
STAND_IN = "pool_bodies:StandIn"
SEED = 7


@pytest.fixture
def runpod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunpod]:
    monkeypatch.setenv("RUNPOD_API_KEY", OWNER_KEY)
    with runpod_server.serving(tmp_path / "pods") as fake:
        yield fake


def settings(fake: FakeRunpod, workers: int = 1, packed: int = 1, **more: Any) -> RunSettings:
    given: dict[str, Any] = {
        "pool": {"kind": "runpod", "workers": workers, "packed": packed},
        "runpod": {"gpus": [DEAR, CHEAP], "url": fake.url, "boot_seconds": 20.0},
        "money": {"usd_per_slot_hour": 5.0},
        "limits": {"max_seconds": 15.0},
    }
    import sys

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
        assert {row.gpu for row in ledger.pods()} == {CHEAP}
        for order in orders:
            assert jobdir.read_result(order.job_dir, order.job_id)
        assert len(await pool.baselines("persona")) == 2

    with_pool(runpod, tmp_path, action, settings(runpod, workers=2))
    assert len(runpod.created) == 2
