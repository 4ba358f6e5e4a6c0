"""What a slot does with a job where students train on prime-rl: train, then score by ourselves.

Scores before and after come from a server of our own, on hidden items that no process of the run
ever sees: the run is over, with all that it started, before its adapter is scored. Knows nothing
about pipes, queues or the ledger.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
from pathlib import Path

from metatrainer import families
from metatrainer.agent.task import hidden_items
from metatrainer.families import Family
from metatrainer.inner.prime_rl import Trained, Waits, train
from metatrainer.inner.prime_rl_eval import evaluate, sample_conversations
from metatrainer.inner.prime_rl_plan import check_installed, job_target
from metatrainer.inner.prime_rl_run import trained_tasks
from metatrainer.inner.prime_rl_server import Server
from metatrainer.jobs.compile import (
    compile_job,
    server_config,
    server_device,
)
from metatrainer.jobs.spec import JobSpec
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.bench import refuse_hidden, spec_of
from metatrainer.pool.worker import Setup
from metatrainer.students.score import Score

SHOWN = {"step", "reward", "dead_groups", "unfinished", "seconds"}
"""Numbers of a step that every curve has."""
_WEIGHTS = ("checkpoints", "broadcasts")
"""Folders of a run that are large, and of no use once the adapter is taken."""


class PrimeRlBench:
    """One slot: at most one run and one inference server at a time, each job after the other."""

    def __init__(self, setup: Setup):
        check_installed(setup.settings)
        self._settings = setup.settings
        self._inner = setup.settings.inner
        self._hidden_seed = setup.secret_seed
        self._slot = setup.slot
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._home = tempfile.TemporaryDirectory(prefix="metatrainer-server-")

    def train(self, order: JobOrder, stop: threading.Event) -> JobResult:
        """Train and score one student. Raises JobError with how it ended otherwise.

        The adapter is copied before it is scored; an attempt that finds one only scores it.
        """
        family = families.get(order.family)
        with self._lock:
            trained = jobdir.trained_once(order, lambda: self._train(order, family, stop))
            began = time.monotonic()
            server = self._serve(order.student, stop)
            # A name that nobody can have guessed and loaded something else under.
            name = f"{order.job_id}-{secrets.token_hex(8)}"
            server.load(name, (order.job_dir / jobdir.ADAPTER).resolve())
            post = self._score(server, name, order.student, family)
            seconds = time.monotonic() - began
            base = server.config["vllm"]["model"]
            samples = {
                when: sample_conversations(server.url, who, family, self._settings.evaluation)
                for when, who in (("before", base), ("after", name))
            }
        return trained.scored(order.attempt, post, seconds, samples)

    def baseline(self, family: str, student: str) -> Score:
        """Hidden score of an untrained student, on the same items and seed as after training."""
        with self._lock:
            server = self._serve(student, threading.Event())
            model = server.config["vllm"]["model"]
            return self._score(server, model, student, families.get(family))

    def close(self) -> None:
        """End the server."""
        self._end_server()
        self._home.cleanup()

    def _train(self, order: JobOrder, family: Family, stop: threading.Event) -> JobResult:
        files = jobdir.read_files(order.job_dir)
        spec = spec_of(files, order.student)
        folder = (order.job_dir / f"prime-rl-{order.attempt}").resolve()
        target = job_target(self._settings, order.student, folder, self._slot)
        _write_package(files, spec, Path(target.job_dir))
        if self._inner.warm_server:
            self._serve(order.student, stop)
        else:  # its memory is for the server that rl starts
            self._end_server()
        compiled = compile_job(spec, family, target)
        waits = Waits(
            self._inner.start_seconds, self._inner.stall_seconds, self._settings.limits.max_seconds
        )
        adapter = order.job_dir / jobdir.ADAPTER
        run = Path(target.output_dir) / target.run_name
        try:
            trained = train(self._inner.rl, compiled, target, folder, waits, adapter, stop)
        finally:
            for name in _WEIGHTS:
                shutil.rmtree(run / name, ignore_errors=True)
        self._check(run, family)
        return _result(order, trained)

    def _check(self, run: Path, family: Family) -> None:
        """What validation asked of the tasks, asked of those that were trained on."""
        items = self._settings.evaluation.items
        refuse_hidden(trained_tasks(run), hidden_items(family.name, self._hidden_seed, items))

    def _score(self, server: Server, model: str, student: str, family: Family) -> Score:
        evaluation = self._settings.evaluation
        items = hidden_items(family.name, self._hidden_seed, evaluation.items)
        return evaluate(server.url, model, student, family, items, evaluation, self._hidden_seed)

    def _serve(self, student: str, stop: threading.Event) -> Server:
        """A server of the student's base model: the one that runs, where it is of that model."""
        target = job_target(self._settings, student, Path(self._home.name), self._slot)
        running = self._server
        if running and running.alive and running.config["vllm"]["model"] == target.model:
            return running
        self._end_server()
        device = {"CUDA_VISIBLE_DEVICES": str(server_device(target))}
        command = self._inner.inference
        server = Server(command, server_config(target), device, Path(self._home.name))
        self._server = server
        server.wait(self._inner.start_seconds, stop)
        return server

    def _end_server(self) -> None:
        if self._server:
            self._server.close()
            self._server = None


def _write_package(files: dict[str, str], spec: JobSpec, folder: Path) -> None:
    """The job's package and nothing else, so that nothing of it can stand in for a library."""
    for path, text in files.items():
        if path.startswith(f"{spec.environment.module}/"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")


def _result(order: JobOrder, trained: Trained) -> JobResult:
    record = trained.record
    return JobResult(
        job_id=order.job_id,
        attempt=order.attempt,
        outcome="trained",
        train_seconds=trained.seconds,
        rollouts=record.rollouts,
        tokens=record.tokens,
        curve=[row for row in record.curve if row.keys() >= SHOWN],
        adapter=order.job_dir / jobdir.ADAPTER,
    )
