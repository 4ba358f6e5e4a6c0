"""Makes the pool that the settings name. Knows which kinds there are, nothing more."""

from __future__ import annotations

from metatrainer.config import PoolSettings, RunSettings
from metatrainer.pool import ray
from metatrainer.pool.base import grace_of
from metatrainer.pool.local import LocalPool
from metatrainer.pool.ray import RayPool
from metatrainer.pool.workers import BODY, WorkerPool

BODIES = {"embedded": BODY, "prime-rl": "metatrainer.inner.prime_rl_bench:PrimeRlBench"}
"""What the workers run, by the trainer."""


def check(settings: PoolSettings) -> None:
    """See before anything begins that such a pool can be had here. Raises ConfigError."""
    if settings.kind == "ray":
        ray.check(settings)


def make_pool(settings: RunSettings, secret_seed: int) -> WorkerPool:
    """The pool of a run. secret_seed: of its hidden items."""
    kind = RayPool if settings.pool.kind == "ray" else LocalPool
    body = BODIES[settings.inner.trainer]
    return kind(settings, secret_seed, body=body, grace_seconds=grace_of(settings))
