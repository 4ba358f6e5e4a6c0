"""Synthetic conversations of students, right and wrong, to pretrain the nano students on.

A student learns from them how to talk to tools, and habits good and bad in a known mixture, so that
untrained it scores low but not nothing, and reinforcement learning has something to select.
Knows the families; knows nothing about models.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from metatrainer import chat, families
from metatrainer.chat import ChatFormat
from metatrainer.families import Family, Item
from metatrainer.families.names import SPLITS, names
from metatrainer.families.worlds import ledger, persona, triage


@dataclass(frozen=True)
class Trace:
    """Token ids and, for each, whether the model is to learn to write it."""

    tokens: list[int]
    learn: list[bool]


NAMES = [name for split in SPLITS for name in names(split)]
"""All names: a base model knows every word, as any model that was pretrained on text does. The
questions of the hidden evaluation are about other worlds."""
_KNOWN = frozenset(NAMES)

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
    at, wanted = item.calls[0][1]["item"], item.prompt.split()[1]
    patience = rng.randint(1, len(item.calls))
    for looked in itertools.count(1):
        found = _fields((yield _call("stock", item=at)))
        if found is None or (habit == "stops short" and looked == patience):
            break
        colour, left, substitute = found
        fits = left != "out" or habit == "takes what is out"
        fits &= colour == wanted or habit == "takes any colour"
        if fits:
            at = substitute if habit == "wrong answer" else at
            break
        at = rng.choice(NAMES) if habit == "wrong item" and rng.random() < 0.5 else substitute
    yield at


def _fields(result: str) -> list[str] | None:
    """Colour, what is left and the substitute, of what the tool says; None of an error."""
    return None if result.startswith("error") else result.replace("see ", "").split(", ")


def _ledger(item: Item, rng: random.Random, habit: str) -> Script:
    asked = [name for name in re.findall(r"\w+", item.prompt) if name in _KNOWN]
    target = item.prompt.split(", in ")[1].rstrip("?")
    if habit == "wrong currency":
        target = rng.choice(ledger.CURRENCIES)
    worth = []
    for name in asked:
        if item.level == 2 and habit != "asks for the owner's balance":
            name = yield _call("account", owner=name)
            if habit == "stops short" and rng.random() < 0.3:
                yield name
                return
        if habit == "reads the statement":
            said = yield _call("entries", account=name, page="1")
            yield said.split(", ")[-1]
            return
        said = yield _call("balance", account=name)
        amount, _, rest = said.partition(" ")
        if habit == "stops short" or said.startswith("error"):
            yield amount
            return
        source, _, limit = rest.partition(", limit ")
        if habit == "takes the limit":
            amount = limit
        ends = (target, source) if habit == "wrong order" else (source, target)
        worth.append((yield _call("convert", amount=amount, source=ends[0], target=ends[1])))
    if len(worth) > 1 and habit != "wrong answer":
        worth = [(yield _call("add", first=worth[0], second=worth[1]))]
    yield amount if habit == "wrong answer" else worth[0]


def _routes(item: Item, rng: random.Random, habit: str) -> Script:
    at, goal = item.calls[0][1]["start"], item.calls[0][1]["goal"]
    trips = 1 if item.level < 3 or habit == "stops short" else 2
    for _ in range(trips):
        ends = (goal, at) if habit == "wrong order" else (at, goal)
        said = yield _call("ways", start=ends[0], goal=ends[1])
        changes = [way.split()[0] for way in said.split(", ")]
        if said.startswith("error"):
            at = rng.choice(NAMES)
            break
        for change in changes:
            at = change
            if habit == "takes the first":
                break
            said = yield _call("status", stop=at)
            if said.startswith("open") or (habit == "stops short" and rng.random() < 0.5):
                break
        if habit == "wrong stop":
            at = rng.choice(changes)
    yield goal if habit == "wrong answer" else at


def _calendar(item: Item, rng: random.Random, habit: str) -> Script:
    first, time = item.calls[0][1]["name"], item.calls[0][1]["time"]
    second, owner = item.calls[1][1]["name"], item.calls[-1][1]["name"]
    patience = rng.randint(1, 2) if habit == "stops short" else 1 + len(item.calls)
    for asked, name in enumerate(itertools.cycle([first, second]), start=1):
        if habit == "asks one only":
            name = first
        said = yield _call("check", name=name, time=time)
        if said == "free" and asked > 1:
            break
        if said.startswith("busy") and not (habit == "keeps the time" and rng.random() < 0.5):
            time = said.split()[-1]
        if asked >= patience or asked > 4:
            break
    if habit == "wrong answer":
        yield time
        return
    if habit == "wrong clock":
        owner = first if owner == second else second
    yield (yield _call("clock", name=owner, time=time))


def _triage(item: Item, rng: random.Random, habit: str) -> Script:
    ticket = item.calls[0][1]["name"]
    topic, _, rest = (yield _call("ticket", name=ticket)).partition(" from ")
    if habit == "wrong answer":
        yield _guess(item, rng)
        return
    tier = rng.choice(triage.TIERS)
    if habit != "stops short":
        if item.level > 1:
            asked = ticket if habit == "wrong order" else rest.split(",")[0]
            told = (yield _call("customer", name=asked)).split(",")[0]
            tier = told if told in triage.TIERS else tier
        else:
            tier = item.prompt.split(" of a ")[1].split()[0]
    if habit == "wrong topic":
        topic = rng.choice(triage.TOPICS)
    rule = yield _call("policy", topic=topic, tier=tier)
    if rule.startswith("as ") and habit != "stops short":
        rule = yield _call("policy", topic=topic, tier=rule.split()[1])
    yield rule


_STUDENTS = {
    "persona": _persona,
    "inventory": _inventory,
    "ledger": _ledger,
    "routes": _routes,
    "calendar": _calendar,
    "triage": _triage,
}
HABITS = {
    "persona": ("stops short", "wrong relation", "wrong order", "wrong answer"),
    "inventory": (
        "stops short",
        "takes what is out",
        "takes any colour",
        "wrong item",
        "wrong answer",
    ),
    "ledger": (
        "stops short",
        "asks for the owner's balance",
        "reads the statement",
        "takes the limit",
        "wrong currency",
        "wrong order",
        "wrong answer",
    ),
    "routes": ("stops short", "takes the first", "wrong stop", "wrong order", "wrong answer"),
    "calendar": ("stops short", "asks one only", "keeps the time", "wrong clock", "wrong answer"),
    "triage": ("stops short", "wrong topic", "wrong order", "wrong answer"),
}
"""Wrong ways of working on each family, besides answering without any tool."""
NO_TOOLS = "no tools"


def _guess(item: Item, rng: random.Random) -> str:
    """An answer of the right kind, made up."""
    if item.answer.isdecimal():
        return str(rng.randint(2, 300))
    if ":" in item.answer:
        return f"{rng.randrange(24):02}:{rng.choice([15, 45])}"
    if " " in item.answer:
        return " ".join(map(rng.choice, (triage.QUEUES, triage.PRIORITIES, triage.ACTIONS)))
    return rng.choice(NAMES)


def student_messages(
    family: Family, item: Item, rng: random.Random, habit: str | None
) -> Iterator[tuple[str, str | None]]:
    """(assistant text, tool result) turn by turn; the last has no result. habit None is right."""
    if habit == NO_TOOLS:
        yield _guess(item, rng), None
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
        said = chat_format.encode(text + chat_format.end)
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
