"""Makes the pool that the settings name. Knows which kinds there are, nothing more."""

from __future__ import annotations

from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError
from metatrainer.ledger import Ledger
from metatrainer.pool import ray, runpod
from metatrainer.pool.base import grace_of
from metatrainer.pool.local import LocalPool
from metatrainer.pool.ray import RayPool
from metatrainer.pool.runpod import RunpodPool
from metatrainer.pool.workers import BODY, WorkerPool

BODIES = {"embedded": BODY, "prime-rl": "metatrainer.inner.prime_rl_bench:PrimeRlBench"}
"""What the workers run, by the trainer."""


def check(settings: RunSettings) -> None:
    """See before anything begins that such a pool can be had here. Raises ConfigError."""
    if settings.pool.kind == "ray":
        ray.check(settings.pool)
    if settings.pool.kind == "runpod":
        runpod.check()


def make_pool(settings: RunSettings, secret_seed: int, ledger: Ledger | None = None) -> WorkerPool:
    """The pool of a run. secret_seed: of its hidden items. ledger: gets what is rented."""
    body, grace = BODIES[settings.inner.trainer], grace_of(settings)
    if settings.pool.kind == "runpod":
        if ledger is None:
            raise ConfigError('pool.kind "runpod" rents pods for runs; take another pool for this')
        return RunpodPool(settings, secret_seed, ledger, body=body, grace_seconds=grace)
    kind = RayPool if settings.pool.kind == "ray" else LocalPool
    return kind(settings, secret_seed, body=body, grace_seconds=grace)
