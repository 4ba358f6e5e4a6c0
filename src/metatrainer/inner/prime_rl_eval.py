"""The hidden evaluation of a student behind an inference server, as students/evaluate.py does it.

The same items, turns and sampling before and after. prime-rl's own checks are not used: they leave
out rollouts that failed, and may miss the last policy. Never sees an environment or a job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from metatrainer.config import EvalSettings
from metatrainer.errors import JobError
from metatrainer.families import Family, Item
from metatrainer.inner.talk import BadAnswer, Message, Talk, talk, tool_schemas
from metatrainer.jobs.compile import THINKING
from metatrainer.pool.base import LOST
from metatrainer.students.evaluate import SAMPLES
from metatrainer.students.score import Score

AT_A_TIME = 64
"""Conversations in flight."""
REQUEST_SECONDS = 120.0
TRIES = 3
"""Of one request."""
GARBAGE = "garbage"
"""Outcome where the server answers nothing that could be scored."""


def evaluate(
    url: str,
    model: str,
    student: str,
    family: Family,
    items: Sequence[Item],
    settings: EvalSettings,
    seed: int,
) -> Score:
    """Score what the server at `url` calls `model`. A conversation that fails is a wrong answer.

    Raises JobError(LOST) if the server is not there, JobError(GARBAGE) if no conversation worked.
    """
    talks = _talk_all(url, model, family, items, settings, seed)
    if all(isinstance(t, BadAnswer | httpx.HTTPStatusError) for t in talks):
        raise JobError(GARBAGE, f"no answer of the server could be read: {talks[0]}")
    right = sum(
        isinstance(t, Talk) and family.correct(t.reply, item.answer)
        for t, item in zip(talks, items, strict=True)
    )
    return Score.of(student, family.name, right, len(items))


def sample_conversations(
    url: str, model: str, family: Family, settings: EvalSettings
) -> list[dict[str, Any]]:
    """A few conversations on dev examples, as students.evaluate keeps them."""
    items = family.items("dev", 0, SAMPLES)
    talks = _talk_all(url, model, family, items, settings, 0)
    return [
        {
            "correct": family.correct(t.reply, item.answer),
            "messages": [_plain(m) for m in t.messages],
        }
        for t, item in zip(talks, items)
        if isinstance(t, Talk)
    ]


def _talk_all(
    url: str,
    model: str,
    family: Family,
    items: Sequence[Item],
    settings: EvalSettings,
    seed: int,
) -> list[Talk | Exception]:
    """A conversation for each item, or why there is none."""

    async def run() -> list[Talk | Exception]:
        gate = asyncio.Semaphore(AT_A_TIME)
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS) as client:

            async def one(number: int, item: Item) -> Talk | Exception:
                sampling = _sampling(settings, seed * 1_000_003 + number)

                async def ask(messages: list[Message]) -> Any:
                    said = {"model": model, "messages": messages, "tools": tool_schemas(family)}
                    return await _post(client, {**said, **sampling})

                start = [{"role": "user", "content": item.prompt}]
                async with gate:
                    try:
                        return await talk(ask, family, item.world, start, settings.max_turns)
                    except (BadAnswer, httpx.HTTPStatusError) as error:
                        return error

            return await asyncio.gather(*(one(i, item) for i, item in enumerate(items)))

    try:
        return asyncio.run(run())
    except httpx.HTTPError as error:
        raise JobError(LOST, f"the inference server is gone: {error!r}") from None


def _sampling(settings: EvalSettings, seed: int) -> dict[str, Any]:
    """What a request says of sampling: all of it, so that no default of the server counts."""
    return {
        "temperature": settings.temperature,
        "top_p": 1.0,
        "max_tokens": settings.max_tokens,
        "seed": seed % (1 << 31),
        **THINKING,
    }


async def _post(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """The answer as JSON. Raises BadAnswer for other text, HTTPError past the last try."""
    for left in reversed(range(TRIES)):
        try:
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if refused or not left:
                raise
        except ValueError:
            raise BadAnswer("not JSON") from None
    raise AssertionError("unreachable")


def _plain(message: Message) -> Message:
    """A message as the embedded engine writes it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    plain = {"role": message["role"], "content": message["content"] or ""}
    return {**plain, **({"tool_calls": calls} if calls else {})}
