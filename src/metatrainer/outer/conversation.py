"""One episode's conversation as tokens: what the agent is shown, and what it said.

Between an episode's plain messages and any tinker-cookbook renderer. Knows nothing about what the
messages are about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tinker
from tinker_cookbook.renderers.base import Message, Renderer

from metatrainer.agent.heard import heard
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
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in message.get("tool_calls", [])
        ]
        errors = [unparsed.error for unparsed in message.get("unparsed_tool_calls", [])]
        return heard(text_of(message), calls, errors, None if self._ended else len(tokens))

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append the answers to the message that was heard last."""
        self._messages += [_cookbook(message) for message in messages]
        if isinstance(self._renderer, NanoRenderer):
            said = [*self.prompt.to_ints(), *self._heard]
            follows = self._renderer.continuation(messages, self._ended)
            self.prompt = tinker.ModelInput.from_ints([*said, *follows])
        else:
            self.prompt = self._renderer.build_generation_prompt(self._messages)


def _cookbook(message: Mapping[str, Any]) -> Message:
    kept = {
        key: message[key] for key in ("role", "content", "tool_call_id", "name") if key in message
    }
    return Message(**kept)
