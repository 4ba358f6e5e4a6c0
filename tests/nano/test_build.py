"""The recipe, small: it makes models that load, and the same ones again."""

import asyncio
import random
from dataclasses import replace

import pytest

from metatrainer import families
from metatrainer.chat import ChatFormat
from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError
from metatrainer.nano import build, corpus
from metatrainer.nano.pretrain import PretrainSettings
from metatrainer.nano.tokenizer import load_tokenizer
from metatrainer.nano.traces import HABITS, NO_TOOLS, student_messages, student_trace
from metatrainer.students import catalogue


@pytest.fixture
def small(monkeypatch):
    """The recipe with everything cut down."""
    short = PretrainSettings(steps=3, batch=4, learning_rate=1e-3)
    recipes = tuple(replace(r, size=(16, 1, 2, 512), pretraining=short) for r in build.STUDENTS)
    monkeypatch.setattr(build, "STUDENTS", recipes)
    monkeypatch.setattr(build, "STUDENT_TRACES", 60)
    monkeypatch.setattr(build, "CONVERSATIONS", 6)
    monkeypatch.setattr(build, "AGENT_SIZE", (16, 1, 2, 2048))
    monkeypatch.setattr(build, "AGENT_PRETRAINING", short)


def test_building_is_reproducible_and_goes_on(small, tmp_path):
    said: list[str] = []
    build.build(tmp_path, "cpu", 0, said.append)
    hashes = {name: catalogue.sha256(tmp_path / name) for name in build.NAMES}
    build.build(tmp_path, "cpu", 0, lambda line: pytest.fail(f"made again: {line}"))
    weights = tmp_path / "nano-wren" / "model.safetensors"
    weights.unlink()
    build.build(tmp_path, "cpu", 0, said.append)
    assert {name: catalogue.sha256(tmp_path / name) for name in build.NAMES} == hashes
    assert any("s left" in line for line in said)
    rows = build.check(tmp_path, said.append)
    assert {row["family"] for row in rows} == set(families.NAMES)


def test_check_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="metatrainer nano build"):
        build.check(tmp_path, print)


def test_conversations_are_reproducible_real_episodes():
    settings = RunSettings(students=("nano-wren", "nano-finch"))
    one, two = (asyncio.run(corpus.conversations(settings, 3, 5)) for _ in range(2))
    assert one == two
    assert asyncio.run(corpus.conversations(settings, 2, 5)) == one[:2]
    chat = ChatFormat(load_tokenizer(catalogue.MODELS / build.TOKENIZER))
    for conversation in one:
        trace = corpus.agent_trace(conversation, chat)
        learnt = [t for t, on in zip(trace.tokens, trace.learn) if on]
        said = [corpus.said(m) for m in conversation if m["role"] == "assistant"]
        assert chat._tokenizer.decode(learnt, skip_special_tokens=False) == "".join(
            text + "<|im_end|>" for text in said
        )


@pytest.mark.parametrize("name", families.NAMES)
def test_right_traces_are_right_and_bad_habits_mostly_wrong(name):
    family, rng = families.get(name), random.Random(0)
    items = family.items("train", 0, 60)

    def score(habit):
        replies = [list(student_messages(family, item, rng, habit))[-1][0] for item in items]
        return sum(family.correct(r, i.answer) for r, i in zip(replies, items)) / len(items)

    assert score(None) == 1.0
    assert score(NO_TOOLS) < 0.1
    assert all(score(habit) < 0.7 for habit in HABITS[name])


def test_a_trace_learns_what_the_student_says_and_nothing_else():
    chat = ChatFormat(load_tokenizer(catalogue.MODELS / build.TOKENIZER))
    family = families.get("persona")
    item = family.items("train", 0, 1)[0]
    trace = student_trace(family, item, random.Random(0), None, chat)
    learnt = [t for t, on in zip(trace.tokens, trace.learn) if on]
    text = chat._tokenizer.decode(learnt, skip_special_tokens=False)
    assert text.count("<tool_call>") == 2
    assert "<tool_response>" not in text
    assert text.endswith(f"{item.answer}<|im_end|>")
