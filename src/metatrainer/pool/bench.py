"""What a slot does with a job: train a student on the submitted environment, then score it.

The environment runs in the slot's sandbox and is gone before the hidden items are looked at; the
scorer sees an adapter and items only. Knows nothing about pipes, queues or the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from metatrainer import families
from metatrainer.agent.task import hidden_items
from metatrainer.engine import Engine, Lane, Packer
from metatrainer.errors import JobError
from metatrainer.families import Family, Item
from metatrainer.inner.grpo import TrainedJob, train_job
from metatrainer.jobs.leaks import Leaks
from metatrainer.jobs.spec import JOB_FILE, JobSpec, parse_job_toml
from metatrainer.jobs.tasks import check_tasks
from metatrainer.pool import jobdir
from metatrainer.pool.base import CHEATED, STOPPED, JobOrder, JobResult
from metatrainer.pool.worker import Setup
from metatrainer.sandbox.host import Guest, TaskRow
from metatrainer.students import catalogue
from metatrainer.students.evaluate import evaluate, sample_conversations
from metatrainer.students.score import Score

_GUEST_STRIDE = 1000
CALL_SECONDS = 10.0
"""Time of one call into the environment: loading its tasks, or scoring one step."""


class Bench:
    """The engines and the sandboxes of one slot; several jobs at a time share an engine's passes.

    Safe to use from several threads: each job is ordinary code in one of them.
    """

    def __init__(self, setup: Setup):
        torch.set_num_threads(1)
        self._settings = setup.settings
        self._hidden_seed = setup.secret_seed
        self._slot = setup.slot
        self._lock = threading.Lock()
        self._packers: dict[str, Packer] = {}
        self._guests = [Guest(setup.slot, setup.settings.unsafe_without_sandbox)]
        self._idle = list(self._guests)
        self._guests[0].start()

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        """Train and score one student. Raises JobError or EnvError.

        The adapter is saved before it is scored; an attempt that finds one only scores it.
        """
        engine, family = self._lane(order.student), families.get(order.family)
        trained = jobdir.trained_once(
            order, lambda: self._train_and_save(order, engine, family, stop)
        )
        began = engine.clock()
        adapter = engine.call(lambda owner: owner.load_adapter(order.job_dir / jobdir.ADAPTER))
        try:
            post = self._score(engine, adapter, family)
            seconds = engine.clock() - began
            evaluation = self._settings.evaluation
            samples = {
                when: sample_conversations(engine, who, family, evaluation)
                for when, who in (("before", None), ("after", adapter))
            }
        finally:
            engine.delete_adapter(adapter)
        return trained.scored(order.attempt, post, seconds, samples)

    def baseline(self, family: str, student: str) -> Score:
        """Hidden score of an untrained student, on the same items and seed as after training."""
        return self._score(self._lane(student), None, families.get(family))

    def close(self) -> None:
        """End engines and sandboxes."""
        for packer in self._packers.values():
            packer.close()
        for guest in self._guests:
            guest.close()

    def _train_and_save(
        self, order: JobOrder, engine: Lane, family: Family, stop: threading.Event
    ) -> JobResult:
        began = engine.clock()
        trained = self._train(order, engine, family, stop)
        seconds = engine.clock() - began
        folder = order.job_dir / jobdir.ADAPTER
        try:
            engine.call(lambda owner: owner.save_adapter(trained.adapter, folder))
        finally:
            engine.delete_adapter(trained.adapter)
        return JobResult(
            job_id=order.job_id,
            attempt=order.attempt,
            outcome="trained",
            train_seconds=seconds,
            rollouts=trained.rollouts,
            tokens=trained.tokens,
            curve=trained.curve,
            adapter=folder,
        )

    def _train(
        self, order: JobOrder, engine: Lane, family: Family, stop: threading.Event
    ) -> TrainedJob:
        files = jobdir.read_files(order.job_dir)
        spec = spec_of(files, order.student)
        deadline = engine.clock() + self._settings.limits.max_seconds
        environment = spec.environment
        with (
            self._guest() as guest,
            guest.session(files, environment.module, environment.args, CALL_SECONDS) as env,
        ):
            tasks = env.load()
            self._check(tasks, family, f"{environment.module}/__init__.py")
            return train_job(
                engine,
                spec.prime_rl,
                tasks,
                env,
                family,
                order.seed,
                deadline,
                on_step=lambda row: _heed(stop),
            )

    def _check(self, tasks: list[TaskRow], family: Family, package: str) -> None:
        """What validation asked of the tasks, asked again: the code may give others this time."""
        items = self._settings.evaluation.items
        refuse_hidden(tasks, hidden_items(family.name, self._hidden_seed, items))
        if fault := check_tasks(tasks, family, package):
            raise JobError("env_error", f"tasks changed after validation: {fault.render()}")

    def _score(self, engine: Lane, adapter: int | None, family: Family) -> Score:
        evaluation = self._settings.evaluation
        items = hidden_items(family.name, self._hidden_seed, evaluation.items)
        return evaluate(engine, adapter, family, items, evaluation, self._hidden_seed)

    def _lane(self, student: str) -> Lane:
        """The engine of a student as one job sees it; opened for the first job that wants it."""
        with self._lock:
            if student not in self._packers:
                engine = Engine.open(catalogue.verified_folder(student), student)
                # Here, in one thread at a time: transformers cannot be imported in two at once.
                _ = engine.tokenizer
                self._packers[student] = Packer(engine)
            return self._packers[student].lane()

    @contextmanager
    def _guest(self) -> Iterator[Guest]:
        """A sandbox for a job: the one of all where it sets sessions apart, else one of its own."""
        if self._guests[0].apart:
            yield self._guests[0]
            return
        with self._lock:
            if not self._idle:
                # Slots of one worker's sandboxes lie apart, so that no two have the same user.
                slot = self._slot + _GUEST_STRIDE * len(self._guests)
                self._guests.append(Guest(slot, self._settings.unsafe_without_sandbox))
                self._idle.append(self._guests[-1])
            guest = self._idle.pop()
        try:
            yield guest
        finally:
            with self._lock:
                self._idle.append(guest)


def _heed(stop: threading.Event) -> None:
    if stop.is_set():
        raise JobError(STOPPED, "it was told to stop")


def refuse_hidden(tasks: list[TaskRow], hidden: list[Item]) -> None:
    """Raises JobError(CHEATED) where the tasks that a job trains on hold hidden items after all."""
    if leak := Leaks(hidden, ()).in_tasks(tasks):
        raise JobError(CHEATED, f"tasks changed after validation: {leak.render()}")


def spec_of(files: dict[str, str], student: str) -> JobSpec:
    """The job's settings, read again from the folder: it may have changed since validation."""
    spec = parse_job_toml(files.get(JOB_FILE, ""))
    if isinstance(spec, list):
        raise JobError("crashed", f"{JOB_FILE} is no longer valid: {spec[0].render()}")
    if spec.prime_rl.model != student:
        raise JobError("crashed", f"{JOB_FILE} names {spec.prime_rl.model}, not {student}")
    return spec
