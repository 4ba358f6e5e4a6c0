"""Single episodes of an agent on its service: the tokens of a run, hosted or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tinker
import tiny
from lab import RecordingPool

from metatrainer.config import RunSettings, parse_config
from metatrainer.engine import Engine
from metatrainer.episode import CONTEXT_FULL
from metatrainer.errors import AgentError, ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer import preflight
from metatrainer.outer.conversation import Conversation
from metatrainer.play import Played, find_agent, play_all
from metatrainer.tinker.client import SamplingClient, ServiceClient

CONTEXT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The instructions are some thousand bytes, each a token of this model."""
    folder = tiny.make_model(tmp_path_factory.mktemp("long"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace(f": {tiny.CONTEXT}", f": {CONTEXT}"))
    return folder


@pytest.fixture(autouse=True)
def no_staff(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def staff(*_: object) -> AsyncIterator[tuple[RecordingPool, None]]:
        yield RecordingPool(), None

    monkeypatch.setattr("metatrainer.play.staff", staff)


@pytest.fixture
def hosted(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hosted service, whose clients are those of this process."""
    service = ServiceClient(tmp_path / "hosted", lambda _: Engine(model))
    monkeypatch.setattr(preflight, "hosted", lambda: service)
    monkeypatch.setattr(preflight, "check", lambda settings: None)


def settings_for(model: Path, **agent: object) -> RunSettings:
    given = {"model": str(model), "max_tokens": 16, "max_turns": 3, **agent}
    prices = {f"usd_per_million_{kind}_tokens": 1.0 for kind in ("prompt", "sampled", "trained")}
    return parse_config({"agent": given, "money": prices})


def played(settings: RunSettings, folder: Path, n: int = 2) -> tuple[list[Played], list[str]]:
    """Episodes of the untrained model, and every message of them."""
    folder.mkdir()
    found = {"model": find_agent("model", settings)}
    episodes = asyncio.run(play_all(settings, found, ["persona"], n, folder, lambda _: None))
    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        rows = [row for e in ledger.episodes() for row in ledger.messages(e.id)]
    return episodes, [row.content.split(', "usage"')[0].rstrip("}") for row in rows]


def test_a_hosted_agent_says_what_the_same_model_says_here_and_is_paid_for(
    model: Path, hosted: None, tmp_path: Path
) -> None:
    there, said_there = played(settings_for(model, backend="tinker"), tmp_path / "there")
    here, said_here = played(settings_for(model), tmp_path / "here")
    assert said_there == said_here and len(said_here) == 2 * (1 + 3 * 2)
    # Three messages of at most 16 tokens, after instructions of more than a thousand.
    assert all(3 * 1e3 < e.usd * 1e6 < 3 * CONTEXT for e in there)
    assert all(e.usd == 0 for e in here)


def test_what_was_sampled_is_never_tokenised_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each prompt extends the one before it by the sampled tokens."""
    heard: list[tuple[list[int], list[int]]] = []
    hear = Conversation.hear

    def noted(self: Conversation, tokens: list[int]) -> dict:
        heard.append((self.prompt.to_ints(), tokens))
        return hear(self, tokens)

    monkeypatch.setattr(Conversation, "hear", noted)
    played(settings_for(model), tmp_path / "here", n=2)
    assert len(heard) == 6
    longest = max(heard, key=lambda turn: len(turn[0]))[0]
    inside = [turn for turn in heard if longest[: len(turn[0])] == turn[0] != longest]
    assert len(inside) == 2
    for prompt, tokens in inside:
        assert longest[len(prompt) : len(prompt) + len(tokens)] == tokens


def test_a_message_that_would_not_fit_ends_the_episode(model: Path, tmp_path: Path) -> None:
    episodes, _ = played(settings_for(model, max_tokens=CONTEXT), tmp_path / "here")
    assert {e.terms.outcome for e in episodes if e.terms} == {CONTEXT_FULL}


def test_a_service_that_fails_is_no_reward(
    model: Path, hosted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise tinker.TinkerError("gone\x1b[0m")

    monkeypatch.setattr(SamplingClient, "sample_async", fail)
    with pytest.raises(AgentError, match=r"the Tinker service failed: gone\\x1b"):
        played(settings_for(model, backend="tinker"), tmp_path / "there")


def test_a_cap_needs_the_prices_of_a_hosted_agent(model: Path, hosted: None) -> None:
    settings = parse_config(
        {"agent": {"model": str(model), "backend": "tinker"}, "money": {"max_usd": 1.0}}
    )
    with pytest.raises(ConfigError, match=r"money\.usd_per_million_prompt_tokens"):
        find_agent("model", settings)
