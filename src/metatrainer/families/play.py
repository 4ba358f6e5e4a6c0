"""A person in the student's place: one item at a time, tools by name, the answer scored.

Reads lines and gives back lines; knows nothing about terminals.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from metatrainer.errors import ConfigError
from metatrainer.families.base import Family, Item

ANSWER = "answer"
ROUNDS = 50
"""Items that are drawn for one sitting."""


@dataclass(frozen=True)
class Reply:
    """What a line is answered. right: whether the item was answered rightly; None goes on."""

    text: str
    right: bool | None = None


def deal(family: Family, level: int | None, seed: int) -> list[Item]:
    """Items to play, of the open part of the names. Raises ConfigError for a level out of range."""
    if level is not None and level not in family.levels:
        low, high = min(family.levels), max(family.levels)
        raise ConfigError(f"{family.name} has levels {low} to {high}, not {level}")
    return family.items("dev", seed, ROUNDS, level)


def introduction(family: Family) -> str:
    """What there is to do, as a student is told it."""
    lines = [f"{family.name}: {family.goal}.", f"Answer with {family.answer_format}.", ""]
    lines += [f"  {usage(family, tool.name):28} {tool.description}" for tool in family.tools]
    return "\n".join([*lines, f"  {ANSWER + ' TEXT':28} your answer; quit ends"])


def usage(family: Family, name: str) -> str:
    """How a tool is called in a line: its name, then its arguments."""
    arguments = _arguments(family, name)
    return " ".join([name, *(argument.upper() for argument in arguments)])


def reply(family: Family, item: Item, line: str) -> Reply:
    """Answer a person's line about an item. Nothing in it raises."""
    word, _, rest = line.strip().partition(" ")
    if word == ANSWER:
        right = family.correct(rest, item.answer)
        return Reply("right" if right else f"wrong: {item.answer}", right)
    if word not in (tool.name for tool in family.tools):
        names = ", ".join(tool.name for tool in family.tools)
        return Reply(f"no tool {word[:40]!r}; there are {names}, and: {ANSWER} TEXT")
    try:
        values = shlex.split(rest)
    except ValueError as error:
        return Reply(f"cannot read that: {error}")
    wanted = _arguments(family, word)
    if len(values) != len(wanted):
        return Reply(f"write: {usage(family, word)}   (quote what has a space in it)")
    return Reply(family.call(item.world, word, dict(zip(wanted, values))))


def _arguments(family: Family, name: str) -> list[str]:
    (tool,) = (tool for tool in family.tools if tool.name == name)
    return list(tool.parameters["properties"])
