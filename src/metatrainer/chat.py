"""The chat format of students and of the nano agent: Qwen3's turns and tool calls, as token ids.

A conversation grows by appending token ids: what was sampled is never tokenised again. Tools stand
in the system message, one line each. A model whose tokenizer has Gemma's turns gets those instead.
Knows nothing about who samples or what tools do.

    <|im_start|>system
    lookup(name, relation)<|im_end|>
    <|im_start|>user
    Who is the boss of BelMar?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "lookup", "arguments": {"name": "BelMar", "relation": "boss"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    KelRon
    </tool_response><|im_end|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from metatrainer.errors import ConfigError

NANO = "nano"
"""The format's name among renderers."""
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", IM_START, IM_END)
PLAIN_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Tokens of their own that, as in Qwen3, are ordinary text to the tokenizer."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Marks:
    """How a family of models writes its turns."""

    start: str
    end: str
    first: str = ""
    """What stands before the first turn."""
    assistant: str = "assistant"
    system: bool = True
    """There are system turns; else what they say begins the first user turn."""

    def turn(self, role: str, content: str) -> str:
        """One whole message."""
        return f"{self.opened(role)}{content}{self.end}"

    def opened(self, role: str) -> str:
        """The beginning of a message."""
        return f"{self.start}{self.assistant if role == 'assistant' else role}\n"


QWEN = Marks(IM_START, IM_END)
GEMMA = Marks("<start_of_turn>", "<end_of_turn>", "<bos>", "model", system=False)


@dataclass(frozen=True)
class Call:
    """A tool call that could be parsed."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What a sampled assistant message says."""

    text: str
    """The text outside of tool calls."""
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = field(default=())
    """Why a tool call could not be parsed, for the model to read."""
    clean: bool = True
    """The message ended by itself rather than by a limit."""


def tool_line(schema: Mapping[str, Any]) -> str:
    """`lookup(name, relation)`: a tool as the system message lists it."""
    return f"{schema['name']}({', '.join(schema['parameters'].get('properties', {}))})"


def system_text(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The content of the system message: the text, then a line for each tool."""
    return "\n".join([*([text] if text else []), *(tool_line(t) for t in tools)])


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as an assistant message holds it."""
    payload = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{payload}\n</tool_call>"


def result_text(result: str) -> str:
    """A tool's result as the user message holds it."""
    return f"<tool_response>\n{result}\n</tool_response>"


def parse_call(text: str) -> Call | str:
    """A call from the JSON inside a tool_call block, or what is wrong with it."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        return f"the tool call is not JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return "the tool call is nested too deeply"
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return 'a tool call needs "name" and "arguments"'
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return '"arguments" must be an object'
    return Call(data["name"], arguments)


def parse_text(text: str, clean: bool = True) -> Turn:
    """An assistant message's text, taken apart. Nothing in it raises."""
    found = [parse_call(block) for block in _CALL.findall(text)]
    errors = [f for f in found if isinstance(f, str)]
    rest = _CALL.sub("", text)
    if "<tool_call>" in rest:
        errors.append("a <tool_call> was not closed with </tool_call>")
    calls = tuple(f for f in found if isinstance(f, Call))
    return Turn(rest.strip(), calls, tuple(errors), clean)


class ChatFormat:
    """The format over one tokenizer, a fast one of transformers or what is inside of it.

    Raises ConfigError for a tokenizer that has no tokens for turns.
    """

    def __init__(self, tokenizer: Any):
        # The Rust tokenizer itself: rollouts of tiny models spend more time in wrappers than in it.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._marks = _marks(self._tokenizer)
        self.end = self._marks.end
        self._end = self._tokenizer.token_to_id(self.end)
        self.stop: tuple[int, ...] = (self._end,)
        self._encode = lru_cache(maxsize=65536)(
            lambda text: tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which the format's own tokens count as such."""
        return list(self._encode(text))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """A conversation up to where the assistant speaks.

        messages: OpenAI-style dicts with role, content and, for assistants, tool_calls as
        {"name", "arguments"}. A system message is made if there is none and there are tools.
        """
        messages = list(messages)
        first = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        system = system_text(first, tools)
        parts = []
        if system and self._marks.system:
            parts.append(self._marks.turn("system", system))
        elif system:
            asked = messages.pop(0)
            parts.append(self._render({**asked, "content": f"{system}\n\n{asked['content']}"}))
        for message in messages:
            parts.append(self._render(message))
        text = "\n".join([*parts, self._marks.opened("assistant")])
        return self.encode(self._marks.first + text)

    def continuation(self, answers: Sequence[Mapping[str, Any]], ended: bool = True) -> list[int]:
        """What follows a sampled assistant message: the answers to it, then the assistant again.

        answers: tool and user messages. ended: the sample has its own end token; else one is
        supplied.
        """
        start = "" if ended else self.end
        turns = [self._render(message) for message in answers]
        return self.encode("\n".join([start, *turns, self._marks.opened("assistant")]))

    def parse(self, tokens: Sequence[int]) -> Turn:
        """A sampled message, with or without its end token."""
        clean = bool(tokens) and tokens[-1] == self._end
        body = list(tokens[:-1] if clean else tokens)
        return parse_text(self._tokenizer.decode(body, skip_special_tokens=False), clean)

    def _render(self, message: Mapping[str, Any]) -> str:
        if message["role"] == "tool":
            return self._marks.turn("user", result_text(message["content"]))
        text = message["content"] or ""
        calls = [call_text(c["name"], c["arguments"]) for c in message.get("tool_calls") or []]
        return self._marks.turn(message["role"], "\n".join([*([text] if text else []), *calls]))


def _marks(tokenizer: Any) -> Marks:
    for marks in (QWEN, GEMMA):
        if tokenizer.token_to_id(marks.end) is not None:
            return marks
    raise ConfigError(
        f"the model's tokenizer has neither {QWEN.end} nor {GEMMA.end}, so it cannot hold a "
        "conversation; take a model that was made for chat"
    )
