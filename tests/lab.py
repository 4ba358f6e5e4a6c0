"""Episodes for tests: real workspace, tools, validation, sandbox and ledger, a stand-in pool."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from metatrainer.agent.policies import Choice, Message, Script, Scripted, say
from metatrainer.agent.task import draw_task
from metatrainer.agent.validator import Validator
from metatrainer.config import RunSettings
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.jobs.spec import JOB_FILE, JobSpec, parse_job_toml
from metatrainer.jobs.validate import Verdict
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.reward import Terms
from metatrainer.students.score import Score

T = TypeVar("T")
SETTINGS = RunSettings()
HIDDEN_SEED = 20_250_101
ID = EpisodeId("train", 3, 1, 5)
WRITE = Choice("nano-wren", "1e-5", batch_size=32, group_size=8, max_steps=5).write()
"""The call that makes a starter workspace a valid job."""


class TomlValidator:
    """Looks at job.toml alone."""

    async def validate(self, files: Mapping[str, str], rules: Any) -> Verdict:
        spec = parse_job_toml(files.get(JOB_FILE, ""))
        ok = isinstance(spec, JobSpec)
        return Verdict(
            ok=ok,
            spec=spec if isinstance(spec, JobSpec) else None,
            findings=[] if isinstance(spec, JobSpec) else spec,
            seconds=0.0,
            cheating=False,
            parseable=True,
        )


class RecordingPool:
    """Answers every order with a result, and keeps the orders."""

    slots = 1

    def __init__(self, outcome: str = "ok", mean: float = 0.8):
        self.outcome, self.mean = outcome, mean
        self.orders: list[JobOrder] = []
        self.on_run: Callable[[JobOrder], None] = lambda order: None
        self.hold = False

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, order: JobOrder) -> JobResult:
        if done := jobdir.read_result(order.job_dir, order.job_id):
            return done
        self.orders.append(order)
        self.on_run(order)
        if self.hold:
            await asyncio.Event().wait()
        result = JobResult(
            job_id=order.job_id,
            attempt=order.attempt,
            outcome=self.outcome,
            message="",
            post=score(order.student, self.mean) if self.outcome == "ok" else None,
            train_seconds=3.0,
            eval_seconds=0.5,
        )
        jobdir.write_result(order.job_dir, result)
        return result

    def holds(self, job_id: str, attempt: int) -> bool:
        return False

    async def baselines(self, family: str) -> list[Score]:
        return [score("nano-wren", 0.31), score("nano-finch", 0.12)]


def files_of(order: JobOrder) -> dict[str, str]:
    return jobdir.read_files(order.job_dir)


def score(student: str, mean: float) -> Score:
    return Score(student=student, family="persona", n=128, mean=mean, low=mean, high=mean)


class Lab:
    """What episodes need, on one run folder."""

    def __init__(self, folder: Path, validator: Validator):
        self.folder, self.validator = folder, validator
        self.id = ID
        self.pool = RecordingPool()
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.ledger.create_run("run", "nano", SETTINGS.model_dump_json(), 0, {}, HIDDEN_SEED)
        self.task = draw_task(SETTINGS, "persona", 11, HIDDEN_SEED)

    def answers(self, role: str = "tool") -> list[str]:
        """What the episode answered, by the role of the message."""
        rows = [json.loads(row.content) for row in self.ledger.messages(str(self.id))]
        return [row["content"] for row in rows if row["role"] == role]

    def play(self, *messages: Message) -> Terms:
        """Play an episode in which the agent writes these messages and then empty ones."""

        def script() -> Script:
            for n in itertools.count():
                yield messages[n] if n < len(messages) else say("")

        return self.follow(script())

    def follow(self, script: Script) -> Terms:
        """Play an episode with a scripted agent."""
        return self.run(lambda episode: play(episode, Scripted(script)))

    def run(self, action: Callable[[Episode], Awaitable[T]]) -> T:
        """Do something with the episode, in an event loop of its own."""

        async def main() -> T:
            return await action(
                Episode(
                    self.id,
                    self.task,
                    SETTINGS,
                    self.ledger,
                    self.pool,
                    self.validator,
                    self.folder,
                )
            )

        return asyncio.run(main())
