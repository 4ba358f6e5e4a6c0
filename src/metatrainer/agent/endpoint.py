"""Agents behind any server that speaks OpenAI's chat completions with tools.

One request for each message; transport, rate limits and jitter are the openai client's. Messages
that cannot be read as calls are answered as those of a trained agent are. Knows nothing about
episodes or about what tools do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai

from metatrainer.agent.heard import heard
from metatrainer.agent.policies import Message
from metatrainer.chat import parse_text
from metatrainer.config import EndpointSettings, nearest
from metatrainer.errors import AgentError, ConfigError, ContextFull, MetatrainerError
from metatrainer.inner.talk import BadAnswer, read_answer
from metatrainer.shown import one_line

KEY = "OPENAI_API_KEY"
CHECK_SECONDS = 20.0
_LIMITS = ("max_tokens", "max_completion_tokens")
"""The limit of a message: as servers know it, and as newer models of OpenAI want it called."""
_FULL = re.compile(r"context.?(length|window|size)|maximum context|prompt is too long", re.I)
"""How servers word that a conversation does not fit their model."""
_UNREADABLE = "(a tool call that could not be read)"
_SAID_CHARS = 200


@dataclass(frozen=True)
class Address:
    """A model and the server that has it."""

    model: str
    url: str

    @property
    def key_names(self) -> tuple[str, str]:
        """Environment variables that may hold the key: this server's own, and anyone's."""
        host = re.sub(r"[^A-Z0-9]+", "_", urlsplit(self.url).netloc.upper())
        return f"{KEY}_{host}", KEY


def parse(text: str) -> Address:
    """The address in MODEL@URL. Raises ConfigError."""
    model, _, url = text.rpartition("@")
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and not parts.username
        sound = sound and parts.port != 0
    except ValueError:
        sound = False
    if not model or not sound:
        raise ConfigError(
            f"{one_line(text, _SAID_CHARS)!r} names no model at a URL; write openai:MODEL@URL, as "
            "in openai:my-model@http://localhost:8000/v1"
        )
    return Address(model, url.rstrip("/"))


class Endpoint:
    """One model of one server; the policies of many episodes share it."""

    def __init__(
        self, address: Address, settings: EndpointSettings, temperature: float, priced: bool = False
    ):
        """priced: answers have to say how many tokens they used. Raises ConfigError without key."""
        self._address, self._settings = address, settings
        self._temperature, self._priced = temperature, priced
        self._key_name, self._key = _find_key(address)
        self._client = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=address.url,
            timeout=settings.request_seconds,
            max_retries=settings.retries,
        )

    def check(self) -> None:
        """Ask the server for its models, which costs nothing. Raises ConfigError if it is not
        there, refuses the key, has no such model, or is no such server."""
        url, model = self._address.url, self._address.model
        client = openai.OpenAI(
            api_key=self._key, base_url=url, timeout=CHECK_SECONDS, max_retries=1
        )
        try:
            with client:
                listed = client.get("/models", cast_to=object)
            names = [str(entry["id"]) for entry in listed["data"]]  # type: ignore[index]
        except openai.NotFoundError:
            return  # it keeps no list: its first answer will tell
        except openai.OpenAIError as error:
            raise ConfigError(str(self._explain(error))) from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{url}/models answers no JSON list of models, so this is no OpenAI-compatible "
                "API; check the URL, which mostly ends in /v1"
            ) from None
        if model not in names:
            hint = nearest(model, names) if names else "it has none"
            raise ConfigError(f"{url} has no model {model!r}; {one_line(hint, 1_000)}")

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], seed: int
    ) -> Message:
        """The model's next message.

        Raises ContextFull where the conversation does not fit, AgentError for what may pass by,
        ConfigError for what will not.
        """
        answer = await self._post(
            {
                "model": self._address.model,
                "messages": [_sent(message) for message in messages],
                "tools": [{"type": "function", "function": dict(tool)} for tool in tools],
                "temperature": self._temperature,
                "seed": seed,
                _LIMITS[0]: self._settings.max_tokens,
            }
        )
        try:
            message = read(answer, self._settings.max_tokens)
        except BadAnswer as error:
            raise AgentError(f"{self._address.url} answers no chat completion: {error}") from None
        if self._priced and "usage" not in message:
            raise AgentError(
                f"{self._address.url} does not say how many tokens it used, so they cannot be paid "
                "for; leave the prices of tokens out of money"
            )
        return message

    async def _post(self, body: dict[str, Any]) -> Any:
        try:
            return await self._client.post("/chat/completions", body=body, cast_to=object)
        except openai.BadRequestError as error:
            old, new = _LIMITS
            if old in body and new in error.message:
                return await self._post({new: body[old], **{k: body[k] for k in body if k != old}})
            raise self._explain(error) from None
        except openai.OpenAIError as error:
            raise self._explain(error) from None
        except ValueError:
            raise AgentError(f"{self._address.url} answers JSON that cannot be read") from None

    def _explain(self, error: openai.OpenAIError) -> MetatrainerError:
        """What a failed request means to whoever named this agent."""
        url = self._address.url
        said = one_line(str(error).replace(self._key, "***"), _SAID_CHARS)
        match error:
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                return ConfigError(
                    f"{url} refuses the key in {self._key_name} ({error.status_code}); set the "
                    f"right one there, or in {self._address.key_names[0]}: {said}"
                )
            case openai.NotFoundError():
                return ConfigError(
                    f"{url} has no model {self._address.model!r}, or no chat completions (404); "
                    f"check both: {said}"
                )
            case openai.APITimeoutError():
                return AgentError(f"{url} did not answer in time")
            case openai.APIConnectionError():
                cause = one_line(str(error.__cause__ or error), _SAID_CHARS)
                return AgentError(f"nothing answers at {url}; start the server there: {cause}")
            case openai.APIStatusError() if _FULL.search(str(error)) or error.status_code == 413:
                return ContextFull(f"{url}: {said}")
        return AgentError(f"{url} answers an error: {said}")


class Asked:
    """A policy of one episode that asks an endpoint."""

    def __init__(self, endpoint: Endpoint, seed: int):
        self._endpoint, self._seed = endpoint, seed

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Ask for the next message."""
        return await self._endpoint.ask(messages, tools, (self._seed + len(messages)) % (1 << 31))


def read(answer: Any, limit: int) -> Message:
    """A chat completion as an episode takes a message, with the tokens it used where it says so.

    Calls that the server left in the text count as well. limit: tokens of a message that was cut
    off. Raises BadAnswer.
    """
    said, clean = read_answer(answer)
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in said.get("tool_calls", ())
    ]
    turn = parse_text(said["content"] or "", clean)
    calls += [(f"call-{n}", c.name, c.arguments) for n, c in enumerate(turn.calls, len(calls))]
    message = heard(turn.text, calls, turn.errors, None if clean else limit)
    match answer.get("usage"):
        case {"prompt_tokens": int(prompt), "completion_tokens": int(sampled)}:
            message["usage"] = {"prompt_tokens": prompt, "sampled_tokens": sampled}
    return message


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of an episode as the API takes it."""
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": role, "tool_call_id": message["tool_call_id"], "content": content}
    if role != "assistant":
        return {"role": role, "content": content}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    if calls:
        return {"role": role, "content": content or None, "tool_calls": calls}
    return {"role": role, "content": content or _UNREADABLE}


def _find_key(address: Address) -> tuple[str, str]:
    """The variable that holds the key, and the key. Raises ConfigError."""
    own, common = address.key_names
    for name in (own, common):
        if key := os.environ.get(name, "").strip():
            # Anything else would end up, quoted, in an error of the HTTP client.
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"the key in {name} holds a space or no ASCII; set it again")
            return name, key
    raise ConfigError(
        f"no API key for {address.url}: set {common}, or {own} for this server alone "
        "(to any word, if the server asks for none)"
    )
