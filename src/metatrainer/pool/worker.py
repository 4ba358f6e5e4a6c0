"""The process of one slot: reads requests as JSON lines, does one at a time, answers in kind.

Started by a pool as `python -m metatrainer.pool.worker MODULE:FACTORY PARENT_PID`; the factory
makes the Body that does the work. Knows nothing about engines, sandboxes or families.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, BinaryIO, Protocol

from pydantic import BaseModel, ConfigDict

from metatrainer.config import RunSettings
from metatrainer.errors import EnvError, JobError
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.shown import visible
from metatrainer.students.score import Score

MESSAGE_CHARS = 2_000
"""Longer explanations of a failure are cut."""
_PR_SET_PDEATHSIG = 1


class Setup(BaseModel):
    """What a worker is told once, over its pipe: nothing of it is on its command line or disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slot: int
    settings: RunSettings
    secret_seed: int
    """Seed of the hidden items."""


class Body(Protocol):
    """The work of a slot."""

    def train(self, order: JobOrder) -> JobResult:
        """Train and score. Raises JobError or EnvError if the job fails."""

    def baseline(self, family: str, student: str) -> Score:
        """Hidden score of an untrained student."""

    def close(self) -> None:
        """Release what the body holds."""


def main(factory: str, parent: int) -> None:
    """Serve requests until the pipe closes or the parent dies."""
    _die_with(parent)
    channel = _claim_stdout()
    requests = sys.stdin.buffer
    setup = Setup.model_validate_json(requests.readline())
    module, _, name = factory.partition(":")
    body: Body = getattr(importlib.import_module(module), name)(setup)
    _send(channel, {"ready": True})
    try:
        for line in requests:
            _send(channel, _answer(body, json.loads(line)))
    finally:
        body.close()


def run_job(body: Body, order: JobOrder) -> JobResult:
    """One job from gate to result file. Whatever goes wrong inside is a result."""
    if not jobdir.claim(order):
        return _failed(order, "crashed", f"attempt {order.attempt} was started before")
    try:
        result = body.train(order)
    except JobError as error:
        result = _failed(order, error.outcome, error.message)
    except EnvError as error:
        result = _failed(order, "env_error", f"{error.kind}: {error.message}")
    except Exception as error:  # the slot must outlive any job
        traceback.print_exc()
        result = _failed(order, "crashed", f"{type(error).__name__}: {error}")
    jobdir.write_result(order.job_dir, result)
    return result


def _answer(body: Body, request: dict[str, Any]) -> dict[str, Any]:
    if "order" in request:
        result = run_job(body, JobOrder.model_validate(request["order"]))
        return {"result": result.model_dump(mode="json")}
    score = body.baseline(request["family"], request["student"])
    return {"score": score.model_dump(mode="json")}


def _failed(order: JobOrder, outcome: str, message: str) -> JobResult:
    return JobResult(
        job_id=order.job_id,
        attempt=order.attempt,
        outcome=outcome,
        message=visible(message, MESSAGE_CHARS),
    )


def _send(channel: BinaryIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def _claim_stdout() -> BinaryIO:
    """Keep the pipe for answers; anything that a library prints goes to stderr."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return channel


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
