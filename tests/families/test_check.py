"""`check` on families that ship, and on families that are bad in one way each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from metatrainer import families
from metatrainer.config import RunSettings
from metatrainer.families import Family
from metatrainer.families.base import tool
from metatrainer.families.check import CONSTANT, GUESS, examine
from metatrainer.families.measure import BLIND, measure
from metatrainer.families.names import names
from metatrainer.families.worlds import triage

GOOD = families.get("persona")


def bad(change: Callable[[dict[str, Any], random.Random], None]) -> Family:
    """The persona family with something done to each of its items."""

    def sample(rng: random.Random, level: int, names: list[str]) -> dict[str, Any]:
        drawn = GOOD.sample(rng, level, names)
        change(drawn, rng)
        return drawn

    return replace(GOOD, sample=sample)


def failures(family: Family) -> dict[str, str]:
    return {check.name: check.found for check in examine(family) if check.ok is False}


@pytest.mark.parametrize("name", families.NAMES)
def test_the_families_that_ship_are_sound(name):
    checks = {check.name: check for check in examine(families.get(name))}
    assert all(check.ok for check in checks.values()), failures(families.get(name))
    assert checks["solver"].mean == 1.0
    for score in ("solver", GUESS, CONSTANT):
        assert checks[score].low <= checks[score].mean <= checks[score].high
        assert checks[score].n >= 256


def test_no_tools_are_refused_before_anything_is_drawn():
    found = failures(replace(GOOD, tools=(), sample=None))
    assert list(found) == ["tools"] and "@tool" in found["tools"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"description": " "}, "description"),
        ({"parameters": {"properties": {"name": {}}, "required": ["name"]}}, "no type"),
        ({"parameters": {"properties": {}, "required": ["name"]}}, "requires name"),
    ],
)
def test_a_tool_that_a_student_cannot_be_told_of_is_refused(change, word):
    found = failures(replace(GOOD, tools=(replace(GOOD.tools[0], **change),)))
    assert word in found["tools"]
    assert "rename" in failures(replace(GOOD, tools=GOOD.tools * 2))["tools"]


def test_a_generator_that_repeats_items_is_refused():
    def few(rng: random.Random, level: int, names: list[str]) -> dict[str, Any]:
        return GOOD.sample(random.Random(rng.randrange(100)), level, names)

    found = failures(replace(GOOD, sample=few))
    assert "repeats itself: " in found["unique items"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda drawn, rng: 1 / 0, "ZeroDivisionError"),
        (lambda drawn, rng: drawn.pop("answer"), "KeyError"),
        (lambda drawn, rng: drawn.update(prompt="  "), "its prompt"),
        (lambda drawn, rng: drawn.update(answer=7), "its answer"),
        (lambda drawn, rng: drawn.update(calls=[]), "no calls"),
        (lambda drawn, rng: drawn["world"].clear(), "no people"),
        (lambda drawn, rng: drawn.update(prompt=f"Who? {random.random()}"), "same seed"),
    ],
)
def test_a_broken_generator_is_refused_with_the_reason(change, word):
    found = failures(bad(change))
    assert list(found) == ["generator"] and word in found["generator"]


def test_a_prompt_that_holds_the_answer_is_refused():
    def tell(drawn: dict[str, Any], rng: random.Random) -> None:
        drawn["prompt"] += f" (It is {drawn['answer'].upper()}.)"

    assert "holds the answer in 512 of 512" in failures(bad(tell))["prompts"]


def test_a_name_of_another_split_is_refused():
    def strange(drawn: dict[str, Any], rng: random.Random) -> None:
        drawn["world"][names("hidden")[0]] = {"boss": "nobody"}

    assert names("hidden")[0] in failures(bad(strange))["splits"]


def test_a_generator_that_uses_no_names_is_refused():
    def sample(rng: random.Random, level: int, names: list[str]) -> dict[str, Any]:
        return GOOD.sample(rng, level, [f"person{i}" for i in range(1000)])

    assert "none of the names" in failures(replace(GOOD, sample=sample))["splits"]


@dataclass(frozen=True)
class Judged(Family):
    """A family with a checker of its own."""

    judge: Callable[[str, str], Any] = lambda reply, answer: reply.strip() == answer

    def correct(self, reply: str, answer: str) -> bool:
        return self.judge(reply, answer)


def judged(judge: Callable[[str, str], Any]) -> Family:
    return Judged(**vars(GOOD), judge=judge)


@pytest.mark.parametrize(
    ("judge", "word"),
    [
        (lambda reply, answer: float(reply) == 1.0 or reply, "raises ValueError"),
        (lambda reply, answer: reply.strip() == answer and random.random() < 0.9, "deterministic"),
        (lambda reply, answer: 1.0 if reply.strip() == answer else 0.0, "True or False"),
        (lambda reply, answer: reply == answer, "refuses the right answer"),
        (lambda reply, answer: reply.strip() in answer, "empty reply"),
    ],
)
def test_a_checker_that_cannot_be_relied_on_is_refused(judge, word):
    assert not failures(judged(lambda reply, answer: reply.strip() == answer))
    found = failures(judged(judge))
    assert list(found) == ["checker"] and word in found["checker"]


def test_calls_that_no_student_could_make_are_refused():
    def ahead(drawn: dict[str, Any], rng: random.Random) -> None:
        drawn["calls"].reverse()

    found = failures(bad(ahead))
    assert "no student was told" in found["solver"]


def test_calls_that_fail_or_lead_elsewhere_are_refused():
    def wrong(drawn: dict[str, Any], rng: random.Random) -> None:
        drawn["calls"][0][1]["relation"] = "uncle"

    assert "unknown uncle" in failures(bad(wrong))["solver"]

    def stopped(drawn: dict[str, Any], rng: random.Random) -> None:
        del drawn["calls"][1:]

    assert "in no tool's result" in failures(bad(stopped))["solver"]


@tool
def tell(world: dict[str, str], name: str) -> str:
    """What is known of a name."""
    return world[name]


def of_answers(draw: Callable[[random.Random], str]) -> Family:
    """A family whose answers are drawn as given."""

    def sample(rng: random.Random, level: int, names: list[str]) -> dict[str, Any]:
        # So many names, because a world of one is soon drawn again.
        world = {name: draw(rng) for name in rng.sample(names, 4)}
        asked = rng.choice(list(world))
        return {
            "prompt": f"What is {asked}?",
            "world": world,
            "answer": world[asked],
            "calls": [["tell", {"name": asked}]],
        }

    return replace(
        GOOD, tools=(tell,), levels=(1,), eval_level=1, sample=sample, world_problem=lambda w: None
    )


def test_an_answer_that_is_often_right_is_refused():
    assert not failures(of_answers(lambda rng: str(rng.randrange(1000))))
    found = failures(of_answers(lambda rng: str(max(0, rng.randrange(-300, 1000)))))
    assert "'0'" in found[CONSTANT]


def test_few_answers_may_reach_a_tenth_if_they_are_balanced():
    assert not failures(of_answers(lambda rng: f"queue{rng.randrange(15)}"))
    assert failures(of_answers(lambda rng: f"queue{rng.randrange(5)}")).keys() == {GUESS, CONSTANT}
    uneven = of_answers(lambda rng: f"queue{max(0, rng.randrange(-8, 15))}")
    assert CONSTANT in failures(uneven)


def of_kinds(kinds: dict[str, str]) -> Family:
    """A family in which a word of the question decides the answer, although it is not in it."""

    def sample(rng: random.Random, level: int, names: list[str]) -> dict[str, Any]:
        world = {name: rng.choice(list(kinds.values())) for name in rng.sample(names, 4)}
        kind, asked = rng.choice(list(kinds)), rng.choice(list(world))
        world[asked] = kinds[kind]
        return {
            "prompt": f"Which {kind} has {asked}?",
            "world": world,
            "answer": kinds[kind],
            "calls": [["tell", {"name": asked}]],
        }

    return replace(of_answers(lambda rng: ""), sample=sample)


def test_a_question_whose_words_tell_the_answer_is_refused():
    found = failures(of_kinds({f"kind{i}": f"queue{15 - i}" for i in range(15)}))
    assert list(found) == ["words of the question"]


def test_a_student_learns_a_shortcut_if_there_is_one():
    """Words that nano students know, so that only the shortcut is to be learnt."""
    family = of_kinds(dict(zip(("refund", "login", "delivery", "invoice"), triage.TIERS)))
    measured = {check.name: check for check in measure(family, RunSettings(), 0.35, train=False)}
    assert measured[BLIND].ok is False and measured[BLIND].mean > 0.5
    assert measured["best untrained"].ok is False, "no student knows the tool"
