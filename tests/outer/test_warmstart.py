"""Good episodes on record become training: which ones, as which tokens, and what they teach."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean

import pytest
import standin
import tiny
from lab import RecordingPool

from metatrainer import rundir
from metatrainer.agent import tools
from metatrainer.agent.policies import call, say
from metatrainer.agent.validator import Validator
from metatrainer.chat import ChatFormat
from metatrainer.config import RunSettings, parse_config
from metatrainer.engine.files import load_tokenizer
from metatrainer.errors import BudgetError, ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer import renderer, start, warmstart
from metatrainer.outer.service import Model
from metatrainer.play import find_agent, play_all
from metatrainer.students import catalogue

SETTINGS = parse_config({"agent": {"lora_rank": 8}})
QUICK = warmstart.Recipe(epochs=6, batch_size=4, learning_rate=4e-3)
TALK = [
    {"role": "user", "content": "Write a job.\n"},
    call("write_file", path="job.toml", content='model = "x"\n'),
    {"role": "tool", "tool_call_id": "call-0", "name": "write_file", "content": "wrote job.toml"},
    call("submit_job"),
]


def silent(begun: int, of: int) -> None:
    pass


def record(folder: Path, *episodes: tuple[str, str, float | None, list[dict]]) -> Path:
    """A ledger of episodes: phase, family, reward (None: not over) and messages."""
    path = folder / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create_run("r", "nano", "{}", 0, {})
        for i, (phase, family, total, messages) in enumerate(episodes):
            ledger.add_task(family, family, "train", "{}")
            ledger.open_episode(f"e{i}", phase, 0, 0, i, family)
            for n, message in enumerate(messages):
                ledger.record_message(f"e{i}", n, message["role"], json.dumps(message))
            if total is not None:
                ledger.finish_episode(f"e{i}", 1, 0, 0, total, "ok", None, None, "s", 1.0)
    return path


def test_only_good_episodes_of_trained_families_are_learned_from(tmp_path: Path) -> None:
    unread = [TALK[0], say("", "the tool call is not JSON")]
    path = record(
        tmp_path,
        ("play", "persona", 0.5, TALK),
        ("train", "routes", 0.35, TALK),
        ("train", "routes", 0.34, TALK),
        ("train", "routes", None, TALK),
        ("play", "triage", 0.9, TALK),
        ("heldout_after", "persona", 0.9, TALK),
        ("play", "persona", 0.9, [*unread, *TALK[1:]]),
    )
    selection = warmstart.select([path, path], RunSettings(), 0.35)
    assert selection.conversations == [TALK] * 4
    each = {"below the reward": 1, "not over": 1, "held out": 2, "with an unread message": 1}
    assert selection.left_out == {why: 2 * n for why, n in each.items()}
    with pytest.raises(ConfigError, match=r"2 below the reward|--keep"):
        warmstart.select([path], RunSettings(), 0.95)


def test_what_is_trained_are_the_agents_messages_after_what_it_will_read() -> None:
    tokenizer = load_tokenizer(catalogue.agent_folder("nano-agent"))
    model = Model(tokenizer, renderer.get("nano", tokenizer), 2048)
    (datum,), too_long = warmstart.render([TALK], model)
    chat = ChatFormat(tokenizer)
    prompt = chat.prompt(TALK[:3], tools.schemas())
    tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].data[-1]]
    assert tokens[: len(prompt)] == prompt and too_long == 0
    weights = datum.loss_fn_inputs["weights"].data
    trained = [token for token, weight in zip(tokens[1:], weights, strict=True) if weight]
    said = [chat.prompt([m])[len(chat.prompt([])) :] for m in (TALK[1], TALK[3])]
    assert tokenizer.decode(trained) == "".join(
        tokenizer.decode(part).removeprefix("<|im_start|>assistant\n").split("\n<|im_start|>")[0]
        for part in said
    )
    assert sum(weights) == pytest.approx(1.0)
    assert warmstart.render([TALK], Model(tokenizer, model.renderer, 50)) == ([], 1)


@pytest.mark.parametrize(("name", "sequences"), [("qwen3_instruct", 1), ("qwen3_5", 2)])
def test_a_renderer_that_drops_thinking_has_a_sequence_for_each_message(
    name: str, sequences: int
) -> None:
    tokenizer = tiny.make_tokenizer()
    model = Model(tokenizer, renderer.get(name, tokenizer), None)
    data, _ = warmstart.render([TALK], model)
    assert len(data) == sequences
    trained = [
        tokenizer.decode([t for t, w in zip(d["target_tokens"].data, d["weights"].data) if w])
        for d in (datum.loss_fn_inputs for datum in data)
    ]
    assert ["write_file" in text for text in trained] == [True, False][:sequences]
    assert "submit_job" in trained[-1] and "wrote job.toml" not in "".join(trained)


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    validator = Validator(sandboxes=2)
    yield validator
    asyncio.run(validator.close())


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch, validator: Validator) -> None:
    """Episodes whose submissions are validated for real and whose jobs are not run."""

    @asynccontextmanager
    async def staff(*_: object) -> AsyncIterator[tuple[RecordingPool, Validator]]:
        yield RecordingPool(), validator

    monkeypatch.setattr("metatrainer.play.staff", staff)


def played(folder: Path, agent: str, n: int, families: list[str]) -> list[float]:
    """Validation of an agent's episodes."""
    found = {agent: find_agent(agent, SETTINGS)}
    folder.mkdir()
    episodes = asyncio.run(play_all(SETTINGS, found, families, n, folder, lambda _: None))
    return [episode.terms.validation for episode in episodes if episode.terms]


def test_an_agent_becomes_valid_by_what_a_script_did(cheap: None, tmp_path: Path) -> None:
    assert played(tmp_path / "good", "reference", 4, ["persona", "inventory"]) == [1.0] * 8
    selection = warmstart.select([tmp_path / "good" / "ledger.sqlite"], SETTINGS, 0.35)
    run = rundir.create(SETTINGS, tmp_path / "warm")
    updates: list[tuple[int, int]] = []
    learned = asyncio.run(
        warmstart.train(SETTINGS, run.path, selection, QUICK, lambda *at: updates.append(at))
    )
    assert updates == [(n, 12) for n in range(1, 13)]
    assert (learned.episodes, learned.updates, learned.left_out) == (8, 12, {})
    assert learned.nll_last < learned.nll_first
    before = played(tmp_path / "before", "model", 10, ["persona"])
    after = played(tmp_path / "after", str(run.path), 10, ["persona"])
    # Of 32 episodes each it was 0.27 before and 0.77 to 0.84 after, by three recipes like this one;
    # the standard error of the difference of 10 is 0.2.
    assert fmean(after) > fmean(before) + 0.15


def test_a_run_begins_from_a_warm_start_also_after_the_folder_is_gone(
    model: Path, tmp_path: Path
) -> None:
    settings = standin.settings_for(model, steps=1, heldout_episodes=2)
    warm = rundir.create(settings, tmp_path / "warm")
    path = record(tmp_path, ("play", "persona", 0.5, TALK))
    selection = warmstart.select([path], settings, 0.35)
    asyncio.run(warmstart.train(settings, warm.path, selection, QUICK, silent))
    agent = settings.agent.model_copy(update={"start": str(warm.path)})
    begun = settings.model_copy(update={"agent": agent})
    start.check(begun)
    cold, hot = tmp_path / "cold", tmp_path / "hot"
    standin.run(cold, settings)
    standin.run(hot, begun)
    warm.path.rename(tmp_path / "gone")
    again = begun.model_copy(
        update={"outer": begun.outer.model_copy(update={"steps": 2, "heldout_episodes": 0})}
    )
    standin.run(hot, again, resume=True)
    assert start.bring(begun, hot) == "tinker://run-start/weights/start"

    def turns(folder: Path, phase: str) -> list[list[float]]:
        with Ledger(folder / "ledger.db", readonly=True) as ledger:
            ids = [row.id for row in ledger.episodes(phase)]
            return [turn.logprobs for id in ids for turn in ledger.turns(id)]

    for phase in ("heldout_before", "train"):
        assert turns(cold, phase) != turns(hot, phase)
    metrics = [json.loads(x) for x in (hot / "logs/metrics.jsonl").read_text().splitlines()]
    # The weights that are trained are those that sampled.
    assert all(abs(m["optim/kl_sample_train_v1"]) < 1e-4 for m in metrics)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ({"start": "nowhere"}, "agent.start: no run at nowhere"),
        ({"start": "tinker://a/weights/b"}, "is the hosted service's"),
        ({"start": "WARM"}, "has no checkpoint yet"),
        ({"start": "WARM", "lora_rank": 4}, "has agent.lora_rank 8, not 4"),
        ({"start": "WARM", "model": "other"}, "has agent.model 'nano-agent', not 'other'"),
    ],
)
def test_starts_that_do_not_fit_are_refused(
    tmp_path: Path, agent: dict[str, object], words: str
) -> None:
    warm = rundir.create(SETTINGS, tmp_path / "warm").path
    agent = {"lora_rank": 8, **agent}
    if agent["start"] == "WARM":
        agent["start"] = str(warm)
    with pytest.raises(ConfigError) as error:
        start.check(parse_config({"agent": agent}))
    assert words in str(error.value)


def test_training_that_would_cost_more_than_the_cap_is_not_begun(
    model: Path, tmp_path: Path
) -> None:
    prices = {"max_usd": 1e-6, "usd_per_million_trained_tokens": 1.0}
    settings = standin.settings_for(model)
    settings = settings.model_copy(update={"money": parse_config({"money": prices}).money})
    run = rundir.create(settings, tmp_path / "warm")
    with pytest.raises(BudgetError, match=r"over money\.max_usd"):
        asyncio.run(
            warmstart.train(settings, run.path, warmstart.Selection([TALK], {}), QUICK, silent)
        )
    assert not (run.path / "checkpoints").exists() or not list(run.path.rglob("weights"))
