"""Stand-in bodies for worker processes: what a slot does, without engine and sandbox.

The seed of an order picks the behaviour, so that one pool serves a whole test.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from pathlib import Path

from metatrainer.errors import EnvError, JobError
from metatrainer.pool.base import STOPPED, JobOrder, JobResult
from metatrainer.pool.worker import Setup
from metatrainer.sandbox.host import Guest
from metatrainer.students.score import Score

OK, JOB_ERROR, ENV_ERROR, BUG, HANG, EXIT, GARBAGE, PRINT, DONE_THEN_HANG = range(9)
HEED, WAIT, BUG_IN_EVAL, EXIT_IN_EVAL, GPU = range(9, 14)


class StandIn:
    """Leaves a line in a job's runs file each time it starts one."""

    def __init__(self, setup: Setup):
        self.setup = setup

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        with (order.job_dir / "runs").open("a") as runs:
            runs.write(f"{os.getpid()}\n")
        if order.seed == HEED:
            stop.wait()
            raise JobError(STOPPED, "told to stop")
        while order.seed == WAIT and not (order.job_dir / "go").exists():
            time.sleep(0.01)
        _ACTIONS.get(order.seed, lambda: None)()
        if order.seed in (BUG_IN_EVAL, EXIT_IN_EVAL) and order.attempt == 1:
            from metatrainer.pool import jobdir

            done = JobResult(job_id=order.job_id, outcome="trained")
            jobdir.write_trained(order.job_dir, done)
            _ACTIONS[BUG if order.seed == BUG_IN_EVAL else EXIT]()
        result = JobResult(
            job_id=order.job_id,
            attempt=order.attempt,
            outcome="ok",
            message=os.environ.get("CUDA_VISIBLE_DEVICES", "") if order.seed == GPU else "",
            post=self._score(order.family, order.student, 0.5),
        )
        if order.seed == DONE_THEN_HANG:
            from metatrainer.pool import jobdir

            jobdir.write_result(order.job_dir, result)
            time.sleep(600)
        return result

    def baseline(self, family: str, student: str) -> Score:
        if family == "broken":
            raise RuntimeError("no such family")
        if family == "slow":
            time.sleep(1.0)
        return self._score(family, student, 0.1 + 0.01 * len(student))

    def close(self) -> None:
        pass

    def _score(self, family: str, student: str, mean: float) -> Score:
        return Score(student=student, family=family, n=8, mean=mean, low=0.0, high=1.0)


class WithSandbox(StandIn):
    """Holds a warm sandbox, as the real body does."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self._guest = Guest(setup.slot)
        self._guest.start()

    def close(self) -> None:
        self._guest.close()


class OnPod(StandIn):
    """Leaves its lines in the controller's job folders, though the job's folder is elsewhere."""

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        here = order.job_dir
        (here / "adapter").mkdir(exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors", "stowaway"):
            (here / "adapter" / name).write_text(order.job_id)
        there = Path(os.environ["SIGNALS"], order.job_id)
        return super().train(order.model_copy(update={"job_dir": there}), stop)


class BriefOnPod(OnPod):
    """The same for jobs that take a moment."""

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        time.sleep(0.02 * (1 + order.seed % 5))
        return super().train(order.model_copy(update={"seed": OK}), stop)


class NeverReady:
    def __init__(self, setup: Setup):
        raise RuntimeError("no model on disk")


def _job_error() -> None:
    raise JobError("diverged", "the loss is not a number")


def _env_error() -> None:
    raise EnvError("reward", "division by zero", "environment/__init__.py", 3)


def _bug() -> None:
    raise KeyError("engine")


def _hang() -> None:
    time.sleep(600)


def _exit() -> None:
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(137)


def _print() -> None:
    print("a library says hello")
    os.write(1, b"and so does C code\n")


def _garbage() -> None:
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"%PDF-1.4\n")
        except OSError:
            continue
    time.sleep(600)


_ACTIONS = {
    JOB_ERROR: _job_error,
    ENV_ERROR: _env_error,
    BUG: _bug,
    HANG: _hang,
    EXIT: _exit,
    GARBAGE: _garbage,
    PRINT: _print,
}


class Brief(StandIn):
    """Jobs that take a moment, so that kills fall before, into and after them."""

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        time.sleep(0.02 * (1 + order.seed % 5))
        return super().train(order.model_copy(update={"seed": OK}), stop)
