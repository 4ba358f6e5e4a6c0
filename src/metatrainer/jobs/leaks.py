"""Whether a submission trains on items that it must not have seen, or on ones very near them.

An item is what it asks about, its answer and its world: rewording the question, or asking another
one about the same world, leaves it the same item. Texts are compared by their words, after folding
case, punctuation, white space, order and characters that only look different. Knows items and plain
data; runs nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from metatrainer.families import Item
from metatrainer.jobs.findings import Finding
from metatrainer.sandbox.host import TaskRow

SAME_WORLD = 0.6
"""A world that holds this share of an item's facts is the item's. In the families here worlds of
training names share up to 0.15 with hidden ones, and hidden ones of other seeds, which have the
same names, up to 0.5."""
SAME_WORDS = 0.6
"""A passage that has what an item is about, and this share of its question's words, quotes it."""
_MARGIN = 6
"""Words that a quoted question may have grown by."""
_WORD = re.compile(r"\w+")


def words(text: str) -> tuple[str, ...]:
    """The words of a text in order, folded to lower case and to plain characters."""
    plain = unicodedata.normalize("NFKC", text)
    if not plain.isascii():  # among plain characters there is none to leave out
        plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    return tuple(_WORD.findall(plain.casefold()))


def bag(text: str) -> tuple[str, ...]:
    """The words of a text without their order."""
    return tuple(sorted(words(text)))


def facts(world: Any) -> frozenset[str]:
    """What a world says: each value with the keys that lead to it."""
    return frozenset(" ".join(words(fact)) for fact in _leaves(world, ""))


def _leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path} {key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield f"{path} {value}"


@dataclass(frozen=True)
class _Forbidden:
    """An item, prepared for comparison."""

    kind: str
    asked: Counter[str]
    """Words of the question."""
    about: frozenset[str]
    """Those of them that name something in the world."""
    answer: tuple[str, ...]
    facts: frozenset[str]

    @classmethod
    def of(cls, item: Item, kind: str) -> _Forbidden:
        asked, known = Counter(words(item.prompt)), facts(item.world)
        there = {word for fact in known for word in fact.split()}
        about = frozenset(word for word in asked if word in there) or frozenset(asked)
        return cls(kind, asked, about, bag(item.answer), known)

    def quoted(self, passage: Counter[str]) -> bool:
        """Whether a passage of about the question's length asks it."""
        shared = (self.asked & passage).total()
        return self.about <= passage.keys() and shared >= SAME_WORDS * self.asked.total()


class Leaks:
    """The items of a run that no job may train on, prepared for comparison."""

    def __init__(self, hidden: Iterable[Item], dev: Iterable[Item]):
        self._items = [
            *(_Forbidden.of(item, "hidden evaluation") for item in hidden),
            *(_Forbidden.of(item, "dev") for item in dev),
        ]
        common = Counter(word for item in self._items for word in item.about)
        self._by_word: dict[str, list[_Forbidden]] = {}
        self._by_fact: dict[str, list[int]] = {}
        for number, item in enumerate(self._items):
            # The word that names it best: a text without it need not be looked at.
            rarest = min(item.about, key=lambda word: (common[word], word), default="")
            self._by_word.setdefault(rarest, []).append(item)
            for fact in item.facts:
                self._by_fact.setdefault(fact, []).append(number)

    def in_tasks(self, rows: list[TaskRow]) -> Finding | None:
        """A task that is an item, or near one, or that quotes one in its system prompt."""
        for number, row in enumerate(rows):
            item = (
                self._asked(row)
                or self._same_world(row)
                or next(self._quoted(row.system_prompt or ""), None)
            )
            if item:
                return _leak(None, f"task {number} is an item of the {item.kind} set, or near one")
        return None

    def in_files(self, files: dict[str, str]) -> Finding | None:
        """A file that holds the question of a hidden item."""
        for file, text in files.items():
            if any(item.kind != "dev" for item in self._quoted(text)):
                return _leak(file, "holds an item of the hidden evaluation set, or one near it")
        return None

    def _asked(self, row: TaskRow) -> _Forbidden | None:
        """The item that a task asks for, in whatever words, with the item's answer."""
        found, answer = set(words(row.prompt)), bag(str(row.data.get("answer", "")))
        for word in found:
            for item in self._by_word.get(word, ()):
                if item.answer == answer and item.about <= found:
                    return item
        return None

    def _same_world(self, row: TaskRow) -> _Forbidden | None:
        """The item in whose world a task is set."""
        shared = Counter(
            number
            for fact in facts(row.data.get("world"))
            for number in self._by_fact.get(fact, ())
        )
        for number, count in shared.most_common(1):
            if count >= SAME_WORLD * len(self._items[number].facts):
                return self._items[number]
        return None

    def _quoted(self, text: str) -> Iterator[_Forbidden]:
        """Items whose question stands somewhere in a text."""
        said = words(text)
        for at, word in enumerate(said):
            for item in self._by_word.get(word, ()):
                reach = item.asked.total() + _MARGIN
                if item.quoted(Counter(said[max(0, at - reach) : at + reach])):
                    yield item


def _leak(file: str | None, found: str) -> Finding:
    return Finding("E-LEAK", file, None, found, "", "generate your own tasks from train names")
