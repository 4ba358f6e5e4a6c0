"""What a model said, as an episode takes it: one policy for every kind of agent.

A call that cannot be read is an error for the agent to read; calls of a message that was cut off do
not count. Knows nothing about how the message was sampled or parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from metatrainer.agent.policies import Message


def heard(
    text: str,
    calls: Iterable[tuple[str | None, str, Any]],
    errors: Iterable[str],
    cut_after: int | None,
) -> Message:
    """An assistant message: role, content, tool_calls, errors.

    calls: id, tool, and arguments, an object or its JSON text. errors: of calls that could not be
    parsed. cut_after: tokens of a message that was cut off; None if it ended by itself.
    """
    wrong = list(errors)
    if cut_after is not None:
        wrong.insert(0, f"the message was cut off after {cut_after} tokens, the limit")
    sound: list[dict[str, Any]] = []
    for n, (id, name, given) in enumerate(calls):
        arguments = _arguments(name, given)
        if isinstance(arguments, str):
            wrong.append(arguments)
        else:
            sound.append({"id": id or f"call-{n}", "name": name, "arguments": arguments})
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": sound if cut_after is None else [],
        "errors": wrong,
    }


def _arguments(name: str, given: Any) -> dict[str, Any] | str:
    """The arguments of a call, or what is wrong with them."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except json.JSONDecodeError as error:
            return f"the arguments of {name} are not JSON: {error.msg}"
        except RecursionError:
            return f"the arguments of {name} are nested too deeply"
    return given if isinstance(given, dict) else f"the arguments of {name} must be an object"
