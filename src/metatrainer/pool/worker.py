"""A worker process: reads requests as JSON lines, does each in a thread, answers as they end.

Every request has an id, which its answer repeats; {"cancel": id} tells a job to stop. Started by a
pool as `python -m metatrainer.pool.worker MODULE:FACTORY PARENT_PID`; the factory makes the Body
that does the work. Knows nothing about engines, sandboxes or families, nor how many requests are
wise at a time.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO, Protocol

from pydantic import BaseModel, ConfigDict

from metatrainer.config import RunSettings
from metatrainer.errors import EnvError, JobError
from metatrainer.pool import jobdir
from metatrainer.pool.base import LOST, STOPPED, JobOrder, JobResult
from metatrainer.shown import visible
from metatrainer.students.score import Score

MESSAGE_CHARS = 2_000
"""Longer explanations of a failure are cut."""
_PR_SET_PDEATHSIG = 1


class Setup(BaseModel):
    """What a worker is told once, over its pipe: nothing of it is on its command line or disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slot: int
    """Number of the worker; no two sandboxes of different workers have the same user."""
    settings: RunSettings
    secret_seed: int
    """Seed of the hidden items."""
    gpu: str | None = None
    """The one GPU that the worker sees."""


class Body(Protocol):
    """The work of a worker. Its methods are called from several threads at once."""

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        """Train and score. Raises JobError or EnvError if the job fails.

        stop: once it is set, JobError(STOPPED) is wanted soon; whoever is slow is killed.
        """

    def baseline(self, family: str, student: str) -> Score:
        """Hidden score of an untrained student."""

    def close(self) -> None:
        """Release what the body holds."""


def make_body(factory: str, setup: Setup) -> Body:
    """The body that MODULE:FACTORY makes."""
    module, _, name = factory.partition(":")
    body: Body = getattr(importlib.import_module(module), name)(setup)
    return body


def main(factory: str, parent: int) -> None:
    """Serve requests until the pipe closes or the parent dies."""
    _die_with(parent)
    channel = _Channel()
    requests = sys.stdin.buffer
    setup = Setup.model_validate_json(requests.readline())
    if setup.gpu is not None:  # before anything asks CUDA what there is
        os.environ["CUDA_VISIBLE_DEVICES"] = setup.gpu
    body = make_body(factory, setup)
    channel.send({"ready": True})
    try:
        _serve(body, requests, channel)
    finally:
        body.close()


def run_job(body: Body, order: JobOrder, slot: int, stop: threading.Event) -> JobResult:
    """One job from gate to result file. Whatever goes wrong inside is a result.

    A fault after the training is not the job's: the attempt is lost, and the next one has only to
    score the adapter.
    """
    began, clock = time.time(), time.monotonic()
    if not jobdir.claim(order):
        if ended := jobdir.read_result(order.job_dir, order.job_id):
            return ended
        return _failed(order, "crashed", f"attempt {order.attempt} was started before")
    try:
        result = body.train(order, stop)
    except JobError as error:
        result = _failed(order, error.outcome, error.message)
    except EnvError as error:
        result = _failed(order, "env_error", f"{error.kind}: {error.message}")
    except Exception as error:  # the worker must outlive any job
        traceback.print_exc()
        trained = jobdir.read_trained(order.job_dir, order.job_id)
        outcome = LOST if trained else "crashed"
        result = _failed(order, outcome, f"{type(error).__name__}: {error}")
    spent = {"slot": slot, "began": began, "seconds": time.monotonic() - clock}
    result = result.model_copy(update=spent)
    # A worker that was given up for dead may yet come to its end; the attempt after it counts then.
    overtaken = jobdir.claimed(order.job_dir, order.attempt + 1)
    if not overtaken and result.outcome not in (LOST, STOPPED):
        jobdir.write_result(order.job_dir, result)
    return result


def _serve(body: Body, requests: BinaryIO, channel: _Channel) -> None:
    stops: dict[int, threading.Event] = {}
    for line in requests:
        request = json.loads(line)
        if "cancel" in request:
            stops[request["cancel"]].set()
            continue
        stop = stops[request["id"]] = threading.Event()
        # A request that is not done when the pipe closes goes down with the process.
        given = (body, request, stop, channel)
        threading.Thread(target=_answer, args=given, daemon=True).start()


def answer(body: Body, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
    """Do what is asked. What goes wrong is the answer."""
    try:
        return _do(body, request, stop)
    except Exception as error:
        return {"error": visible(f"{type(error).__name__}: {error}", MESSAGE_CHARS)}


def _answer(body: Body, request: dict[str, Any], stop: threading.Event, channel: _Channel) -> None:
    channel.send({"id": request["id"], **answer(body, request, stop)})


def _do(body: Body, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
    if "order" in request:
        order = JobOrder.model_validate(request["order"])
        result = run_job(body, order, request["slot"], stop)
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


class _Channel:
    """The pipe for answers. Anything that a library prints goes to stderr instead."""

    def __init__(self) -> None:
        self._pipe = os.fdopen(os.dup(1), "wb")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._pipe.write(line)
            self._pipe.flush()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
