"""Synthetic conversations of students, right and wrong, to pretrain the nano students on.

A student learns from them how to talk to tools, and habits good and bad in a known mixture, so that
untrained it scores low but not nothing, and reinforcement learning has something to select.
Knows the families; knows nothing about models.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from metatrainer import chat, families
from metatrainer.chat import ChatFormat
from metatrainer.families import Family, Item
from metatrainer.families.names import SPLITS, names
from metatrainer.families.worlds import persona, triage


@dataclass(frozen=True)
class Trace:
    """Token ids and, for each, whether the model is to learn to write it."""

    tokens: list[int]
    learn: list[bool]


NAMES = [name for split in SPLITS for name in names(split)]
"""All names: a base model knows every word, as any model that was pretrained on text does. The
questions of the hidden evaluation are about other worlds."""

Script = Generator[str, str, None]
"""A student: yields its messages, is sent the tools' results; the last message calls nothing."""


def _call(tool: str, /, **arguments: str) -> str:
    return chat.call_text(tool, arguments)


def _persona(item: Item, rng: random.Random, habit: str) -> Script:
    relations = [arguments["relation"] for _, arguments in item.calls]
    who = item.calls[0][1]["name"]
    if habit == "wrong order":
        relations.reverse()
    if habit == "stops short":
        relations = relations[: rng.randrange(len(relations))] or relations[:1]
    if habit == "wrong relation":
        relations[rng.randrange(len(relations))] = rng.choice(persona.RELATIONS)
    start = who
    for relation in relations:
        who = yield _call("lookup", name=who, relation=relation)
    yield start if habit == "wrong answer" else who


def _inventory(item: Item, rng: random.Random, habit: str) -> Script:
    at = item.calls[0][1]["item"]
    if habit == "wrong answer":
        yield _call("stock", item=at)
        yield at
        return
    patience = 1 if habit == "stops short" else len(item.calls)
    while True:
        result = yield _call("stock", item=at)
        if "see " not in result:
            break
        at = result.split("see ")[1]
        patience -= 1
        if patience == 0:
            break
        if habit == "wrong relation" and rng.random() < 0.5:
            at = rng.choice(NAMES)
    yield at


def _triage(item: Item, rng: random.Random, habit: str) -> Script:
    ticket = item.calls[0][1]["name"]
    topic, _, customer = (yield _call("ticket", name=ticket)).partition(" from ")
    if habit == "wrong answer":
        yield rng.choice(NAMES)
        return
    tier = rng.choice(triage.TIERS)
    if habit != "stops short":
        if item.level > 1:
            asked = ticket if habit == "wrong order" else customer
            told = yield _call("customer", name=asked)
            tier = told if told in triage.TIERS else tier
        else:
            tier = item.prompt.split(" of a ")[1].split()[0]
    if habit == "wrong relation":
        topic = rng.choice(triage.TOPICS)
    yield (yield _call("policy", topic=topic, tier=tier))


_STUDENTS = {"persona": _persona, "inventory": _inventory, "triage": _triage}
HABITS = {
    "persona": ("stops short", "wrong relation", "wrong order", "wrong answer"),
    "inventory": ("stops short", "wrong relation", "wrong answer"),
    "triage": ("stops short", "wrong relation", "wrong order", "wrong answer"),
}
"""Wrong ways of working on each family, besides answering without any tool."""
NO_TOOLS = "no tools"


def student_messages(
    family: Family, item: Item, rng: random.Random, habit: str | None
) -> Iterator[tuple[str, str | None]]:
    """(assistant text, tool result) turn by turn; the last has no result. habit None is right."""
    if habit == NO_TOOLS:
        yield rng.choice(NAMES), None
        return
    acting = _STUDENTS[family.name](item, rng, habit or "right")
    text = next(acting)
    while True:
        turn = chat.parse_text(text)
        if not turn.calls:
            yield text, None
            return
        result = family.call(item.world, turn.calls[0].name, turn.calls[0].arguments)
        yield text, result
        text = acting.send(result)


def student_trace(
    family: Family, item: Item, rng: random.Random, habit: str | None, chat_format: ChatFormat
) -> Trace:
    """One conversation as token ids."""
    prompt = [{"role": "user", "content": item.prompt}]
    tokens = chat_format.prompt(prompt, [tool.schema for tool in family.tools])
    learn = [False] * len(tokens)
    for text, result in student_messages(family, item, rng, habit):
        answers = [] if result is None else [{"role": "tool", "content": result}]
        said = chat_format.encode(text + chat.IM_END)
        heard = chat_format.continuation(answers) if answers else []
        tokens += said + heard
        learn += [True] * len(said) + [False] * len(heard)
    return Trace(tokens, learn)


@dataclass(frozen=True)
class Skill:
    """What a student is shown of one family."""

    share: float
    """Part of all its traces."""
    right: float
    """Part of those that are right."""
    lazy: float
    """Part of the wrong ones that answer without any tool."""


def student_traces(
    skills: dict[str, Skill], n: int, seed: int, chat_format: ChatFormat
) -> list[Trace]:
    """About `n` conversations over all families and levels."""
    rng = random.Random(seed)
    traces: list[Trace] = []
    for name, skill in skills.items():
        family = families.get(name)
        for level in family.levels:
            for i in range(round(n * skill.share / len(family.levels))):
                item = family.item(rng, level, NAMES, f"pretraining-{i}")
                habit = None if rng.random() < skill.right else _bad_habit(name, skill, rng)
                traces.append(student_trace(family, item, rng, habit, chat_format))
    rng.shuffle(traces)
    return traces


def _bad_habit(family: str, skill: Skill, rng: random.Random) -> str:
    return NO_TOOLS if rng.random() < skill.lazy else rng.choice(HABITS[family])
