"""One episode: the tool loop of a trainer agent from task to reward, the same for all back ends.

Knows the order in which things are made durable. Knows nothing about how the agent is sampled,
how a submission is validated, or how a job runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from metatrainer import money, reward
from metatrainer.agent import instructions, tools
from metatrainer.agent.policies import Message, Policy
from metatrainer.agent.scaffold import make_workspace
from metatrainer.agent.task import Task
from metatrainer.agent.tools import Toolbox
from metatrainer.agent.validator import Validator
from metatrainer.config import RunSettings
from metatrainer.errors import ContextFull
from metatrainer.jobs import findings
from metatrainer.jobs.findings import Finding
from metatrainer.jobs.spec import JOB_FILE, JobSpec, parse_job_toml
from metatrainer.jobs.validate import Verdict
from metatrainer.ledger import EpisodeRow, Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.base import CHEATED, LOST, JobOrder, JobResult, Pool
from metatrainer.students.score import Score

Phase = Literal["train", "heldout_before", "heldout_after", "play"]
MAX_CALLS = 8
"""Tool calls of one message that are answered."""
CONTEXT_FULL = "context_full"
"""Outcome of an episode that filled its model's context before it had a job."""
_ERROR_CHARS = 200
RETRIES = 2
"""How often a job that is lost is started again."""


@dataclass(frozen=True)
class EpisodeId:
    """Which episode of a run; its text is the key in the ledger."""

    phase: Phase
    step: int
    group: int
    index: int

    def __str__(self) -> str:
        return f"{self.phase}-{self.step:03d}-{self.group:02d}-{self.index:02d}"


@dataclass(frozen=True)
class Reply:
    """What the agent is answered: tool results and hints. done: no further message is wanted."""

    messages: list[Message]
    done: bool


class Episode:
    """The state of one episode. Feed it the agent's messages, then ask for the outcome.

    A later process that feeds the same messages to an episode of the same id gets the same
    answers: verdicts and baselines are taken from the ledger, and no job runs twice.
    """

    def __init__(
        self,
        id: EpisodeId,
        task: Task,
        settings: RunSettings,
        ledger: Ledger,
        pool: Pool,
        validator: Validator,
        run_dir: Path,
    ):
        """run_dir: jobs get their folders below it."""
        self.id = id
        self.task = task
        self._settings = settings
        self._ledger = ledger
        self._pool = pool
        self._validator = validator
        self._jobs_dir = run_dir.absolute() / "jobs"
        self._workspace = make_workspace(task, settings)
        self._toolbox = Toolbox(self._workspace, self._baseline_scores, self._submit)
        self._began = time.monotonic()
        self._logged = 0
        self._turns = 0
        self._attempts = 0
        self._parseable = False
        self._cheated = False
        self._full = False
        self._accepted: int | None = None
        self._student: str | None = None
        self._job: asyncio.Task[JobResult] | None = None
        with ledger.transaction():
            ledger.add_task(task.id, task.family.name, task.split, task.spec_json)
            ledger.open_episode(str(id), id.phase, id.step, id.group, id.index, task.id)
            row = ledger.finished_episode(str(id))
        self._terms = _terms_of(row) if row else None
        if self._terms is None:
            money.admit_episode(ledger, settings)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the agent's tools."""
        return tools.schemas()

    @property
    def done(self) -> bool:
        """No message of the agent is needed for the outcome."""
        return self._terms is not None or self._over

    @property
    def _over(self) -> bool:
        """No further message of the agent is wanted."""
        return self._closed or self._full or self._turns >= self._settings.agent.max_turns

    @property
    def _closed(self) -> bool:
        """No further submission is wanted."""
        out_of_attempts = self._attempts >= self._settings.limits.max_attempts
        return self._accepted is not None or self._cheated or out_of_attempts

    def initial_messages(self) -> list[Message]:
        """The conversation before the agent's first message."""
        messages = [{"role": "user", "content": self._workspace.read(instructions.PATH)}]
        if self._logged == 0:
            self._log(messages)
        return messages

    async def respond(self, message: Mapping[str, Any]) -> Reply:
        """Answer a message of the agent: role, content, tool_calls, errors."""
        if self._over:
            raise RuntimeError(f"episode {self.id} is over; ask for its outcome")
        self._log([dict(message)])
        self._turns += 1
        answers: list[Message] = []
        for n, call in enumerate(message.get("tool_calls") or ()):
            if self._closed:
                break
            answers.append(await self._answer(n, call))
        if hint := _hint(message):
            answers.append({"role": "user", "content": hint})
        self._log(answers)
        return Reply(answers, self._over)

    def context_full(self) -> None:
        """End an episode whose conversation does not fit into the agent's model any more."""
        self._full = True

    async def outcome(self) -> reward.Terms:
        """The reward, once the job is over. Asked again, by this process or a later one, it is
        the same, and nothing is run."""
        if self._terms is None:
            self._terms = await self._settle()
        return self._terms

    async def _answer(self, n: int, call: Mapping[str, Any]) -> Message:
        name = call["name"]
        if n < MAX_CALLS:
            text = await self._toolbox.call(name, call["arguments"])
        else:
            text = f"error: over {MAX_CALLS} calls in one message; the rest was not run"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}

    async def _baseline_scores(self) -> str:
        scores = await self._baselines()
        return "\n".join(f"{score.student} {score.mean:.2f}" for score in scores)

    async def _baselines(self) -> list[Score]:
        """Scores of the untrained students, best first; measured once in a run."""
        name = self.task.family.name
        known = [row for row in self._ledger.evals("baseline") if row.family == name]
        if len(known) < len(self.task.rules.students):
            scores = await self._pool.baselines(name)
            with self._ledger.transaction():
                for score in scores:
                    self._record_score("baseline", score, 0.0)
            return scores
        fields = Score.model_fields
        return [Score(**{key: getattr(row, key) for key in fields}) for row in known]

    async def _submit(self) -> str:
        self._attempts += 1
        files = self._workspace.submission()
        verdict = self._known_verdict(files)
        if verdict is None:
            verdict = await self._validator.validate(files, self.task.rules)
        self._parseable |= verdict.parseable
        self._cheated |= verdict.cheating
        with self._ledger.transaction():
            self._record_attempt(files, verdict)
            if verdict.ok and verdict.spec:
                self._accepted = self._attempts
                self._student = verdict.spec.prime_rl.model
                order = self._enter_job(files, verdict.spec) if self._terms is None else None
        if self._accepted is None:
            return f"{findings.render(verdict.findings)}\n{self._what_is_left()}"
        if order:
            self._job = asyncio.create_task(self._run(order))
        return "\n".join(["accepted: the job has started", *map(Finding.render, verdict.warnings)])

    def _known_verdict(self, files: Mapping[str, str]) -> Verdict | None:
        """The verdict on this attempt, if an earlier process has given it."""
        for row in self._ledger.attempts(str(self.id)):
            if row.n == self._attempts and json.loads(row.files) == files:
                known = json.loads(row.findings)
                spec = parse_job_toml(files.get(JOB_FILE, ""))
                return Verdict(
                    ok=row.ok,
                    spec=spec if isinstance(spec, JobSpec) else None,
                    findings=[Finding.from_dict(finding) for finding in known["findings"]],
                    seconds=row.seconds,
                    cheating=known["cheating"],
                    parseable=known["parseable"],
                )
        return None

    def _what_is_left(self) -> str:
        if self._cheated:
            return "This counts as cheating; the episode is over."
        left = self._settings.limits.max_attempts - self._attempts
        return f"refused; {left} submissions left" if left else "refused; no submission left"

    def _record_attempt(self, files: Mapping[str, str], verdict: Verdict) -> None:
        known = {
            "findings": [finding.as_dict() for finding in verdict.findings],
            "cheating": verdict.cheating,
            "parseable": verdict.parseable,
        }
        self._ledger.record_attempt(
            str(self.id),
            self._attempts,
            verdict.ok,
            json.dumps(known),
            json.dumps(files),
            verdict.seconds,
        )

    def _enter_job(self, files: dict[str, str], spec: JobSpec) -> JobOrder:
        """Make the job's folder and its row in the ledger. Nothing runs before both are on disk."""
        # The same submission is the same job, also when a resumed run comes here again.
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:8]
        job_id = f"{self.id}-{digest}"
        job_dir = self._jobs_dir / job_id
        order = JobOrder(
            job_id=job_id,
            attempt=self._attempt_to_run(job_id, job_dir),
            family=self.task.family.name,
            job_dir=job_dir,
            student=spec.prime_rl.model,
            # One seed a task: the jobs of a group differ by what the agent wrote, not by luck.
            seed=self.task.seed,
            rollouts=spec.prime_rl.max_steps * spec.prime_rl.batch_size,
        )
        if jobdir.read_result(job_dir, job_id) is None:
            money.admit_job(self._ledger, self._settings)
        jobdir.create(order, files)
        self._ledger.start_job(
            job_id, str(self.id), order.attempt, order.student, spec.model_dump_json()
        )
        return order

    def _attempt_to_run(self, job_id: str, job_dir: Path) -> int:
        """The number under which a job starts, goes on, or is collected."""
        last = self._ledger.job(job_id)
        if last is None:
            return 1
        ended = jobdir.read_result(job_dir, job_id) is not None
        under_way = self._pool.holds(job_id, last.attempt)
        if ended or under_way or not jobdir.claimed(job_dir, last.attempt):
            return last.attempt
        # It ran until its controller was gone, which was after that one's last write.
        began = jobdir.claimed_at(job_dir, last.attempt)
        seconds = max(0.0, (self._ledger.left_at() or began) - began)
        usd = money.slot_usd(self._settings.money, seconds)
        why = "its worker went away"
        self._ledger.finish_job(job_id, last.attempt, LOST, why, "null", seconds, usd)
        return last.attempt + 1

    async def _run(self, order: JobOrder) -> JobResult:
        result = await self._pool.run(order)
        for _ in range(RETRIES):
            if result.outcome != LOST:
                break
            order = self._enter_next_attempt(order, result)
            result = await self._pool.run(order)
        if result.outcome == LOST:
            jobdir.write_result(order.job_dir, result)
        with self._ledger.transaction():
            self._enter_result(order, result)
            if result.post:
                self._record_score(order.job_id, result.post, result.eval_seconds)
        return result

    def _enter_next_attempt(self, order: JobOrder, lost: JobResult) -> JobOrder:
        """End an attempt in the ledger and begin the next, before it runs."""
        again = order.model_copy(update={"attempt": order.attempt + 1})
        row = self._ledger.job(order.job_id, order.attempt)
        assert row is not None  # it was entered before it ran
        self._enter_result(order, lost)
        with self._ledger.transaction():
            money.admit_job(self._ledger, self._settings)
            self._ledger.start_job(
                again.job_id, str(self.id), again.attempt, again.student, row.spec
            )
        return again

    def _enter_result(self, order: JobOrder, result: JobResult) -> None:
        self._ledger.finish_job(
            order.job_id,
            order.attempt,
            result.outcome,
            result.message,
            result.model_dump_json(),
            result.seconds,
            money.slot_usd(self._settings.money, result.seconds),
        )

    async def _settle(self) -> reward.Terms:
        result = await self._job if self._job else None
        # Only a job is compared with the untrained students; without one they need not be measured.
        scores = await self._baselines() if result else []
        terms = reward.terms(
            self._settings.reward,
            parseable=self._parseable,
            accepted_attempt=self._accepted,
            outcome=result.outcome if result else self._why_no_job(),
            post=result.post.mean if result and result.post else None,
            best_pre=max((score.mean for score in scores), default=None),
            seconds=result.train_seconds if result else 0.0,
            limit=self._settings.limits.max_seconds,
            cheated=self._cheated or bool(result and result.outcome == CHEATED),
        )
        self._finish(terms)
        return terms

    def _why_no_job(self) -> str:
        if self._cheated:
            return CHEATED
        if self._full:
            return CONTEXT_FULL
        return "rejected" if self._attempts else "no_submission"

    def _record_score(self, scope: str, score: Score, seconds: float) -> None:
        self._ledger.record_eval(
            scope,
            score.student,
            score.family,
            score.n,
            score.mean,
            score.low,
            score.high,
            seconds,
        )

    def _finish(self, terms: reward.Terms) -> None:
        self._ledger.finish_episode(
            str(self.id),
            terms.validation,
            terms.quality,
            terms.speed,
            terms.total,
            terms.outcome,
            terms.post,
            terms.best_pre,
            self._student,
            time.monotonic() - self._began,
        )

    def _log(self, messages: list[Message]) -> None:
        with self._ledger.transaction():
            for message in messages:
                self._ledger.record_message(
                    str(self.id), self._logged, message["role"], json.dumps(message)
                )
                self._logged += 1


async def play(
    episode: Episode, policy: Policy, hear: Callable[[Message], None] = lambda message: None
) -> reward.Terms:
    """Play an episode to its reward. hear: told every message as it is said.

    Raises AgentError if the agent fails; the episode stays open then.
    """
    messages: list[Message] = []

    def say(new: Iterable[Message]) -> None:
        for message in new:
            messages.append(message)
            hear(message)

    say(episode.initial_messages())
    while not episode.done:
        try:
            message = await policy.act(messages, episode.tools)
        except ContextFull:
            episode.context_full()
            break
        say([message])
        say((await episode.respond(message)).messages)
    return await episode.outcome()


def _hint(message: Mapping[str, Any]) -> str | None:
    """What to tell an agent whose message holds no call, or one that could not be parsed."""
    errors = message.get("errors") or ()
    if errors:
        return f"error: {tools.cut(str(errors[0]), _ERROR_CHARS)}. Write the call again."
    if not message.get("tool_calls"):
        return "error: no tool call. Every message calls a tool, such as submit_job."
    return None


def _terms_of(row: EpisodeRow) -> reward.Terms:
    values = (row.validation, row.quality, row.speed, row.total, row.outcome)
    assert None not in values  # the ledger's own constraint on finished episodes
    return reward.Terms(*values, post=row.post, best_pre=row.best_pre)  # type: ignore[arg-type]
