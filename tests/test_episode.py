"""Episodes through the real workspace, tools, validation, sandbox and ledger.

The pool is a stand-in where the subject is the episode: what a job does is tested with the pool.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from lab import HIDDEN_SEED, ID, SETTINGS, WRITE, Lab, RecordingPool, score

from metatrainer import families
from metatrainer.agent import policies
from metatrainer.agent.policies import Scripted, call, edit, say
from metatrainer.agent.scaffold import ENVIRONMENT, JOB
from metatrainer.agent.task import draw_task
from metatrainer.episode import RETRIES, Episode, play
from metatrainer.pool import jobdir
from metatrainer.pool.base import LOST, JobOrder, JobResult
from metatrainer.reward import Terms


class Unused:
    """Stands where nothing may be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_the_reference_agent_gets_the_reward_of_its_job(lab: Lab) -> None:
    terms = lab.follow(policies.reference(lab.task, random.Random(0)))
    quality = 0.25 * 0.8 + 0.75 * (0.8 - 0.31)
    speed = 1 - 3.0 / SETTINGS.limits.max_seconds
    assert terms.validation == 1.0
    assert terms.total == pytest.approx(0.35 + 0.60 * quality + 0.05 * speed)
    assert (terms.post, terms.best_pre) == (0.8, 0.31)
    (order,) = lab.pool.orders
    assert order.student == "nano-wren"
    files = jobdir.read_files(order.job_dir)
    assert "LEVELS = [1, 2]" in files[ENVIRONMENT]
    assert "learning_rate = 3e-3" in files[JOB]
    assert "INSTRUCTIONS.md" not in files
    row = lab.ledger.finished_episode(str(ID))
    assert row and (row.total, row.student, row.outcome) == (terms.total, "nano-wren", "ok")
    assert {(e.scope, e.student, e.mean) for e in lab.ledger.evals()} == {
        ("baseline", "nano-wren", 0.31),
        ("baseline", "nano-finch", 0.12),
        (order.job_id, "nano-wren", 0.8),
    }
    assert lab.ledger.open_jobs() == []


@pytest.mark.parametrize("family", families.NAMES)
def test_the_unedited_starter_is_a_valid_environment(lab: Lab, family: str) -> None:
    lab.task = draw_task(SETTINGS, family, 1, HIDDEN_SEED)
    terms = lab.play(WRITE, call("submit_job"))
    assert (terms.outcome, terms.validation) == ("ok", 1.0)


def test_mistakes_are_answered_and_the_episode_goes_on(lab: Lab) -> None:
    terms = lab.play(
        say("Let me think."),
        say("<tool_call>{</tool_call>", "the tool call is not JSON"),
        call("submit"),
        call("write_file", path=JOB),
        call("get_baseline_scores"),
        edit("LEVELS = 9", "LEVELS = 2"),
        WRITE,
        call("submit_job"),
    )
    assert terms.outcome == "ok"
    assert lab.answers() == [
        "error: no tool 'submit'; did you mean submit_job?",
        "error: missing content; write_file takes path, content",
        "nano-wren 0.31\nnano-finch 0.12",
        "error: old text not found in environment/__init__.py; the nearest line is 'LEVELS = [1]'",
        "wrote job.toml",
        "accepted: the job has started",
    ]
    hints = lab.answers("user")[1:]
    assert ["no tool call" in hints[0], "not JSON" in hints[1]] == [True, True]


def test_later_attempts_are_worth_less(lab: Lab) -> None:
    terms = lab.play(
        WRITE,
        edit("async def correct", "def correct"),
        call("submit_job"),
        edit("    def correct", "    async def correct"),
        call("submit_job"),
    )
    assert (terms.validation, terms.outcome) == (0.5, "ok")
    refusal = lab.answers()[2]
    assert "E-ASYNC" in refusal
    assert "2 submissions left" in refusal
    assert [attempt.ok for attempt in lab.ledger.attempts(str(ID))] == [False, True]


def test_an_episode_ends_with_its_attempts(lab: Lab) -> None:
    wrong = call("write_file", path=JOB, content='[prime_rl]\nmodel = "gpt"\nlearning_rate = 1.0\n')
    terms = lab.play(wrong, *[call("submit_job")] * 9)
    assert (terms.outcome, terms.total) == ("rejected", 0.0)
    assert len(lab.ledger.attempts(str(ID))) == SETTINGS.limits.max_attempts
    assert lab.pool.orders == []


@pytest.mark.parametrize("messages", [[], [call("list_files")] * 3])
def test_an_episode_without_a_submission_is_punished(lab: Lab, messages: list[Any]) -> None:
    terms = lab.play(*messages)
    assert (terms.outcome, terms.total) == ("no_submission", -0.1)
    agent = [row for row in lab.ledger.messages(str(ID)) if row.role == "assistant"]
    assert len(agent) == SETTINGS.agent.max_turns


def test_a_submission_that_is_no_toml_does_not_count_as_one(lab: Lab) -> None:
    terms = lab.play(call("write_file", path=JOB, content="model: x"), *[call("submit_job")] * 3)
    assert (terms.outcome, terms.total) == ("rejected", -0.1)


def test_training_on_hidden_items_costs_everything(lab: Lab) -> None:
    leak = f"PROMPT = {lab.task.rules.hidden[0].prompt!r}\n"
    write = call("write_file", path="environment/extra.py", content=leak)
    terms = lab.play(WRITE, write, call("submit_job"), call("submit_job"))
    assert (terms.outcome, terms.total, terms.validation) == ("cheating", 0.0, 0.0)
    assert len(lab.ledger.attempts(str(ID))) == 1
    assert lab.pool.orders == []


def test_a_crashed_job_has_no_quality(lab: Lab) -> None:
    lab.pool.outcome = "crashed"
    terms = lab.play(WRITE, call("submit_job"))
    assert (terms.outcome, terms.total, terms.post) == ("crashed", 0.35, None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("while True: pass", "E-TIMEOUT"),
        ("import os; os.kill(os.getpid(), 9)", "E-CRASH"),
        ("x = bytearray(8 << 30)", "E-"),
        ("[__import__('os').fork() for _ in range(99)]", "E-"),
        ("print('x' * (1 << 20))", "E-OUTPUT"),
        ("open('/etc/shadow').read()", "E-IMPORT"),
    ],
)
def test_abuse_of_the_sandbox_is_a_failed_attempt_with_the_reason(
    lab: Lab, line: str, says: str
) -> None:
    terms = lab.play(WRITE, edit("LEVELS = [1]", f"{line}\nLEVELS = [1]"), call("submit_job"))
    assert terms.outcome == "rejected"
    assert says in lab.answers()[2]


def test_all_calls_of_a_message_are_answered_up_to_an_accepted_one(lab: Lab) -> None:
    calls = [
        {"id": f"c{n}", "name": name, "arguments": {}}
        for n, name in enumerate(("list_files", "submit_job", "list_files"))
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls, "errors": []}

    async def action(episode: Episode) -> None:
        await episode.respond(WRITE)
        reply = await episode.respond(message)
        assert [m["tool_call_id"] for m in reply.messages] == ["c0", "c1"]
        assert reply.done
        with pytest.raises(RuntimeError, match="over"):
            await episode.respond(message)
        await episode.outcome()

    lab.run(action)


def test_a_message_runs_a_limited_number_of_calls(lab: Lab) -> None:
    calls = [{"id": str(n), "name": "list_files", "arguments": {}} for n in range(20)]

    async def action(episode: Episode) -> None:
        reply = await episode.respond({"role": "assistant", "content": "", "tool_calls": calls})
        assert sum("over 8 calls" in m["content"] for m in reply.messages) == 12

    lab.run(action)


def test_ledger_and_folder_are_complete_before_the_job_starts(lab: Lab) -> None:
    seen: list[Any] = []

    def look(order: JobOrder) -> None:
        seen.append([row.id for row in lab.ledger.open_jobs()])
        seen.append((order.job_dir / jobdir.ORDER).exists())
        seen.append([a.ok for a in lab.ledger.attempts(str(ID))])

    lab.pool.on_run = look
    lab.play(WRITE, call("submit_job"))
    assert seen == [[lab.pool.orders[0].job_id], True, [True]]


def test_a_finished_episode_is_not_played_again(lab: Lab) -> None:
    first = lab.play(WRITE, call("submit_job"))

    async def again(episode: Episode) -> Terms:
        assert episode.done
        return await play(episode, Scripted(policies.reference(lab.task, random.Random(0))))

    assert lab.run(again) == first
    assert len(lab.pool.orders) == 1


def test_the_same_messages_get_the_same_answers_in_a_later_process(lab: Lab) -> None:
    messages = (
        call("get_baseline_scores"),
        WRITE,
        edit("async def correct", "def correct"),
        call("submit_job"),
        edit("    def correct", "    async def correct"),
        call("submit_job"),
    )
    first = lab.play(*messages)
    told = lab.answers()
    lab.validator = lab.pool = Unused()  # type: ignore[assignment]

    async def again(episode: Episode) -> list[str]:
        replies = [await episode.respond(message) for message in messages]
        assert [reply.done for reply in replies] == [False] * 5 + [True]
        assert await episode.outcome() == first
        return [m["content"] for reply in replies for m in reply.messages]

    assert lab.run(again) == told


def test_a_job_that_ended_while_nobody_listened_is_collected(lab: Lab) -> None:
    async def until_submitted(episode: Episode) -> None:
        await episode.respond(WRITE)
        await episode.respond(call("submit_job"))

    lab.pool.hold = True
    lab.run(until_submitted)  # when the loop ends, the job that waits in it is cancelled
    (job,) = lab.ledger.open_jobs()
    lab.pool.hold = False
    lab.pool.orders.clear()
    result = JobResult(job_id=job.id, outcome="ok", post=score("nano-wren", 0.5))
    jobdir.write_result(lab.folder / "jobs" / job.id, result)
    terms = lab.play(WRITE, call("submit_job"))
    assert (terms.post, lab.pool.orders) == (0.5, [])
    assert lab.ledger.open_jobs() == []


def test_a_job_that_was_lost_is_started_again_under_the_next_number(lab: Lab) -> None:
    def die(order: JobOrder) -> None:
        jobdir.claim(order)
        raise asyncio.CancelledError

    lab.pool.on_run = die
    with pytest.raises(asyncio.CancelledError):
        lab.play(WRITE, call("submit_job"))
    lab.pool.on_run = lambda order: None
    assert lab.play(WRITE, call("submit_job")).outcome == "ok"
    assert [order.attempt for order in lab.pool.orders] == [1, 2]
    assert len({order.job_id for order in lab.pool.orders}) == 1
    job_id = lab.pool.orders[0].job_id
    assert [lab.ledger.job(job_id, n).outcome for n in (1, 2)] == ["lost", "ok"]  # type: ignore[union-attr]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_job_that_the_pool_loses_is_retried_and_every_attempt_is_entered(
    lab: Lab, times: int
) -> None:
    job_ids: list[str] = []

    class Losing(RecordingPool):
        async def run(self, order: JobOrder) -> JobResult:
            job_ids.append(order.job_id)
            open_ones = [(row.id, row.attempt) for row in lab.ledger.open_jobs()]
            assert open_ones == [(order.job_id, order.attempt)]  # entered before it starts
            if order.attempt > times:
                return await super().run(order)
            lost = {"job_id": order.job_id, "attempt": order.attempt, "outcome": LOST}
            return JobResult(**lost, message="a neighbour crashed", slot=1, began=1.0, seconds=2.0)

    lab.pool = Losing()
    terms = lab.play(WRITE, call("submit_job"))
    last = "lost" if times > RETRIES else "ok"
    assert (terms.outcome, terms.quality > 0) == (last, last == "ok")
    attempts = [lab.ledger.job(job_ids[0], n) for n in range(1, len(job_ids) + 1)]
    assert [row.outcome for row in attempts if row] == ["lost"] * min(times, 2) + [last]
    assert attempts[0] and attempts[0].seconds == 2.0
    assert lab.ledger.open_jobs() == []
    result = jobdir.read_result(lab.folder / "jobs" / job_ids[0], job_ids[0])
    assert result and result.outcome == last  # the job is over, whichever way


def test_a_result_file_that_is_damaged_costs_one_attempt(lab: Lab) -> None:
    def damage(order: JobOrder) -> None:
        jobdir.claim(order)
        (order.job_dir / jobdir.RESULT).write_bytes(b'{"job_id": "\xff')
        raise KeyboardInterrupt

    lab.pool.on_run = damage
    with pytest.raises(KeyboardInterrupt):
        lab.play(WRITE, call("submit_job"))
    lab.pool.on_run = lambda order: None
    assert lab.play(WRITE, call("submit_job")).outcome == "ok"
    assert [order.attempt for order in lab.pool.orders] == [1, 2]


def test_a_clock_that_jumps_back_charges_nothing_below_zero(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(order: JobOrder) -> None:
        jobdir.claim(order)
        raise KeyboardInterrupt

    lab.pool.on_run = die
    with pytest.raises(KeyboardInterrupt):
        lab.play(WRITE, call("submit_job"))
    monkeypatch.setattr(jobdir, "claimed_at", lambda job_dir, attempt: 4e9)
    lab.pool.on_run = lambda order: None
    assert lab.play(WRITE, call("submit_job")).outcome == "ok"
    lost = lab.ledger.job(lab.pool.orders[0].job_id, 1)
    assert lost and (lost.outcome, lost.seconds) == ("lost", 0.0)


def test_a_job_starts_the_moment_it_is_valid(lab: Lab) -> None:
    async def until_submitted(episode: Episode) -> None:
        await episode.respond(WRITE)
        await episode.respond(call("submit_job"))
        await asyncio.sleep(0)
        assert len(lab.pool.orders) == 1  # long before anybody asks for the outcome

    lab.pool.hold = True
    lab.run(until_submitted)


def test_ids_name_phase_step_group_and_index() -> None:
    assert str(ID) == "train-003-01-05"


def test_no_secret_is_written_where_an_agent_or_a_job_can_read_it(lab: Lab) -> None:
    lab.play(WRITE, call("submit_job"))
    job_files = [p for p in (lab.folder / "jobs").rglob("*") if p.is_file()]
    texts = [p.read_text() for p in job_files]
    texts += [row.content for row in lab.ledger.messages(str(ID))]
    texts += [row.spec for row in lab.ledger.tasks()]
    assert texts
    hidden = [item.prompt for item in lab.task.rules.hidden]
    for text in texts:
        assert str(HIDDEN_SEED) not in text
        assert not [prompt for prompt in hidden if prompt in text]
