"""What is wrong with a hosted agent is said before anything is begun: a stand-in for the service
answers what the real one would, over HTTP and through its own SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import tiny
from transformers import AutoTokenizer

from metatrainer.config import RunSettings, parse_config
from metatrainer.errors import ConfigError
from metatrainer.outer import preflight, renderer

KEY = "tml-secret-5d2"
MODEL = "Qwen/Qwen3.6-35B-A3B"


class Service(BaseHTTPRequestHandler):
    """Serves one model to whoever has the key."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append(self.path)
        if self.headers.get("X-API-Key") != KEY:
            self.reply(401, {"detail": f"no such key: {self.headers.get('X-API-Key')}"})
        elif self.path.endswith("/get_server_capabilities"):
            served = [{"model_name": MODEL, "max_context_length": 65_536}]
            self.reply(200, {"supported_models": served})
        elif self.path.endswith("/create_session"):
            self.reply(200, {"type": "create_session", "session_id": "s"})
        else:
            self.reply(200, {})

    do_GET = do_POST

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that the service is asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    Service.asked.clear()
    yield Service.asked
    server.shutdown()
    server.server_close()


def hosted(**agent: object) -> RunSettings:
    return parse_config(
        {"agent": {"backend": "tinker", "model": MODEL, "renderer": "qwen3_5", **agent}}
    )


def refusal(settings: RunSettings) -> str:
    with pytest.raises(ConfigError) as error:
        preflight.check(settings)
    assert KEY not in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_model_that_is_served_with_its_renderer_passes_and_trains_nothing(service) -> None:
    preflight.check(hosted())
    begun = [path for path in service if "model" in path or "sample" in path]
    assert service and begun == []


def test_a_model_that_is_not_served_names_the_nearest(service) -> None:
    said = refusal(hosted(model="Qwen/Qwen3.6-35B-A3"))
    assert "agent.model" in said and f"did you mean {MODEL!r}" in said


def test_a_wrong_key_is_told_and_not_shown(service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-another")
    said = refusal(hosted())
    assert "TINKER_API_KEY" in said and "tml-another" not in said
    monkeypatch.setenv("TINKER_API_KEY", "of-another-form")
    assert "TINKER_API_KEY" in refusal(hosted())


def test_no_key_asks_nobody(service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    assert "TINKER_API_KEY; set it" in refusal(hosted())
    assert service == []


def test_a_renderer_of_another_model_asks_nobody(service) -> None:
    said = refusal(hosted(renderer="llama3"))
    assert "agent.renderer: 'llama3'" in said and "'qwen3_5'" in said
    assert service == []


def test_a_url_without_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(preflight, "SECONDS", 1.0)
    assert "TINKER_BASE_URL" in refusal(hosted())


def test_renderers_that_do_not_fit_a_model_of_this_machine(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert renderer.get("nano", tokenizer).get_stop_sequences()
    for name, word in (("qwen33", "unknown"), ("llama3", "tools"), ("gpt_oss_no_sysprompt", "fit")):
        with pytest.raises(ConfigError, match=rf"agent\.renderer.*{word}"):
            renderer.get(name, tokenizer)
    plain = tiny.make_tokenizer()
    other = {"<|im_end|>": "<|other|>"}
    state = json.loads(plain.backend_tokenizer.to_str())
    for added in state["added_tokens"]:
        added["content"] = other.get(added["content"], added["content"])
    plain = type(plain)(tokenizer_object=type(plain.backend_tokenizer).from_str(json.dumps(state)))
    with pytest.raises(ConfigError, match="does not fit"):
        renderer.get("nano", plain)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("agent.backend=tinker", "TINKER_API_KEY"),
        ("agent.renderer=qwen33", "agent.renderer"),
        ("outer.group_size=1", "outer.group_size"),
        ("money.max_usd=0", "money.max_usd"),
    ],
)
def test_a_run_that_cannot_be_begun_leaves_no_folder(
    tmp_path: Path, setting: str, word: str
) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "TINKER_API_KEY"}
    nano = Path(__file__).parents[2] / "configs" / "nano.toml"
    done = subprocess.run(
        [sys.executable, "-m", "metatrainer", "train", str(nano), "--set", setting],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert word in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
