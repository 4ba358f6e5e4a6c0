"""The chat format of metatrainer.chat as a tinker-cookbook renderer, under the name "nano".

Tokens are those of ChatFormat, which the nano agent was pretrained on. Knows nothing about
episodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.base import (
    Message,
    ParseTermination,
    Renderer,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer

from metatrainer import chat
from metatrainer.chat import NANO, ChatFormat, Turn
from metatrainer.errors import ConfigError
from metatrainer.shown import one_line


class NanoRenderer(Qwen3InstructRenderer):
    """Qwen3's turns and tool calls, with the tools in the system message one line each."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self._chat = ChatFormat(tokenizer)

    def create_conversation_prefix_with_tools(
        self, tools: list[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        return [Message(role="system", content=chat.system_text(system_prompt, tools))]

    def build_generation_prompt(
        self, messages: list[Message], role: str = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        if role != "assistant" or prefill:
            return super().build_generation_prompt(messages, role, prefill)
        tokens = self._chat.prompt([_plain(message) for message in messages])
        return tinker.ModelInput.from_ints(tokens)

    def continuation(self, messages: Sequence[Mapping[str, Any]], ended: bool) -> list[int]:
        """What follows a sampled assistant message, up to where the assistant speaks again.

        ended: the sample has its own end token; else one is supplied.
        """
        return self._chat.continuation(messages, ended)

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        turn = self._chat.parse(response)
        termination = ParseTermination.STOP_SEQUENCE if turn.clean else ParseTermination.MALFORMED
        return _message(turn), termination


def register() -> None:
    """Make "nano" a name that tinker-cookbook knows."""
    renderers.register_renderer(NANO, lambda tokenizer, _: NanoRenderer(tokenizer))


def get(name: str, tokenizer: Any) -> Renderer:
    """The renderer of a name, nano included, which fits the tokenizer.

    Raises ConfigError for an unknown name, and for a renderer whose tokens the tokenizer does not
    have or that has no tools.
    """
    register()
    try:
        found = renderers.get_renderer(name, tokenizer)
        stops = found.get_stop_sequences()
        prefix = found.create_conversation_prefix_with_tools([_TOOL])
        found.build_generation_prompt([*prefix, Message(role="user", content="")])
    except RendererError:
        raise ConfigError(
            f'agent.renderer: unknown {name!r}; valid: "{NANO}", and those of tinker-cookbook, as '
            '"qwen3", "qwen3_5" or "gpt_oss_medium_reasoning"'
        ) from None
    except Exception as error:  # each renderer has its own way to fail on a tokenizer of others
        raise _unfit(name, f"{type(error).__name__}: {error}") from None
    unknown = tokenizer.unk_token_id
    if not stops or any(stop is None or stop == unknown for stop in stops):
        raise _unfit(name, "the tokenizer lacks the token that ends a message")
    return found


def recommended(name: str, model: str) -> None:
    """See that a renderer is one for a model that tinker-cookbook knows. Raises ConfigError."""
    try:
        fitting = model_info.get_recommended_renderer_names(model)
    except (ConfigurationError, LookupError, ValueError):
        return  # a model it does not know; the tokenizer will tell
    if name not in fitting:
        raise ConfigError(
            f"agent.renderer: {name!r} is not for {model}; use {' or '.join(map(repr, fitting))}"
        )


_TOOL = ToolSpec(name="look", description="", parameters={"type": "object", "properties": {}})


def _unfit(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"agent.renderer: {name!r} does not fit the model's tokenizer, or has no tools; choose the "
        f"one of the model's family ({one_line(why, 200)})"
    )


def text_of(message: Message) -> str:
    """The text of a message, thinking left out."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _message(turn: Turn) -> Message:
    message = Message(role="assistant", content=turn.text)
    if turn.calls:
        message["tool_calls"] = [
            ToolCall(
                function=ToolCall.FunctionBody(name=call.name, arguments=json.dumps(call.arguments))
            )
            for call in turn.calls
        ]
    if turn.errors:
        message["unparsed_tool_calls"] = [
            UnparsedToolCall(raw_text="", error=error) for error in turn.errors
        ]
    return message


def _plain(message: Message) -> dict[str, Any]:
    """A cookbook message as ChatFormat takes it."""
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in message.get("tool_calls", [])
    ]
    return {"role": message["role"], "content": text_of(message), "tool_calls": calls}
