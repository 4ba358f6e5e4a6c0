"""Whether a submission trains on items that it must not have seen.

Texts count as equal after normalising case, punctuation, white space and word order. Knows items
and plain data; runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from metatrainer.families import Item
from metatrainer.jobs.findings import Finding
from metatrainer.sandbox.host import TaskRow

_WORD = re.compile(r"\w+")


def words(text: str) -> tuple[str, ...]:
    """The words of a text in order, folded to lower case."""
    return tuple(_WORD.findall(text.casefold()))


def bag(text: str) -> tuple[str, ...]:
    """The words of a text without their order."""
    return tuple(sorted(words(text)))


class Leaks:
    """The items of a run that no job may train on, prepared for comparison."""

    def __init__(self, hidden: Iterable[Item], dev: Iterable[Item]):
        hidden = list(hidden)
        items = [*((i, "hidden evaluation") for i in hidden), *((i, "dev") for i in dev)]
        self._questions = {(bag(i.prompt), bag(i.answer)): kind for i, kind in items}
        self._prompts = {f" {' '.join(words(i.prompt))} ": kind for i, kind in items}
        self._hidden = {f" {' '.join(words(i.prompt))} " for i in hidden}

    def in_tasks(self, rows: list[TaskRow]) -> Finding | None:
        """A task that asks an item's question with the item's answer, or quotes it."""
        for number, row in enumerate(rows):
            key = bag(row.prompt), bag(str(row.data.get("answer", "")))
            kind = self._questions.get(key) or self._quoted(row.system_prompt)
            if kind:
                return _leak(None, f"task {number} is an item of the {kind} set")
        return None

    def in_files(self, files: dict[str, str]) -> Finding | None:
        """A file that holds the question of a hidden item."""
        for file, text in files.items():
            joined = f" {' '.join(words(text))} "
            if any(prompt in joined for prompt in self._hidden):
                return _leak(file, "holds an item of the hidden evaluation set")
        return None

    def _quoted(self, text: str | None) -> str | None:
        if not text:
            return None
        joined = f" {' '.join(words(text))} "
        return next((kind for prompt, kind in self._prompts.items() if prompt in joined), None)


def _leak(file: str | None, found: str) -> Finding:
    return Finding("E-LEAK", file, None, found, "", "generate your own tasks from train names")
