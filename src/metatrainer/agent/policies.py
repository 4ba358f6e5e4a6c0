"""Who writes the jobs: the policy protocol, and agents that follow a script.

The scripts measure the experiment without a model (an upper mark, a random one, one that always
errs), and `noisy` makes the conversations that the smallest agents are pretrained on. They know
the starter scaffold; they know nothing about episodes, pools or rewards.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from metatrainer.agent.scaffold import ENVIRONMENT, JOB, job_toml
from metatrainer.agent.task import Task

Message = dict[str, Any]
Script = Generator[Message, list[Message], None]
"""Yields the agent's messages and is sent the answers to each."""
ScriptMaker = Callable[[Task, random.Random], Script]


class Policy(Protocol):
    """Anything that can play an episode."""

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """The next assistant message: role, content, tool_calls, errors."""


class Scripted:
    """A policy that follows a script and has nothing to say after its end."""

    def __init__(self, script: Script):
        self._script = script
        self._seen: int | None = None

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """The script's next message."""
        del tools
        try:
            if self._seen is None:
                return next(self._script)
            return self._script.send(list(messages[self._seen + 1 :]))
        except StopIteration:
            return say("I am done.")
        finally:
            self._seen = len(messages)


def call(name: str, **arguments: str) -> Message:
    """An assistant message with one tool call."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call-0", "name": name, "arguments": arguments}],
        "errors": [],
    }


def say(text: str, error: str | None = None) -> Message:
    """An assistant message without a call that could be parsed.

    error: what the parser says about a call in the text.
    """
    errors = [error] if error else []
    return {"role": "assistant", "content": text, "tool_calls": [], "errors": errors}


# What a job can be made of.


@dataclass(frozen=True)
class Choice:
    """One way to write a job in the starter scaffold."""

    student: str
    learning_rate: str = "3e-3"
    batch_size: int = 64
    group_size: int = 8
    max_steps: int = 20

    def write(self) -> Message:
        """The call that writes it."""
        text = job_toml(
            self.student,
            self.learning_rate,
            batch_size=self.batch_size,
            group_size=self.group_size,
            max_steps=self.max_steps,
        )
        return call("write_file", path=JOB, content=text)


GOOD = Choice("", learning_rate="3e-3", batch_size=64, group_size=8, max_steps=20)
"""What works at the nano scale, with whichever student is best."""
GOOD_TASKS = 256
LEARNING_RATES = ("1e-5", "1e-4", "1e-3", "3e-3", "1e-2", "1e-1")
STEPS = (5, 10, 20)
BATCHES = ((64, 8), (64, 16), (32, 8), (32, 4), (16, 8))
UNEVEN_BATCHES = ((60, 8), (50, 16), (8, 16))
TASKS = (64, 128, 256)

_NAIVE_LEVELS, _NAIVE_TASKS = "LEVELS = [1]", "TASKS = 64"
_NAIVE_REWARD = "self.data.answer in reply"
EXACT_REWARD = "reply == self.data.answer"
VALID_REWARDS = (_NAIVE_REWARD, EXACT_REWARD, "reply[:3] == self.data.answer[:3]")
REWARDS = (*VALID_REWARDS, "len(reply) < 12")
"""Conditions for a reward of 1, some of them no good; the last pays wrong answers like right ones,
which validation refuses."""
_LAST_LINE = '__all__ = ["Tasks"]'
BROKEN_EDITS = (
    ("async def correct", "def correct"),
    ("return 1.0 if", "return 1.0 iff"),
    ("else 0.0", "else 1.0"),
    ("TASKS = ", "TASKS == "),
    ("trace.last_reply.strip()", "trace.completion[-1]"),
)
"""Edits that validation refuses."""


@dataclass(frozen=True)
class Job:
    """One whole job, written by hand, of any family: a choice and edits of the starter."""

    choice: Choice
    levels: str
    """What LEVELS becomes; good levels and dev examples of the task are filled in."""
    tasks: int
    reward: str
    tail: str = ""
    """Code that comes after the rest."""

    def write(self, task: Task, student: str) -> list[Message]:
        """The calls that write it."""
        levels = self.levels.format(good=good_levels(task), first=task.family.levels[0])
        edits = [
            (_NAIVE_LEVELS, f"LEVELS = {levels}"),
            (_NAIVE_TASKS, f"TASKS = {self.tasks}"),
            (_NAIVE_REWARD, self.reward),
            (_LAST_LINE, self.tail.format(dev=[(i.prompt, i.answer) for i in task.dev])),
        ]
        return [
            replace(self.choice, student=student).write(),
            *(edit(old, new) for old, new in edits if new and old != new),
        ]


def edit(old: str, new: str) -> Message:
    """The call that changes the environment in one place."""
    return call("edit_file", path=ENVIRONMENT, old=old, new=new)


def best_student(replies: Sequence[Message], students: Sequence[str]) -> str:
    """The student that the answer to get_baseline_scores lists first."""
    words = replies[0]["content"].split() if replies else []
    return words[0] if words and words[0] in students else students[0]


def good_levels(task: Task) -> list[int]:
    """Everything up to the level that is evaluated."""
    return [level for level in task.family.levels if level <= task.family.eval_level]


JOBS = {
    "reference": Job(GOOD, "{good}", GOOD_TASKS, EXACT_REWARD),
    "poor": Job(
        replace(GOOD, learning_rate="1e-5", batch_size=16, max_steps=5),
        "[{first}]",
        64,
        _NAIVE_REWARD,
    ),
    "leaking": Job(
        GOOD,
        "{good}",
        GOOD_TASKS,
        EXACT_REWARD,
        """class Copies(Tasks):
    def load(self):
        for task, (prompt, answer) in zip(super().load(), {dev} * 64):
            yield Task(Data(prompt=prompt, world=task.data.world, answer=answer))


__all__ = ["Copies"]""",
    ),
}
"""Jobs of known quality, for every family: one that teaches it on the first try, one that is valid
and teaches next to nothing, and one that trains on the dev examples, which validation refuses."""


# Scripts.


def reference(task: Task, rng: random.Random) -> Script:
    """A good job, written without a mistake."""
    yield from _by_hand("reference", task, rng)


def poor(task: Task, rng: random.Random) -> Script:
    """A valid job that teaches next to nothing."""
    yield from _by_hand("poor", task, rng)


def leaking(task: Task, rng: random.Random) -> Script:
    """A job that trains on the dev examples."""
    yield from _by_hand("leaking", task, rng)


def _by_hand(name: str, task: Task, rng: random.Random) -> Script:
    del rng
    replies = yield call("get_baseline_scores")
    for message in JOBS[name].write(task, best_student(replies, task.rules.students)):  # noqa: UP028  (a list is sent nothing)
        yield message
    yield call("submit_job")


def random_choices(task: Task, rng: random.Random) -> Script:
    """A valid job whose every choice is drawn at random."""
    batch_size, group_size = rng.choice(BATCHES)
    affordable = [n for n in STEPS if n * batch_size <= task.rules.max_rollouts]
    choice = Choice(
        rng.choice(task.rules.students),
        f"{10 ** rng.uniform(-5, -1):.1e}",
        batch_size,
        group_size,
        rng.choice(affordable or [1]),
    )
    yield choice.write()
    levels = rng.sample(task.family.levels, rng.randint(1, len(task.family.levels)))
    yield from _edit_unless_same(_NAIVE_LEVELS, f"LEVELS = {sorted(levels)}")
    yield from _edit_unless_same(_NAIVE_TASKS, f"TASKS = {rng.choice(TASKS)}")
    yield from _edit_unless_same(_NAIVE_REWARD, rng.choice(VALID_REWARDS))
    yield call("submit_job")


def broken(task: Task, rng: random.Random) -> Script:
    """One kind of mistake, made again and again."""
    mistake = rng.choice(sorted(MISTAKES))
    return MISTAKES[mistake](task)


def _edit_unless_same(old: str, new: str) -> Script:
    if old != new:
        yield edit(old, new)


def _again(*messages: Message) -> Callable[[Task], Script]:
    """A script that sends some messages over and over."""

    def script(task: Task) -> Script:
        del task
        for message in itertools.cycle(messages):  # noqa: UP028  (an iterator is sent nothing)
            yield message

    return script


def _job_mistake(**changes: Any) -> Callable[[Task], Script]:
    """A script that submits a job file with wrong settings."""

    def script(task: Task) -> Script:
        choice = replace(GOOD, **{"student": task.rules.students[0], **changes})
        while True:
            yield choice.write()
            yield call("submit_job")

    return script


def _environment_mistake(old: str, new: str) -> Callable[[Task], Script]:
    """A script that submits a sound job file with a broken environment."""

    def script(task: Task) -> Script:
        yield replace(GOOD, student=task.rules.students[0]).write()
        yield edit(old, new)
        while True:
            yield call("submit_job")

    return script


_MALFORMED = '<tool_call>\n{"name": "submit_job", "arguments": {}\n</tool_call>'

MISTAKES: dict[str, Callable[[Task], Script]] = {
    "silence": _again(say("")),
    "talk": _again(say("I will write the job now.")),
    "malformed_json": _again(say(_MALFORMED, "the tool call is not JSON: Expecting ',' delimiter")),
    "unknown_tool": _again(call("run_job")),
    "wrong_arguments": _again(call("write_file", file=JOB, text="")),
    "outside": _again(call("write_file", path="/job.toml", content="")),
    "not_toml": _again(call("write_file", path=JOB, content="model: x"), call("submit_job")),
    "unknown_student": _job_mistake(student="nano-wran"),
    "uneven_groups": _job_mistake(batch_size=60),
    "over_budget": _job_mistake(max_steps=100_000),
    "missing_module": _environment_mistake('__all__ = ["Tasks"]', '__all__ = ["Missing"]'),
    "sync_reward": _environment_mistake(*BROKEN_EDITS[0]),
    "syntax_error": _environment_mistake(*BROKEN_EDITS[1]),
    "constant_reward": _environment_mistake(*BROKEN_EDITS[2]),
}


def noisy(task: Task, rng: random.Random, skill: float) -> Script:
    """An agent that decides rightly with probability `skill` at every turn and else at random."""
    return _Noisy(task, rng, skill).script()


class _Noisy:
    """The state of a noisy agent: what it chose, and what it knows to be wrong with it."""

    def __init__(self, task: Task, rng: random.Random, skill: float):
        self._task, self._rng, self._skill = task, rng, skill
        self._student: str | None = None
        self._choice: Choice | None = None
        self._broken: tuple[str, str] | None = None

    def script(self) -> Script:
        if self._right():
            replies = yield from self._do(call("get_baseline_scores"))
            self._student = best_student(replies, self._task.rules.students)
        if self._chance(0.1):
            yield from self._do(self._rng.choice(_LOOKS))
        if self._right() or self._chance(0.9):
            self._choice = self._choose(sloppy=not self._right())
            yield from self._do(self._choice.write())
        yield from self._improve()
        if not self._right() and self._chance(0.6):
            self._broken = self._rng.choice(BROKEN_EDITS)
            yield from self._do(edit(*self._broken))
        while True:
            yield from self._do(call("submit_job"))
            yield from self._mend()

    def _improve(self) -> Script:
        rng, task = self._rng, self._task
        others = [[level] for level in task.family.levels] + [list(task.family.levels)]
        levels = good_levels(task) if self._right() else rng.choice(others)
        tasks = GOOD_TASKS if self._right() else rng.choice(TASKS)
        reward = EXACT_REWARD if self._right() else rng.choice(REWARDS)
        for old, new in (
            (_NAIVE_LEVELS, f"LEVELS = {levels}"),
            (_NAIVE_TASKS, f"TASKS = {tasks}"),
            (_NAIVE_REWARD, reward),
        ):
            if old != new:
                yield from self._do(edit(old, new))

    def _mend(self) -> Script:
        """What follows a refused submission: a repair, or another throw of the dice."""
        if self._broken and self._right():
            yield from self._do(edit(*reversed(self._broken)))
            self._broken = None
        elif self._choice is None or self._right() or self._chance(0.5):
            self._choice = self._choose(sloppy=not self._right())
            yield from self._do(self._choice.write())

    def _choose(self, sloppy: bool) -> Choice:
        rng, students = self._rng, self._task.rules.students
        batch = (GOOD.batch_size, GOOD.group_size) if self._right() else rng.choice(BATCHES)
        choice = Choice(
            self._student if self._student and self._right() else rng.choice(students),
            GOOD.learning_rate if self._right() else rng.choice(LEARNING_RATES),
            *batch,
            GOOD.max_steps if self._right() else rng.choice(STEPS),
        )
        return self._spoil(choice) if sloppy and self._chance(0.7) else choice

    def _spoil(self, choice: Choice) -> Choice:
        """The same job with one setting that validation refuses."""
        batch_size, group_size = self._rng.choice(UNEVEN_BATCHES)
        return self._rng.choice(
            (
                replace(choice, batch_size=batch_size, group_size=group_size),
                replace(choice, max_steps=500),
                replace(choice, student=choice.student[:-1]),
                replace(choice, learning_rate="10.0"),
            )
        )

    def _do(self, message: Message) -> Generator[Message, list[Message], list[Message]]:
        """Send a message, now and then after a slip; returns the answers to it."""
        if not self._right() and self._chance(0.15):
            yield self._rng.choice(_SLIPS)
        return (yield message)

    def _right(self) -> bool:
        return self._chance(self._skill)

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


_LOOKS = (call("list_files"), call("read_file", path=JOB), call("read_file", path=ENVIRONMENT))
_SLIPS = (
    say(""),
    say(_MALFORMED, "the tool call is not JSON: Expecting ',' delimiter"),
    call("submit"),
    call("read_file", path="job.py"),
    call("write_file", path=JOB),
    edit("LEVELS = 1", "LEVELS = 2"),
)

SCRIPTS: dict[str, ScriptMaker] = {
    "reference": reference,
    "poor": poor,
    "leaking": leaking,
    "random": random_choices,
    "broken": broken,
}
