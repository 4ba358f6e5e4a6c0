"""One episode's conversation as tokens: what the agent is shown, and what it said.

Between an episode's plain messages and any tinker-cookbook renderer. Knows nothing about what the
messages are about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tinker
from tinker_cookbook.renderers.base import Message, Renderer, ToolCall

from metatrainer.outer.renderer import NanoRenderer, text_of


class Conversation:
    """Grows by the agent's sampled messages and the answers to them.

    With the nano renderer the prompt grows by token ids alone and nothing that was sampled is
    tokenised again. Other renderers render the messages anew, as tinker-cookbook does; what is
    trained on are the sampled tokens after the prompt that they were sampled from in either case.
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ):
        """messages: a system message or none, then what the user says."""
        self._renderer = renderer
        rest = [_cookbook(message) for message in messages]
        system = text_of(rest.pop(0)) if rest[0]["role"] == "system" else ""
        prefix = renderer.create_conversation_prefix_with_tools(list(tools), system)
        self._messages: list[Message] = [*prefix, *rest]
        self.prompt = renderer.build_generation_prompt(self._messages)
        """What the agent reads next."""

    def hear(self, tokens: list[int]) -> dict[str, Any]:
        """A sampled message as an episode takes it: role, content, tool_calls, errors."""
        message, termination = self._renderer.parse_response(tokens)
        self._messages.append(message)
        self._heard, self._ended = tokens, termination.is_clean
        errors = [unparsed.error for unparsed in message.get("unparsed_tool_calls", [])]
        if not self._ended:
            errors.insert(0, f"the message was cut off after {len(tokens)} tokens, the limit")
        calls: list[dict[str, Any]] = []
        for n, call in enumerate(message.get("tool_calls", [])):
            found = _call(n, call)
            if isinstance(found, str):
                errors.append(found)
            else:
                calls.append(found)
        return {
            "role": "assistant",
            "content": text_of(message),
            "tool_calls": calls if self._ended else [],
            "errors": errors,
        }

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append the answers to the message that was heard last."""
        self._messages += [_cookbook(message) for message in messages]
        if isinstance(self._renderer, NanoRenderer):
            said = [*self.prompt.to_ints(), *self._heard]
            follows = self._renderer.continuation(messages, self._ended)
            self.prompt = tinker.ModelInput.from_ints([*said, *follows])
        else:
            self.prompt = self._renderer.build_generation_prompt(self._messages)


_KEYS = ("role", "content", "tool_call_id", "name")


def _call(n: int, call: ToolCall) -> dict[str, Any] | str:
    """A call as an episode takes it, or what is wrong with its arguments."""
    try:
        arguments = json.loads(call.function.arguments)
    except json.JSONDecodeError as error:
        return f"the arguments of {call.function.name} are not JSON: {error.msg}"
    if not isinstance(arguments, dict):
        return f"the arguments of {call.function.name} must be an object"
    return {"id": call.id or f"call-{n}", "name": call.function.name, "arguments": arguments}


def _cookbook(message: Mapping[str, Any]) -> Message:
    kept = {
        key: message[key] for key in ("role", "content", "tool_call_id", "name") if key in message
    }
    return Message(**kept)
