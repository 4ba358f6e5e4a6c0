"""Conversations of trainer agents of all degrees of skill, to pretrain the nano agent on.

They are real episodes: real instructions, tools and validation of what a noisy scripted agent
writes. Only the training itself is left out: a submission that is accepted ends the conversation
anyway, and the baseline scores that the agent reads are drawn at random.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metatrainer import chat, families
from metatrainer.agent import tools
from metatrainer.agent.policies import Message, Scripted, noisy
from metatrainer.agent.task import draw_task
from metatrainer.agent.validator import Validator
from metatrainer.chat import ChatFormat
from metatrainer.config import RunSettings
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.experiment import enter, running
from metatrainer.ledger import Ledger
from metatrainer.nano.traces import Trace
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.students.evaluate import Score

SKILLS = (0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.4, 0.7)
"""Share of right decisions of the agents in the corpus, one drawn for each conversation."""

_AT_A_TIME = 2


class _NoPool:
    """A pool that trains nothing and makes scores up."""

    slots = 1

    def __init__(self, students: tuple[str, ...], rng: random.Random):
        self._students, self._rng = students, rng

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, order: JobOrder) -> JobResult:
        return JobResult(job_id=order.job_id, attempt=order.attempt, outcome="ok")

    def holds(self, job_id: str, attempt: int) -> bool:
        return False

    async def baselines(self, family: str) -> list[Score]:
        means = sorted((self._rng.uniform(0.0, 0.5) for _ in self._students), reverse=True)
        order = self._rng.sample(self._students, len(self._students))
        return [
            Score(student=s, family=family, n=1, mean=mean, low=0, high=1)
            for s, mean in zip(order, means)
        ]


async def conversations(
    settings: RunSettings, n: int, seed: int, on_done: Callable[[], None] = lambda: None
) -> list[list[Message]]:
    """`n` conversations over all families. The same arguments give the same conversations."""
    validator, places = Validator(_AT_A_TIME), asyncio.Semaphore(_AT_A_TIME)
    with tempfile.TemporaryDirectory() as folder:

        async def one(i: int) -> list[Message]:
            async with places:
                heard = await _conversation(settings, i, seed, validator, Path(folder))
            on_done()
            return heard

        async with running(validator):
            return await asyncio.gather(*(one(i) for i in range(n)))


async def _conversation(
    settings: RunSettings, i: int, seed: int, validator: Validator, folder: Path
) -> list[Message]:
    rng = random.Random(f"{seed} {i}")
    family = families.NAMES[i % len(families.NAMES)]
    heard: list[Message] = []
    with Ledger(folder / f"{i}.sqlite") as ledger:
        hidden_seed = enter(ledger, "corpus", settings)
        task = draw_task(settings, family, rng.randrange(2**31), hidden_seed)
        pool = _NoPool(settings.students, rng)
        id = EpisodeId("play", 0, 0, i)
        episode = Episode(id, task, settings, ledger, pool, validator, folder)
        await play(episode, Scripted(noisy(task, rng, rng.choice(SKILLS))), heard.append)
    for leftover in folder.glob(f"{i}.sqlite*"):
        leftover.unlink()
    return heard


def conversations_now(
    settings: RunSettings, n: int, seed: int, say: Callable[[str], None]
) -> list[list[Message]]:
    """The same, from code that is not asynchronous, with a line now and then."""
    done = itertools.count(1)

    def on_done() -> None:
        if (number := next(done)) % 100 == 0:
            say(f"conversations: {number} of {n}")

    return asyncio.run(conversations(settings, n, seed, on_done))


def agent_trace(conversation: list[Message], chat_format: ChatFormat) -> Trace:
    """A conversation as token ids; the agent's own messages are what is learnt."""
    schemas: list[dict[str, Any]] = tools.schemas()
    tokens = chat_format.prompt(conversation[:1], schemas)
    learn = [False] * len(tokens)
    rest = conversation[1:]
    while rest:
        answers = next(
            (i for i, m in enumerate(rest[1:]) if m["role"] == "assistant"), len(rest) - 1
        )
        spoken = chat_format.encode(said(rest[0]) + chat_format.end)
        heard = chat_format.continuation(rest[1 : answers + 1]) if len(rest) > answers + 1 else []
        tokens += spoken + heard
        learn += [True] * len(spoken) + [False] * len(heard)
        rest = rest[answers + 1 :]
    return Trace(tokens, learn)


def said(message: Message) -> str:
    """A message's text as it is tokenised, its tool calls included."""
    calls = [chat.call_text(c["name"], c["arguments"]) for c in message.get("tool_calls") or []]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])
