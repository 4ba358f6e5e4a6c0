"""Conversations with known quality, to see whether a job's rewards can tell them apart.

Built from the job's own tasks and the family's tools. Knows nothing about sandboxes or findings.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from metatrainer.families import Family
from metatrainer.sandbox.host import TaskRow

Message = dict[str, Any]
KINDS = ("right", "plain", "wrong", "empty", "random", "tools")
MAX_CALLS = 2000
"""Tool calls tried on a task's world to find some that work."""


@dataclass(frozen=True)
class Probe:
    """One conversation about one task."""

    kind: str
    """right and wrong answer after tool calls, plain is right without any, empty and random
    answer just that, tools calls tools and never answers."""
    task: int
    messages: list[Message]


def probes(family: Family, rows: list[TaskRow], indices: list[int]) -> list[Probe]:
    """All kinds of conversations about the tasks at `indices`."""
    rng = random.Random(0)
    return [
        Probe(kind, index, messages)
        for index in indices
        for kind, messages in _conversations(family, rows, index, rng)
    ]


def _conversations(
    family: Family, rows: list[TaskRow], index: int, rng: random.Random
) -> Iterator[tuple[str, list[Message]]]:
    row = rows[index]
    answer = str(row.data["answer"])
    start: list[Message] = [{"role": "user", "content": row.prompt}]
    if row.system_prompt:
        start.insert(0, {"role": "system", "content": row.system_prompt})
    calls = start + _tool_messages(family, row.data["world"], answer)
    noise = "".join(rng.choice("abcdefghij klmnop") for _ in range(24))
    yield "right", [*calls, _say(answer)]
    yield "plain", [*start, _say(answer)]
    yield "wrong", [*calls, _say(_other_answer(rows, index))]
    yield "empty", [*start, _say("")]
    yield "random", [*start, _say(noise)]
    yield "tools", [*calls, _say("")]


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _other_answer(rows: list[TaskRow], index: int) -> str:
    """An answer of another task that has nothing of this one's right answer in it."""
    right = str(rows[index].data["answer"])
    others = (str(row.data["answer"]) for row in rows[index + 1 :] + rows[:index])
    return next((o for o in others if right not in o and o not in right), "xyzzy")


def _tool_messages(family: Family, world: Any, answer: str) -> list[Message]:
    """Two working calls with their results, the second with the answer in it if there is one."""
    chosen: list[tuple[str, dict[str, str], str]] = []
    for call in _working_calls(family, world):
        chosen = [*chosen[:1], call]
        if answer in call[2]:
            break
    return [message for i, call in enumerate(chosen) for message in _exchange(f"call_{i}", *call)]


def _exchange(ident: str, name: str, arguments: dict[str, str], result: str) -> list[Message]:
    function = {"name": name, "arguments": arguments}
    call = {"id": ident, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": ident, "name": name, "content": result},
    ]


def _working_calls(family: Family, world: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """Calls that the tools answer: every tool on combinations of the strings of the world."""
    strings = list(dict.fromkeys(_strings(world)))
    tries = (
        (tool.name, dict(zip(tool.parameters["required"], values, strict=True)))
        for tool in family.tools
        for values in itertools.product(strings, repeat=len(tool.parameters["required"]))
    )
    for name, arguments in itertools.islice(tries, MAX_CALLS):
        result = family.call(world, name, arguments)
        if not result.startswith("error"):
            yield name, arguments, result


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value
