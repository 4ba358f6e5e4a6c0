"""The interface of a pool of slots: orders in, results out.

Knows nothing about processes, engines or how a job trains.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from metatrainer.config import PoolSettings, RunSettings
from metatrainer.students.score import Score

CHEATED = "cheating"
"""Outcome of a job that was caught cheating while it ran."""
LOST = "lost"
"""Outcome of an attempt that ended by no fault of its job; the next attempt may do better."""
STOPPED = "stopped"
"""Outcome of an attempt that was told to stop. It is not the end of its job."""


GRACE_SECONDS = 120.0
"""What a job may take beyond its training: loading, the hidden evaluation, saving."""


class JobOrder(BaseModel):
    """One job to run: a validated submission and what it is trained with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str
    """Names the job in the ledger and on disk; the same submission keeps its id."""
    attempt: int = Field(1, ge=1)
    """Which try at running the job this is; a lost one is followed by the next."""
    family: str
    """Family whose hidden items the student is scored on."""
    job_dir: Path
    """The job's folder; its files/ holds the submission."""
    student: str
    """The base model, by its name in the catalogue."""
    seed: int
    """Seed of the job's adapter and sampling."""
    rollouts: int = Field(0, ge=0)
    """Rollouts that its training makes, from which its length is guessed."""


class JobResult(BaseModel):
    """How a job ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str
    attempt: int = 1
    outcome: str
    """ok, or the word for why there is no score: crashed, timeout, env_error, diverged, ..."""
    message: str = ""
    """What went wrong, for the ledger and the report."""
    post: Score | None = None
    """Hidden score of the trained student."""
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    rollouts: int = 0
    tokens: int = 0
    curve: list[dict[str, Any]] = []
    """One record for each step of the training."""
    samples: dict[str, list[dict[str, Any]]] = {}
    """A few conversations of the student, "before" and "after" its training."""
    adapter: Path | None = None
    """Where the trained adapter was saved."""
    slot: int | None = None
    """Which place in the pool ran it."""
    began: float | None = None
    """When it took its slot, in Unix time."""
    seconds: float = 0.0
    """How long it held its slot, whatever the slot's neighbours did meanwhile."""

    def scored(
        self,
        attempt: int,
        post: Score,
        eval_seconds: float,
        samples: dict[str, list[dict[str, Any]]],
    ) -> JobResult:
        """The end of a job whose training this is; attempt: the one that scored it."""
        ended = {"attempt": attempt, "outcome": "ok", "post": post}
        return self.model_copy(update={**ended, "eval_seconds": eval_seconds, "samples": samples})


def slots_of(pool: PoolSettings) -> int:
    """Jobs at a time."""
    return (pool.workers or len(gpus()) or os.cpu_count() or 1) * pool.packed


def gpus() -> list[str]:
    """The GPUs of this machine that torch was built for and may see, as CUDA names them."""
    if metadata.version("torch").endswith("+cpu"):
        return []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        return [name.strip() for name in seen.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def grace_of(settings: RunSettings) -> float:
    """What a job may take beyond its training. prime-rl's programs are started thrice for one: a
    server before, the run, a server after."""
    starts = 3 if settings.inner.trainer == "prime-rl" else 0
    return GRACE_SECONDS + starts * settings.inner.start_seconds


def longest_seconds(settings: RunSettings, grace_seconds: float | None = None) -> float:
    """What a job may hold its slot for, before it is given up.

    Of jobs side by side each gets its share of the worker's time, and is charged that alone.
    """
    grace = grace_of(settings) if grace_seconds is None else grace_seconds
    return settings.pool.packed * settings.limits.max_seconds + grace


class Pool(Protocol):
    """Slots that run jobs. Every job is run at most once for each attempt."""

    slots: int

    async def start(self) -> None:
        """Make the slots ready. Raises PoolError or SandboxUnavailable."""

    async def close(self) -> None:
        """Stop everything at once; no process is left behind."""

    async def run(self, order: JobOrder) -> JobResult:
        """Run a job, or collect its result if it has ended before. Raises PoolError only if the
        pool itself is broken; a job that fails is a result. One that is LOST has not ended: order
        it again under its next attempt."""

    def holds(self, job_id: str, attempt: int) -> bool:
        """Whether an attempt that an earlier controller ordered is still under way here: order it
        again under the same number to hear how it ends."""

    async def baselines(self, family: str) -> list[Score]:
        """Hidden scores of all untrained students, best first."""
