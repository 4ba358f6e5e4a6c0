"""What a slot does with a job: train a student on the submitted environment, then score it.

The environment runs in the slot's sandbox and is gone before the hidden items are looked at; the
scorer sees an adapter and items only. Knows nothing about pipes, queues or the ledger.
"""

from __future__ import annotations

import time

import torch

from metatrainer import families
from metatrainer.agent.task import hidden_items
from metatrainer.engine import Engine
from metatrainer.errors import JobError
from metatrainer.families import Family
from metatrainer.inner.grpo import TrainedJob, train_job
from metatrainer.jobs.leaks import Leaks
from metatrainer.jobs.spec import JOB_FILE, JobSpec, parse_job_toml
from metatrainer.jobs.tasks import check_tasks
from metatrainer.pool import jobdir
from metatrainer.pool.base import CHEATED, JobOrder, JobResult
from metatrainer.pool.worker import Setup
from metatrainer.sandbox.host import Guest, TaskRow
from metatrainer.students import catalogue
from metatrainer.students.evaluate import evaluate
from metatrainer.students.score import Score

CALL_SECONDS = 10.0
"""Time of one call into the environment: loading its tasks, or scoring one step."""


class Bench:
    """The engines and the sandbox of one slot."""

    def __init__(self, setup: Setup):
        torch.set_num_threads(1)
        self._settings = setup.settings
        self._hidden_seed = setup.secret_seed
        self._engines: dict[str, Engine] = {}
        self._guest = Guest(setup.slot)
        self._guest.start()

    def train(self, order: JobOrder) -> JobResult:
        """Train and score one student. Raises JobError or EnvError."""
        engine, family = self._engine(order.student), families.get(order.family)
        began = time.monotonic()
        trained = self._train(order, engine, family)
        train_seconds = time.monotonic() - began
        try:
            post = self._score(engine, trained.adapter, family)
            engine.save_adapter(trained.adapter, order.job_dir / jobdir.ADAPTER)
        finally:
            engine.delete_adapter(trained.adapter)
        return JobResult(
            job_id=order.job_id,
            attempt=order.attempt,
            outcome="ok",
            post=post,
            train_seconds=train_seconds,
            eval_seconds=time.monotonic() - began - train_seconds,
            rollouts=trained.rollouts,
            tokens=trained.tokens,
            curve=trained.curve,
            adapter=order.job_dir / jobdir.ADAPTER,
        )

    def baseline(self, family: str, student: str) -> Score:
        """Hidden score of an untrained student, on the same items and seed as after training."""
        return self._score(self._engine(student), None, families.get(family))

    def close(self) -> None:
        """End the sandbox."""
        self._guest.close()

    def _train(self, order: JobOrder, engine: Engine, family: Family) -> TrainedJob:
        files = jobdir.read_files(order.job_dir)
        spec = _spec(files, order.student)
        deadline = time.monotonic() + self._settings.limits.max_seconds
        environment = spec.environment
        with self._guest.session(files, environment.module, environment.args, CALL_SECONDS) as env:
            tasks = env.load()
            self._check(tasks, family, f"{environment.module}/__init__.py")
            return train_job(engine, spec.prime_rl, tasks, env, family, order.seed, deadline)

    def _check(self, tasks: list[TaskRow], family: Family, package: str) -> None:
        """What validation asked of the tasks, asked again: the code may give others this time."""
        hidden = hidden_items(family.name, self._hidden_seed, self._settings.evaluation.items)
        if leak := Leaks(hidden, ()).in_tasks(tasks):
            raise JobError(CHEATED, f"tasks changed after validation: {leak.render()}")
        if fault := check_tasks(tasks, family, package):
            raise JobError("env_error", f"tasks changed after validation: {fault.render()}")

    def _score(self, engine: Engine, adapter: int | None, family: Family) -> Score:
        evaluation = self._settings.evaluation
        items = hidden_items(family.name, self._hidden_seed, evaluation.items)
        return evaluate(engine, adapter, family, items, evaluation, self._hidden_seed)

    def _engine(self, student: str) -> Engine:
        if student not in self._engines:
            self._engines[student] = Engine(catalogue.verified_folder(student))
        return self._engines[student]


def _spec(files: dict[str, str], student: str) -> JobSpec:
    """The job's settings, read again from the folder: it may have changed since validation."""
    spec = parse_job_toml(files.get(JOB_FILE, ""))
    if isinstance(spec, list):
        raise JobError("crashed", f"{JOB_FILE} is no longer valid: {spec[0].render()}")
    if spec.prime_rl.model != student:
        raise JobError("crashed", f"{JOB_FILE} names {spec.prime_rl.model}, not {student}")
    return spec
