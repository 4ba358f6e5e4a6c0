"""A run's rented pods: found again by their names, rented, waited for, ended; each in the ledger.

Knows names, kinds, caps and deadlines. Knows nothing about what runs on a pod.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from metatrainer import money
from metatrainer.config import RunSettings, nearest
from metatrainer.errors import ConfigError, LedgerError, PoolError
from metatrainer.ledger import Ledger
from metatrainer.pool.runpod_api import GpuType, Pod, Runpod
from metatrainer.pool.ssh import Keys

PREFIX = "metatrainer-"
"""How the names of all pods begin that are metatrainer's."""
POLL_SECONDS = 5.0
"""Between two looks at the list of pods."""
NAME_CHARS = 40
_SLOT = re.compile(r"(?P<fleet>.+)-slot-(?P<slot>\d+)")


def fleet_name(run: str, hidden_seed: int) -> str:
    """What the names of a run's pods begin with, the same for all of its controllers."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:NAME_CHARS]
    # Runs of one name on two machines may share an account.
    digest = hashlib.sha256(f"metatrainer pods {hidden_seed}".encode()).hexdigest()
    return f"{PREFIX}{plain}-{digest[:8]}"


def fleet_of(pod: Pod) -> str:
    """The fleet that a pod belongs to, by its name; empty if it is none of ours."""
    match = _SLOT.fullmatch(pod.name)
    return match["fleet"] if match and pod.name.startswith(PREFIX) else ""


def gpus_of(settings: RunSettings) -> int:
    """GPUs of a pod."""
    return settings.inner.gpus if settings.inner.trainer == "prime-rl" else 1


def pod_body(settings: RunSettings, name: str, gpu: str, public_key: str) -> dict[str, Any]:
    """What Runpod is asked for."""
    return {
        "name": name,
        "image": settings.runpod.image,
        "cloud": settings.runpod.cloud,
        "gpu": {"id": gpu, "count": gpus_of(settings)},
        "disk": settings.runpod.disk_gb,
        "ports": ["22/tcp"],
        "env": {"PUBLIC_KEY": public_key},
    }


def affordable(settings: RunSettings, catalogue: Sequence[GpuType]) -> list[tuple[float, GpuType]]:
    """GPU types that will do, with the price of a pod an hour, from the cheapest on.

    Raises ConfigError for a type that the catalogue does not have, and where all cost too much.
    """
    known = {gpu.id: gpu for gpu in catalogue}
    for id in settings.runpod.gpus:
        if id not in known:
            raise ConfigError(f"runpod.gpus: unknown {id!r}; {nearest(id, list(known))}")
    most = settings.money.usd_per_slot_hour * settings.pool.packed
    priced = [
        (each * gpus_of(settings), known[id])
        for id in settings.runpod.gpus
        if (each := known[id].usd_per_hour(settings.runpod.cloud)) is not None
    ]
    if priced and min(price for price, _ in priced) > most:
        price, gpu = min(priced, key=lambda pair: pair[0])
        raise ConfigError(
            f"money.usd_per_slot_hour allows {most:g} an hour for a pod, and the cheapest of"
            f" runpod.gpus, {gpu.id}, costs {price:g}; raise it or name other GPUs"
        )
    return sorted((pair for pair in priced if pair[0] <= most), key=lambda pair: pair[0])


class Fleet:
    """The pods of one run. Of several tasks that ask, one looks or rents at a time."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        api: Runpod,
        poll_seconds: float = POLL_SECONDS,
    ):
        """ledger: has the run entered. poll_seconds: see POLL_SECONDS."""
        run = ledger.run()
        if run is None:
            raise LedgerError(f"{ledger.path} has no run; create_run comes before its pods")
        self.name = fleet_name(run.id, run.hidden_seed)
        self.keys = Keys(ledger.path.parent / "ssh")
        self.poll_seconds = poll_seconds
        self._settings = settings
        self._ledger = ledger
        self._api = api
        self._renting = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._seen: list[Pod] = []
        self._seen_at = -1e9

    def slot_name(self, slot: int) -> str:
        """The name of a slot's pod."""
        return f"{self.name}-slot-{slot:02d}"

    async def settle(self) -> set[int]:
        """End what earlier controllers have left over; the slots that have a pod."""
        pods = await self._mine()
        wanted = {self.slot_name(slot): slot for slot in range(self._settings.pool.workers or 0)}
        kept: dict[int, Pod] = {}
        for pod in pods:
            slot = wanted.get(pod.name)
            if slot is None or pod.over or slot in kept:
                await self.end(pod.id)
            else:
                kept[slot] = pod
                self._enter(pod)
        alive = {pod.id for pod in kept.values()}
        for row in self._ledger.pods():
            if row.ended is None and row.id not in alive:
                self._ledger.end_pod(row.id)
        return set(kept)

    async def ready(self, slot: int, answers: Callable[[Pod], Awaitable[bool]]) -> Pod:
        """A slot's pod: the one that is there, else a new one, once it answers.

        answers: asked as soon as the pod has an address, until it says yes. Raises PoolError for
        a pod that does not come up (it is ended), and where none can be had; BudgetError;
        ConfigError.
        """
        deadline = time.monotonic() + self._settings.runpod.boot_seconds
        async with self._renting:
            pod: Pod | None = await self._find_or_rent(self.slot_name(slot))
        assert pod is not None
        id = pod.id
        try:
            while pod is not None and not pod.over:
                if pod.status == "RUNNING" and pod.address and await answers(pod):
                    return pod
                if time.monotonic() > deadline:
                    seconds = self._settings.runpod.boot_seconds
                    why = f"did not answer in {seconds:g} s (it is {pod.status})"
                    raise PoolError(f"{self.slot_name(slot)} {why}; it was ended")
                await asyncio.sleep(self.poll_seconds)
                pod = await self.look(id)
            raise PoolError(f"{self.slot_name(slot)} ended while it started")
        except (PoolError, ConfigError):
            await self.end(id)
            raise

    async def look(self, id: str) -> Pod | None:
        """How a pod is, a few seconds old at most; None if it is gone."""
        async with self._looking:
            if time.monotonic() - self._seen_at > self.poll_seconds / 2:
                self._seen = await self._api.pods()
                self._seen_at = time.monotonic()
        return next((pod for pod in self._seen if pod.id == id), None)

    async def end(self, id: str) -> None:
        """Terminate a pod, whether it is there or not."""
        await self._api.terminate(id)
        self._ledger.end_pod(id)

    async def end_all(self) -> list[Pod]:
        """Terminate all pods of the run; those that were there."""
        pods = await self._mine()
        await asyncio.gather(*(self.end(pod.id) for pod in pods))
        for row in self._ledger.pods():
            self._ledger.end_pod(row.id)
        return pods

    async def _mine(self) -> list[Pod]:
        return [pod for pod in await self._api.pods() if fleet_of(pod) == self.name]

    async def _find_or_rent(self, name: str) -> Pod:
        pods = await self._mine()
        same = [pod for pod in pods if pod.name == name and not pod.over]
        for pod in pods:
            if pod.name == name and pod not in same[:1]:
                await self.end(pod.id)
        pod = same[0] if same else await self._rent(name, [p for p in pods if not p.over])
        self._enter(pod)
        most = self._settings.money.usd_per_slot_hour * self._settings.pool.packed
        if pod.usd_per_hour > most:
            await self.end(pod.id)
            raise ConfigError(
                f"{name} costs {pod.usd_per_hour:g} an hour, money.usd_per_slot_hour allows"
                f" {most:g}; it was ended"
            )
        return pod

    async def _rent(self, name: str, there: Sequence[Pod]) -> Pod:
        kinds = affordable(self._settings, await self._api.gpus(self._settings.runpod.cloud))
        prices = [pod.usd_per_hour for pod in there]
        for price, gpu in kinds:
            if gpu.availability == "NONE":
                continue
            money.admit_pod(self._ledger, self._settings, prices, price)
            if pod := await self._create(name, gpu.id):
                return pod
        tried = ", ".join(gpu.id for _, gpu in kinds) or "none within the price"
        raise PoolError(f"Runpod has no GPU for {name} now (asked for: {tried})")

    async def _create(self, name: str, gpu: str) -> Pod | None:
        try:
            return await self._api.create(pod_body(self._settings, name, gpu, self.keys.public()))
        except PoolError:  # it may be there all the same
            await asyncio.sleep(self.poll_seconds)
            for pod in await self._mine():
                if pod.name == name:
                    return pod
            raise

    def _enter(self, pod: Pod) -> None:
        """Note a pod before anything is waited for."""
        gpu = pod.gpu.id if pod.gpu else ""
        self._ledger.record_pod(pod.id, pod.name, gpu, pod.usd_per_hour)
