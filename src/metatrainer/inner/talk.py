"""A student behind an OpenAI-compatible chat server talks, and a family's tools answer it here.

The same turns as inner/rollout.py: mistakes are answered with text, a message that was cut off ends
the conversation. Standard library only, as it also runs where prime-rl does; knows nothing about
HTTP, tasks or rewards.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metatrainer.chat import parse_text, result_text
from metatrainer.families import Family

Message = dict[str, Any]
Ask = Callable[[list[Message]], Awaitable[Any]]
"""Sends a conversation to the server; its answer as parsed JSON, or None to end it."""


class BadAnswer(Exception):
    """The server's answer is no chat completion."""


@dataclass
class Talk:
    """One conversation."""

    messages: list[Message]
    finished: bool = False
    """The student ended by itself with a reply that calls no tool."""

    @property
    def reply(self) -> str:
        """The final answer; empty if the student never gave one."""
        return str(self.messages[-1]["content"] or "") if self.finished else ""


def tool_schemas(family: Family) -> list[dict[str, Any]]:
    """The family's tools as a chat request carries them."""
    return [{"type": "function", "function": tool.schema} for tool in family.tools]


async def talk(
    ask: Ask,
    family: Family,
    world: Mapping[str, Any],
    messages: list[Message],
    max_turns: int | None = None,
) -> Talk:
    """Talk until the student replies without a call, is cut off, or has had its turns.

    messages: how the conversation begins. max_turns: None leaves the end to `ask`.
    Raises BadAnswer, and whatever `ask` does.
    """
    done = Talk(list(messages))
    turn = 0
    while max_turns is None or turn < max_turns:
        turn += 1
        answer = await ask(done.messages)
        if answer is None:
            break
        message, clean = read_answer(answer)
        done.messages.append(message)
        results = _results(family, world, message)
        done.finished = clean and not results
        if not clean or not results:
            break
        if max_turns is None or turn < max_turns:
            done.messages += results
    return done


def read_answer(answer: Any) -> tuple[Message, bool]:
    """The assistant's message in a chat completion, and whether it ended by itself.

    Raises BadAnswer.
    """
    try:
        choice = answer["choices"][0]
        said, reason = choice["message"], choice["finish_reason"]
        content, calls = said.get("content"), said.get("tool_calls") or []
        kept = [
            {
                "id": str(call["id"]),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": str(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise BadAnswer(f"not a chat completion: {error!r}") from None
    if content is not None and not isinstance(content, str):
        raise BadAnswer(f"the content is a {type(content).__name__}")
    message = {"role": "assistant", "content": content, **({"tool_calls": kept} if kept else {})}
    return message, reason != "length"


def _results(family: Family, world: Mapping[str, Any], message: Message) -> list[Message]:
    """Answers to a message's calls, malformed ones included.

    A call that the server left in the text has no id to answer to: it is answered as the chat
    format shows an answer.
    """
    answers: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": _run(family, world, call["function"]),
        }
        for call in message.get("tool_calls", ())
    ]
    turn = parse_text(message["content"] or "")
    texts = [family.call(world, call.name, call.arguments) for call in turn.calls]
    texts += [f"error: {problem}" for problem in turn.errors]
    return answers + [{"role": "user", "content": result_text(text)} for text in texts]


def _run(family: Family, world: Mapping[str, Any], function: Mapping[str, str]) -> str:
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the tool call is not JSON: {error}"
    if not isinstance(arguments, dict):
        return 'error: "arguments" must be an object'
    return family.call(world, function["name"], arguments)
