"""Agents behind a real local server that speaks chat completions, and all the ways it can fail."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from chat_server import ChatServer, Raw, call, say
from lab import ID, Lab, RecordingPool

from metatrainer import money
from metatrainer.agent import policies
from metatrainer.agent.endpoint import Address, Asked, Endpoint, parse, read
from metatrainer.config import EndpointSettings, MoneySettings, RunSettings
from metatrainer.episode import CONTEXT_FULL, EpisodeId, play
from metatrainer.errors import AgentError, ConfigError
from metatrainer.inner.talk import BadAnswer
from metatrainer.play import Played, find_agent, play_all
from metatrainer.reward import Terms

KEY = "sk-secret-7c1"
QUICK = EndpointSettings(request_seconds=0.3, retries=1)
HTML = Raw(200, b"<!doctype html><title>Welcome</title>", "text/html")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


class Scripted:
    """A server's model that writes the reference job; before that it answers what it is given."""

    def __init__(self, lab: Lab, *first: Any):
        self.first = list(first)
        self.script = policies.reference(lab.task, random.Random(0))
        self.heard = 0

    def __call__(self, body: dict[str, Any], adapters: object) -> Any:
        if self.first:
            return self.first.pop(0)
        replies = [m for m in body["messages"][self.heard :] if m["role"] == "tool"]
        message = self.script.send(replies) if self.heard else next(self.script)
        self.heard = len(body["messages"]) + 1
        (made,) = message["tool_calls"]
        return call(made["name"], made["arguments"])


def endpoint(server: ChatServer, settings: EndpointSettings = QUICK, priced: bool = True):
    return Endpoint(Address("solver", f"{server.url}/v1"), settings, 1.0, priced)


def play_on(lab: Lab, server: ChatServer, settings: EndpointSettings = QUICK) -> Terms:
    """An episode of the lab with the server's model."""
    return lab.run(lambda episode: play(episode, Asked(endpoint(server, settings), seed=3)))


def ask(answer: Any, settings: EndpointSettings = QUICK) -> tuple[Any, ChatServer]:
    """What comes of one question that the server always answers like this."""
    with ChatServer(lambda *_: answer() if callable(answer) else answer) as server:
        messages = [{"role": "user", "content": "Begin."}]
        return asyncio.run(endpoint(server, settings).ask(messages, [], 3)), server


def test_an_agent_behind_a_server_plays_an_episode(lab: Lab) -> None:
    with ChatServer(Scripted(lab)) as server:
        endpoint(server).check()
        assert play_on(lab, server).outcome == "ok"
    first, last = server.asked[0], server.asked[-1]
    assert {tool["function"]["name"] for tool in first["tools"]} >= {"write_file", "submit_job"}
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("solver", 1.0, 4096)
    assert all(h["Authorization"] == f"Bearer {KEY}" for h in server.headers)
    # Every call of the history is followed by its answer, as the API wants it.
    for said, answer in zip(last["messages"][1::2], last["messages"][2::2], strict=True):
        assert said["tool_calls"][0]["id"] == answer["tool_call_id"]
        assert json.loads(said["tool_calls"][0]["function"]["arguments"]) is not None
    lab.id = EpisodeId("play", 0, 0, 1)
    assert lab.follow(policies.reference(lab.task, random.Random(0))).outcome == "ok"
    first_order, second_order = lab.pool.orders
    assert first_order.job_id.split("-")[-1] == second_order.job_id.split("-")[-1]


def test_what_it_used_is_paid_for_from_the_ledger(lab: Lab) -> None:
    lab.id = EpisodeId("play", 0, 0, 0)
    with ChatServer(Scripted(lab)) as server:
        play_on(lab, server)
    prices = MoneySettings(usd_per_million_prompt_tokens=2e5, usd_per_million_sampled_tokens=6e5)
    # The server says 5 and 5 tokens of every message.
    expected = len(server.asked) * (5 * 0.2 + 5 * 0.6)
    assert money.episode_usd(lab.ledger, prices, str(lab.id)) == pytest.approx(expected)
    assert money.spending(lab.ledger, prices).tokens == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (call("write_file", '{"path": "job.toml", "content": '), "write_file are not JSON"),
        (call("write_file", "[" * 100_000), "nested too deeply"),
        (call("write_file", [1]), "must be an object"),
        (say('<tool_call>\n{"name": "submit_job"\n</tool_call>'), "the tool call is not JSON"),
        (({"content": "", "tool_calls": []}, "length"), "cut off after 4096 tokens"),
        ((call("submit_job", {})[0], "length"), "cut off after 4096 tokens"),
    ],
)
def test_what_is_no_call_is_an_error_for_the_agent_to_read(answer: Any, told: str) -> None:
    message, _ = ask(answer)
    assert message["tool_calls"] == []
    assert told in message["errors"][0]


def test_an_episode_goes_on_after_what_is_no_call(lab: Lab) -> None:
    unread = call("write_file", '{"path": ')
    with ChatServer(Scripted(lab, unread, call("submit", {}), say(""))) as server:
        assert play_on(lab, server).validation == 1.0
    told = [asked["messages"][-1]["content"] for asked in server.asked[1:4]]
    assert "are not JSON" in told[0]
    assert "did you mean submit_job" in told[1]
    assert "no tool call" in told[2]
    # Some servers take no message that is empty.
    assert all(m["content"] or m.get("tool_calls") for m in server.asked[-1]["messages"])


def test_calls_that_the_server_left_in_the_text_count() -> None:
    text = 'Now.\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
    message, _ = ask(say(text))
    assert message["content"] == "Now."
    assert message["tool_calls"] == [
        {"id": "call-0", "name": "read_file", "arguments": {"path": "a.py"}}
    ]


@pytest.mark.parametrize(
    "fault",
    [
        Raw(429, b'{"error": {"message": "slow down"}}', headers={"Retry-After": "0.01"}),
        Raw(500),
        Raw(503, b"<html>busy</html>", "text/html"),
        Raw(200, b'{"choices": [', cut=100),
        Raw(wait=0.5),
    ],
    ids=["rate limit", "fault", "busy", "cut", "slow"],
)
def test_what_passes_by_is_tried_again(lab: Lab, fault: Raw) -> None:
    with ChatServer(Scripted(lab, fault)) as server:
        assert play_on(lab, server).outcome == "ok"
    rows = [row.role for row in lab.ledger.messages(str(ID))]
    assert rows.count("assistant") == len(server.asked) - 1


@pytest.mark.parametrize(
    ("fault", "asked", "words"),
    [
        (Raw(429, b'{"error": {"message": "slow down"}}'), 2, ["429", "slow down"]),
        (Raw(500, b'{"error": {"message": "out of luck"}}'), 2, ["500", "out of luck"]),
        (Raw(wait=0.5), 2, ["in time"]),
        (HTML, 1, ["no chat completion"]),
        (Raw(200, b'{"choices": [{"mess'), 1, ["JSON"]),
        ({"choices": []}, 1, ["no chat completion"]),
        ({"choices": [{"message": None, "finish_reason": "stop"}]}, 1, ["no chat completion"]),
        (Raw(400, b'{"error": {"message": "tools are not supported"}}'), 1, ["not supported"]),
        (Raw(429, b"{}", headers={"Retry-After": "86400"}), 1, ["429"]),
    ],
)
def test_what_does_not_pass_by_is_an_error_of_the_agent(
    fault: Any, asked: int, words: list[str]
) -> None:
    with ChatServer(lambda *_: fault) as server, pytest.raises(AgentError) as error:
        asyncio.run(endpoint(server).ask([{"role": "user", "content": "x"}], [], 0))
    assert len(server.asked) == asked
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_will_not_pass_by_is_a_setting_to_change(status: int) -> None:
    echo = Raw(status, json.dumps({"error": {"message": f"bad {KEY}\x1b[31m"}}).encode())
    with pytest.raises(ConfigError) as error:
        ask(echo)
    assert KEY not in str(error.value) and "\x1b" not in str(error.value)
    assert ("OPENAI_API_KEY" in str(error.value)) == (status != 404)


def test_a_full_context_ends_the_episode_with_an_outcome_of_its_own(lab: Lab) -> None:
    full = Raw(
        400,
        b'{"error": {"code": "context_length_exceeded", "message":'
        b' "This model\'s maximum context length is 8192 tokens."}}',
    )
    with ChatServer(Scripted(lab, call("list_files", {}), full)) as server:
        terms = play_on(lab, server)
    assert terms.outcome == CONTEXT_FULL
    assert terms.total == RunSettings().reward.no_submission
    row = lab.ledger.finished_episode(str(ID))
    assert row is not None and row.outcome == CONTEXT_FULL


def test_models_that_call_the_limit_otherwise_are_asked_their_way() -> None:
    refusal = b'{"error": {"message": "use \'max_completion_tokens\' instead of max_tokens"}}'
    answers = iter([Raw(400, refusal), say("well")])
    message, server = ask(lambda: next(answers))
    assert message["content"] == "well"
    assert server.asked[1]["max_completion_tokens"] == 4096
    assert "max_tokens" not in server.asked[1]


def test_tokens_that_have_a_price_must_be_counted() -> None:
    silent = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    with pytest.raises(AgentError, match=r"how many tokens.*money"):
        ask(silent)
    assert "usage" not in read(silent, 1)
    assert "usage" not in read({**silent, "usage": {"prompt_tokens": "many"}}, 1)
    with pytest.raises(BadAnswer):
        read("<html>", 1)


# Before anything is spent.


@pytest.mark.parametrize(
    "name",
    ["openai:", "openai:m", "openai:m@", "openai:@http://h/v1", "openai:m@ftp://h", "openai:m@h:1",
     "openai:m@http://", "openai:m@http://h:99999", "openai:m@http://user:word@h/v1"],
)  # fmt: skip
def test_names_without_a_model_or_a_url_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="openai:MODEL@URL"):
        find_agent(name, RunSettings())


def test_a_model_name_may_hold_what_urls_and_versions_do() -> None:
    assert parse("org/m:7b@v2@http://h:8000/v1/") == Address("org/m:7b@v2", "http://h:8000/v1")


def found(server: ChatServer | str, model: str = "solver", **changes: Any) -> Callable[..., Any]:
    url = server if isinstance(server, str) else server.url
    return find_agent(f"openai:{model}@{url}/v1", RunSettings(**changes))


def test_a_server_without_a_list_of_models_is_taken_at_its_word() -> None:
    with ChatServer(lambda *_: say("")) as server:
        server.models = 404
        found(server)
    assert server.asked == []


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (Raw(401, b'{"error": {"message": "wrong key"}}'), ["OPENAI_API_KEY", "401"]),
        (HTML, ["no OpenAI-compatible", "/v1"]),
        (Raw(200, b"{nope"), ["no OpenAI-compatible"]),
        ({"data": 3}, ["no OpenAI-compatible"]),
        ({"data": [{"id": "solver-2"}]}, ["'solver'", "did you mean 'solver-2'"]),
        ({"data": []}, ["'solver'"]),
        (500, ["500"]),
    ],
)
def test_servers_that_cannot_be_asked_say_what_to_change(models: Any, words: list[str]) -> None:
    with ChatServer(lambda *_: say("")) as server:
        server.models = models
        with pytest.raises(ConfigError) as error:
            found(server)
    for word in words:
        assert word in str(error.value)
    assert server.asked == [] and KEY not in str(error.value)


def test_a_url_that_nothing_listens_on() -> None:
    with ChatServer(lambda *_: say("")) as server:
        url = server.url
    with pytest.raises(ConfigError, match=f"nothing answers at {url}.*start the server"):
        found(url)


def test_no_key_or_one_that_no_header_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=r"set OPENAI_API_KEY, or OPENAI_API_KEY_LOCALHOST_1 "):
        found("http://localhost:1")
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nX-Other: 1")
    with pytest.raises(ConfigError, match="the key in OPENAI_API_KEY") as error:
        found("http://localhost:1")
    assert KEY not in str(error.value)


def test_a_servers_own_key_is_sent_to_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatServer(lambda *_: say("")) as one, ChatServer(lambda *_: say("")) as other:
        monkeypatch.setenv(f"OPENAI_API_KEY_127_0_0_1_{one.server_port}", "its-own")
        found(one)
        found(other)
    assert [h["Authorization"] for h in one.headers] == ["Bearer its-own"]
    assert [h["Authorization"] for h in other.headers] == [f"Bearer {KEY}"]


def test_a_cap_needs_prices() -> None:
    with ChatServer(lambda *_: say("")) as server:
        with pytest.raises(ConfigError, match=r"money\.usd_per_million_prompt_tokens is not set"):
            found(server, money=MoneySettings(max_usd=1.0))
        assert server.headers == []
        prices = {f"usd_per_million_{kind}_tokens": 1.0 for kind in ("prompt", "sampled")}
        found(server, money=MoneySettings(max_usd=1.0, **prices))


# Comparisons.


@asynccontextmanager
async def no_staff(*_: object) -> AsyncIterator[tuple[RecordingPool, None]]:
    yield RecordingPool(), None


def compare(folder: Path, answer: Callable[..., Any], n: int) -> list[Played]:
    settings = RunSettings(endpoint=EndpointSettings(retries=0))
    with ChatServer(answer) as server:
        agents = {"them": found(server, endpoint=settings.endpoint)}
        return asyncio.run(play_all(settings, agents, ["persona"], n, folder, lambda _: None))


def test_one_failed_episode_is_no_reward_and_more_end_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metatrainer.play.staff", no_staff)
    answers = iter([500])
    played = compare(tmp_path / "a", lambda *_: next(answers, say("")), 4)
    assert [p.terms is None for p in played].count(True) == 1
    assert {p.terms.outcome for p in played if p.terms} == {"no_submission"}
    with pytest.raises(AgentError, match=r"2 episodes failed; the last: .* 500"):
        compare(tmp_path / "b", lambda *_: 500, 4)
