"""What an account has rented for metatrainer, by run: shown, ended, compared with the bill.

For people, beside any run or after it. Knows nothing about jobs or what runs on a pod.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from metatrainer import money
from metatrainer.errors import LedgerError
from metatrainer.ledger import Ledger
from metatrainer.pool.pods import fleet_name, fleet_of
from metatrainer.pool.runpod_api import Pod, Runpod, key_from_environment
from metatrainer.rundir import RUNS, RunDir

RunState = Literal["live", "dead", "unknown"]
"""live: a controller has the run's ledger. dead: none has. unknown: the run is not here."""


@dataclass(frozen=True)
class Rented:
    """A pod and the run that it is of."""

    name: str
    id: str
    gpu: str
    status: str
    usd_per_hour: float
    run: str | None
    """The run's folder, where it is below this one."""
    state: RunState

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cost:
    """One pod: what the ledger has counted, and what the provider's bill says."""

    name: str
    id: str
    gpu: str
    usd_per_hour: float
    hours: float
    counted: float
    billed: float | None
    """None where the bill does not name the pod (yet)."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@asynccontextmanager
async def account(url: str) -> AsyncIterator[Runpod]:
    """The account of the key in the environment. Raises ConfigError without one."""
    api = Runpod(url, key_from_environment())
    try:
        yield api
    finally:
        await api.close()


async def rented(api: Runpod, more: Sequence[RunDir] = ()) -> list[Rented]:
    """All pods of ours, by name. more: runs to look at besides those in runs/."""
    runs = _runs([*(RunDir(path.parent) for path in RUNS.glob("*/ledger.sqlite")), *more])
    pods = sorted((pod for pod in await api.pods() if fleet_of(pod)), key=lambda pod: pod.name)
    return [_row(pod, runs.get(fleet_of(pod))) for pod in pods]


async def end(api: Runpod, rows: Sequence[Rented]) -> None:
    """End pods, and enter it in the ledgers of their runs where no controller has them."""
    for row in rows:
        await api.terminate(row.id)
        if row.run and row.state == "dead":
            with Ledger(RunDir(Path(row.run)).ledger) as ledger:
                ledger.end_pod(row.id)


async def costs(api: Runpod, run: RunDir) -> list[Cost]:
    """Compare a run's pods with the bill; enters the bill where no controller has the run."""
    with Ledger(run.ledger, readonly=True) as ledger:
        pods = ledger.pods()
    if not pods:
        return []
    billed = await api.billed([pod.id for pod in pods], min(pod.began for pod in pods))
    if not in_use(run):
        with Ledger(run.ledger) as ledger, ledger.transaction():
            for id, usd in billed.items():
                ledger.bill_pod(id, usd)
    now = time.time()
    return [
        Cost(
            name=pod.name,
            id=pod.id,
            gpu=pod.gpu,
            usd_per_hour=pod.usd_per_hour,
            hours=((pod.ended or now) - pod.began) / 3600.0,
            counted=money.pod_usd(pod, now),
            billed=billed.get(pod.id),
        )
        for pod in pods
    ]


def in_use(run: RunDir) -> bool:
    """Whether a controller has the run's ledger."""
    try:
        Ledger(run.ledger).close()
    except LedgerError:
        return True
    return False


def _runs(found: Sequence[RunDir]) -> dict[str, RunDir]:
    """Runs by the name of their fleet."""
    named = {}
    for run in found:
        if not run.ledger.exists():
            continue
        with Ledger(run.ledger, readonly=True) as ledger:
            if row := ledger.run():
                named[fleet_name(row.id, row.hidden_seed)] = run
    return named


def _row(pod: Pod, run: RunDir | None) -> Rented:
    state: RunState = "unknown" if run is None else "live" if in_use(run) else "dead"
    return Rented(
        name=pod.name,
        id=pod.id,
        gpu=pod.gpu.id if pod.gpu else "",
        status=pod.status,
        usd_per_hour=pod.usd_per_hour,
        run=str(run.path) if run else None,
        state=state,
    )
