"""What counts as training on a forbidden item: recall under edits, and no false alarm."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from metatrainer import families
from metatrainer.families import Item
from metatrainer.jobs.leaks import Leaks
from metatrainer.sandbox.host import TaskRow

HIDDEN, SEEDS = 64, range(3)


def row(item: Item, prompt: str | None = None, **changes: Any) -> TaskRow:
    data = {"world": item.world, "answer": item.answer, **changes}
    return TaskRow(prompt if prompt is not None else item.prompt, None, data, "key")


def names_of(item: Item) -> set[str]:
    """Words that an edit must leave alone, lest it ask for something else."""
    split = [word.strip("?,") for word in item.prompt.split()]
    return {word for word in split if word in str(item.world) or any(map(str.isdigit, word))}


def filler(item: Item, rng: random.Random) -> int:
    """Position of a word that names nothing."""
    split, named = item.prompt.split(), names_of(item)
    return rng.choice([i for i, w in enumerate(split) if w.strip("?,") not in named])


def added(item: Item, rng: random.Random) -> str:
    split = item.prompt.split()
    split.insert(rng.randrange(len(split)), "really")
    return " ".join(split)


def dropped(item: Item, rng: random.Random) -> str:
    split = item.prompt.split()
    del split[filler(item, rng)]
    return " ".join(split)


def replaced(item: Item, rng: random.Random) -> str:
    split = item.prompt.split()
    split[filler(item, rng)] = "whichever"
    return " ".join(split)


def shuffled(item: Item, rng: random.Random) -> str:
    split = item.prompt.split()
    rng.shuffle(split)
    return " ".join(split)


EDITS: dict[str, Callable[[Item, random.Random], str]] = {
    "as it is": lambda item, rng: item.prompt,
    "a word added": added,
    "a word dropped": dropped,
    "a word replaced": replaced,
    "other order": shuffled,
    "other case": lambda item, rng: item.prompt.upper(),
    "punctuation": lambda item, rng: "¿" + "... ".join(item.prompt.split()) + "!!",
    "invisible characters": lambda item, rng: "\u200b".join(item.prompt),
    "full width": lambda item, rng: item.prompt.translate(
        {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
    ),
    "in other text": lambda item, rng: f"Hello there. {item.prompt} Think, then reply.",
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", families.NAMES)
def test_an_edited_item_is_the_item(name, edit):
    """Even in another world, where only question and answer tell."""
    family, rng = families.get(name), random.Random(0)
    hidden, dev = family.items("hidden", 5, HIDDEN), family.items("dev", 5, 2)
    elsewhere = family.items("train", 5, 1)[0].world
    leaks = Leaks(hidden, dev)
    for item in (*hidden, *dev):
        assert leaks.in_tasks([row(item, EDITS[edit](item, rng), world=elsewhere)]), item.prompt


@pytest.mark.parametrize("name", families.NAMES)
def test_an_items_world_under_another_question_is_the_item(name):
    family = families.get(name)
    hidden = family.items("hidden", 5, HIDDEN)
    leaks = Leaks(hidden, [])
    for item in hidden:
        assert leaks.in_tasks([row(item, "What is it?", answer="another")]), item.prompt
        one = next(iter(item.world))
        less = {key: value for key, value in item.world.items() if key != one}
        grown = {**item.world, "More": {"stuff": "here"}}
        assert leaks.in_tasks([row(item, "What is it?", answer="another", world=grown)])
        if len(item.world) > 6:  # of few records, one is most of the world
            assert leaks.in_tasks([row(item, "What is it?", answer="another", world=less)])


@pytest.mark.parametrize("name", families.NAMES)
def test_training_items_are_none_of_them(name):
    family = families.get(name)
    leaks = Leaks(family.items("hidden", 5, 128), family.items("dev", 5, 2))
    for level in family.levels:
        for seed in SEEDS:
            rows = [row(item) for item in family.items("train", seed, 256, level)]
            assert leaks.in_tasks(rows) is None
    assert leaks.in_files(family.starter_files()) is None


@pytest.mark.parametrize("edit", ["as it is", "a word added", "a word dropped", "other case"])
def test_a_file_that_quotes_a_hidden_question(edit):
    family, rng = families.get("persona"), random.Random(0)
    hidden, dev = family.items("hidden", 5, HIDDEN), family.items("dev", 5, 2)
    leaks = Leaks(hidden, dev)
    source = family.starter_files()["environment/__init__.py"]
    for item in hidden:
        text = f"{source}\nKNOWN = {{{EDITS[edit](item, rng)!r}: 1}}\n"
        assert leaks.in_files({"environment/__init__.py": text})
    # The agent was shown the dev examples, and may write about them; not train on them.
    assert leaks.in_files({"notes.md": f"An example: {dev[0].prompt}"}) is None
    quoting = TaskRow("Who?", f"As in: {dev[0].prompt}", {"world": {}, "answer": "x"}, "k")
    assert leaks.in_tasks([quoting])


def test_what_is_said_of_a_leak_gives_no_item_away():
    family = families.get("triage")
    hidden = family.items("hidden", 5, HIDDEN)
    said = Leaks(hidden, []).in_tasks([row(hidden[3])])
    assert said is not None
    for word in (*names_of(hidden[3]), *hidden[3].answer.split()):
        assert word not in said.render()
