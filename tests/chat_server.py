"""A stand-in for prime-rl's inference server: its routes, and a student that knows some answers.

As a program it is the `inference` executable: chat_server.py SKILL FAMILY SEED N @ inference.toml.
The base model knows the share SKILL of the items, an adapter all of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from metatrainer import families
from metatrainer.families import Item

Answer = tuple[dict[str, Any], str]
"""The assistant's message, and why it ended."""


def say(text: str, reason: str = "stop") -> Answer:
    return {"role": "assistant", "content": text}, reason


def call(name: str, arguments: Any) -> Answer:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    made = {"id": "call-0", "type": "function", "function": {"name": name, "arguments": text}}
    return {"role": "assistant", "content": None, "tool_calls": [made]}, "tool_calls"


@dataclass(frozen=True)
class Raw:
    """An answer as bytes, for what goes wrong."""

    status: int = 200
    body: bytes = b"{}"
    type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0
    """Seconds before it."""
    cut: int = 0
    """Bytes that are promised and never come."""


class Player:
    """Plays items as a perfect student would, but for those it does not know."""

    def __init__(self, items: Iterable[Item], skill: float = 1.0):
        self.items = {item.prompt: (i, item) for i, item in enumerate(items)}
        self.skill = skill

    def __call__(self, body: dict[str, Any], adapters: dict[str, str]) -> Answer:
        messages = body["messages"]
        prompt = next(m["content"] for m in messages if m["role"] == "user")
        number, item = self.items.get(prompt, (0, None))
        known = body["model"] in adapters or number < self.skill * len(self.items)
        if item is None or not known:
            return say("no idea")
        said = sum(m["role"] == "assistant" for m in messages)
        return call(*item.calls[said]) if said < len(item.calls) else say(item.answer)


class ChatServer(ThreadingHTTPServer):
    """Answers on the loopback; keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any], dict[str, str]], Any], port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.headers: list[dict[str, str]] = []
        self.models: Any = {"object": "list", "data": [{"id": "solver"}]}
        """What GET /v1/models answers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        if self.path == "/v1/models":
            return self._answer(self.server.models)
        self._reply(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/load_lora_adapter":
            there = (Path(body["lora_path"]) / "adapter_model.safetensors").exists()
            if there:
                self.server.adapters[body["lora_name"]] = body["lora_path"]
            return self._reply(200 if there else 400, {})
        if self.path != "/v1/chat/completions":
            return self._reply(404, {})
        self.server.asked.append(body)
        self.server.headers.append(dict(self.headers))
        answer = self.server.answer(body, self.server.adapters)
        if not isinstance(answer, tuple):
            return self._answer(answer)
        message, reason = answer
        self._reply(
            200,
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
            },
        )

    def _answer(self, answer: Any) -> None:
        """A status, bytes as they are, or JSON."""
        if isinstance(answer, Raw):
            return self._send(answer)
        if isinstance(answer, int):
            return self._reply(answer, {"error": "as told"})
        self._reply(200, answer)

    def _reply(self, status: int, body: Any) -> None:
        self._send(Raw(status, json.dumps(body).encode()))

    def _send(self, raw: Raw) -> None:
        time.sleep(raw.wait)
        self.send_response(raw.status)
        headers = {"Content-Type": raw.type, "Content-Length": str(len(raw.body) + raw.cut)}
        for name, value in {**headers, **raw.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # of a client that did not wait
            self.wfile.write(raw.body)
        self.close_connection = raw.cut > 0

    def log_message(self, *args: object) -> None:
        pass


def main(skill: str, family: str, seed: str, n: str, at: str, config: str) -> None:
    assert at == "@"
    settings = tomllib.loads(Path(config).read_text())
    items = families.get(family).items("hidden", int(seed), int(n))
    server = ChatServer(Player(items, float(skill)), settings["server"]["port"])
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
