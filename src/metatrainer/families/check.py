"""Whether a family is sound: its tools, generator, splits, checker and answers, without any model.

Draws items as everybody else does and believes nothing about them. Knows nothing about students;
metatrainer.families.measure has the properties that need one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from metatrainer.families.base import Family, Item, Tool
from metatrainer.families.names import SPLITS, Split, names
from metatrainer.students.score import wilson

N = 512
"""Items that are drawn of each split and level."""
REPEATS = 0.01
"""Share of repeated items, and of prompts that hold the answer, that chance may bring about."""
FEW_ANSWERS = 20
"""With no more different answers than this, 5 % cannot be had however well they are balanced."""
BAR, FEW_BAR = 0.05, 0.10
"""What a constant answer or a guess may score; with few answers, label-balanced."""
TYPES = ("string", "integer", "number", "boolean", "array", "object")
GUESS, CONSTANT = "guess", "constant"
"""Names of the scores that say what chance is."""
ELSEWHERE = "other process"
_CHECKED = 32
"""Items whose checker is tried with every odd reply."""
_WORD = re.compile(r"\w+")
_NOTHING = ("", " ", "\n")
_ODD = (
    "\x00",
    "x" * 10_000,
    "nan",
    "-1",
    "1e999",
    "None",
    "[]",
    "{}",
    "<tool_call>",
    "\u202e",
    "½",
)


@dataclass(frozen=True)
class Check:
    """One property of a family, tested."""

    name: str
    ok: bool | None
    """None: measured, and nothing is asked of it."""
    found: str
    """What was found; of a property that fails, why and what to do."""
    n: int | None = None
    mean: float | None = None
    """Of a score: the share of right answers, with the 95 % interval."""
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without what this kind of property has not."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class Unsound(Exception):
    """A property does not hold. The message is the reason."""


Drawn = Mapping[tuple[Split, int], Sequence[Item]]
"""N items of each split and level, as the generator gave them."""


def scored(name: str, mean: float, n: int, ok: bool | None, found: str = "") -> Check:
    """A score with its interval."""
    low, high = wilson(round(mean * n), n)
    return Check(name, ok, found, n, mean, low, high)


def examine(family: Family) -> Iterator[Check]:
    """Every property of the family alone, one by one.

    What cannot be tested because of an earlier one is left out: without tools or with a broken
    generator nothing else can be.
    """
    check = _tested("tools", lambda: _tools(family))
    yield check
    if not check.ok:
        return
    try:
        drawn = _draw(family)
    except Unsound as error:
        yield Check("generator", False, str(error))
        return
    levels = ", ".join(map(str, family.levels))
    yield Check("generator", True, f"the same for the same seed, levels {levels}")
    sound = True
    for name, test in (
        ("unique items", lambda: _unique(drawn)),
        ("splits", lambda: _splits(drawn)),
        ("prompts", lambda: _prompts(drawn)),
        ("checker", lambda: _checker(family, drawn["hidden", family.eval_level])),
    ):
        check = _tested(name, test)
        sound &= bool(check.ok)
        yield check
    if sound:
        items = drawn["hidden", family.eval_level]
        yield _solver(family, drawn)
        guess, constant = _guess(family, items), _constant(family, items)
        yield guess
        yield constant
        chance = max(guess.high or 0.0, constant.high or 0.0)
        yield _reader(family, drawn["train", family.eval_level], items, chance)


def same_elsewhere(family: Family) -> Check:
    """Whether another process draws the same items, as every worker of a pool must.

    A generator that goes through a set, or asks hash(), does not. family: one that families.get
    finds.
    """
    program = (
        "from metatrainer import families; from metatrainer.families.check import fingerprint; "
        f"print(fingerprint(families.get({family.name!r})))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": _other_hash_seed()},
        capture_output=True,
        text=True,
    )
    if other.stdout.strip() == fingerprint(family):
        return Check(ELSEWHERE, True, "the same items")
    return Check(
        ELSEWHERE,
        False,
        "another process draws other items with the same seed; go through sorted lists, never "
        f"through sets {other.stderr.strip()[-200:]}".strip(),
    )


def fingerprint(family: Family) -> str:
    """A hash of some items of each level."""
    items = [i for level in family.levels for i in family.items("hidden", 0, _CHECKED, level)]
    return hashlib.sha256(json.dumps([asdict(i) for i in items]).encode()).hexdigest()


def _other_hash_seed() -> str:
    return "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"


def _tested(name: str, test: Callable[[], str]) -> Check:
    try:
        return Check(name, True, test())
    except Unsound as error:
        return Check(name, False, str(error))


def _tools(family: Family) -> str:
    """Tools are there, and a student can be told how to call each."""
    if not family.tools:
        raise Unsound("no tools: a student could only guess; write one with @tool")
    known = Counter(tool.name for tool in family.tools)
    if twice := [name for name, count in known.items() if count > 1]:
        raise Unsound(f"two tools are called {twice[0]}; rename one")
    return ", ".join(_typed(tool) for tool in family.tools)


def _typed(tool: Tool) -> str:
    """The tool's signature with types. Raises Unsound where its schema says too little."""
    if not tool.description.strip():
        raise Unsound(f"tool {tool.name} has no description; its docstring's first line is one")
    arguments = tool.parameters.get("properties", {})
    for name, schema in arguments.items():
        if schema.get("type") not in TYPES:
            raise Unsound(f"argument {name} of tool {tool.name} has no type; allowed: {TYPES}")
    if unknown := set(tool.parameters.get("required", ())) - set(arguments):
        raise Unsound(f"tool {tool.name} requires {min(unknown)}, which its schema does not have")
    signature = ", ".join(f"{name}: {schema['type']}" for name, schema in arguments.items())
    return f"{tool.name}({signature})"


def _draw(family: Family) -> Drawn:
    """Items of every split and level, twice, to see that they are the same."""
    drawn: dict[tuple[Split, int], Sequence[Item]] = {}
    for split in SPLITS:
        for level in family.levels:
            drawn[split, level], again = (_items(family, split, level) for _ in range(2))
            if drawn[split, level] != again:
                raise Unsound(
                    f"level {level} differs from one time to the next with the same seed; "
                    "draw everything from rng"
                )
    return drawn


def _items(family: Family, split: Split, level: int) -> Sequence[Item]:
    rng = random.Random(f"check {split} {level}")
    pool = list(names(split))
    try:
        items = [family.item(rng, level, pool, str(i)) for i in range(N)]
    except Exception as error:  # whatever a family of somebody else raises is the finding
        raise Unsound(
            f"the generator raises {type(error).__name__} at level {level}: {error}"
        ) from None
    for item in items:
        if problem := _malformed(family, item):
            raise Unsound(f"an item of level {level}: {problem}")
    return items


def _malformed(family: Family, item: Item) -> str | None:
    for key in ("prompt", "answer"):
        value = getattr(item, key)
        if not isinstance(value, str) or not value or value != value.strip():
            return f"its {key} must be text without space around it, found {value!r:.60}"
    if not item.calls:
        return "it has no calls, so that nobody can say how a perfect student works"
    return family.check_world(item.world)


def _unique(drawn: Drawn) -> str:
    for (split, level), items in drawn.items():
        different = len({json.dumps([i.prompt, i.world], sort_keys=True) for i in items})
        if different < len(items) * (1 - REPEATS):
            raise Unsound(
                f"the generator repeats itself: {different} different {split} items of "
                f"{len(items)} at level {level}; draw more of the world from rng"
            )
    return f"{N} of each split and level"


def _splits(drawn: Drawn) -> str:
    """No name and no world of a split occurs in another one."""
    owner = {name: split for split in SPLITS for name in names(split)}
    worlds: dict[str, Split] = {}
    for (split, level), items in drawn.items():
        for item in items:
            world = json.dumps(item.world, sort_keys=True)
            used = owner.keys() & set(_WORD.findall(f"{item.prompt} {world} {item.answer}"))
            if foreign := sorted(name for name in used if owner[name] != split):
                raise Unsound(
                    f"a {split} item at level {level} has {foreign[0]}, a name of "
                    f"{owner[foreign[0]]}; use only the names that sample is given"
                )
            if not used:
                raise Unsound(
                    f"a {split} item at level {level} uses none of the names that sample is "
                    "given, so that nothing keeps hidden worlds apart from those of training"
                )
            if worlds.setdefault(world, split) != split:
                raise Unsound(f"a world is in {worlds[world]} and in {split}")
    return f"names and worlds of {', '.join(SPLITS)} are apart"


def _prompts(drawn: Drawn) -> str:
    for (_, level), items in drawn.items():
        told = [item for item in items if _holds(item.prompt, item.answer)]
        if len(told) > REPEATS * len(items):
            raise Unsound(
                f"the prompt holds the answer in {len(told)} of {len(items)} items at level "
                f"{level}, as in {told[0].prompt!r:.120} ({told[0].answer})"
            )
    return "the answer is not in them"


def _holds(text: str, part: str) -> bool:
    """Whether the words of a part stand in a text, in order and without a gap."""
    whole, wanted = (" ".join(_WORD.findall(t.casefold())) for t in (text, part))
    return bool(wanted) and f" {wanted} " in f" {whole} "


def _checker(family: Family, items: Sequence[Item]) -> str:
    """True for the answer, False for nothing, and the same each time for whatever is said."""
    for item, other in pairwise(items[: _CHECKED + 1]):
        if not _judged(family, item, item.answer) or not _judged(family, item, f" {item.answer}\n"):
            raise Unsound(f"the checker refuses the right answer {item.answer!r:.60}")
        for reply in _NOTHING:
            if _judged(family, item, reply):
                raise Unsound("the checker takes an empty reply for right")
        for reply in (other.answer, item.prompt, f"{item.answer} {other.answer}", *_ODD):
            _judged(family, item, reply)
    return "exact, the same each time, raises nothing"


def _judged(family: Family, item: Item, reply: str) -> bool:
    """What the checker says, asked three times."""
    try:
        said = [family.correct(reply, item.answer) for _ in range(3)]
    except Exception as error:  # as above
        raise Unsound(
            f"the checker raises {type(error).__name__} on the reply {reply!r:.40}: {error}"
        ) from None
    if not all(isinstance(verdict, bool) for verdict in said):
        raise Unsound(f"the checker says {said[0]!r:.40}; it must say True or False")
    if len(set(said)) > 1:
        raise Unsound(f"the checker is not deterministic: {said} for the reply {reply!r:.40}")
    return said[0]


def _solver(family: Family, drawn: Drawn) -> Check:
    """A scripted student that makes the item's calls through the real tools.

    It may name only what it was told: a name in an argument, or in the answer, that stands neither
    in the prompt nor in an earlier result could not be known to any student.
    """
    known = {name for split in SPLITS for name in names(split)}
    hidden = [i for (split, _), items in drawn.items() if split == "hidden" for i in items]
    failures = [why for item in hidden if (why := _unsolved(family, item, known))]
    share = 1 - len(failures) / len(hidden)
    found = f"{len(failures)} items: {failures[0]}" if failures else "all levels"
    return scored("solver", share, len(hidden), not failures, found)


def _unsolved(family: Family, item: Item, names: set[str]) -> str | None:
    """Why the item's own calls do not lead to its answer; None if they do."""
    told = set(_WORD.findall(item.prompt))
    for name, arguments in item.calls:
        said = _WORD.findall(" ".join(str(value) for value in arguments.values()))
        if unheard := (names & set(said)) - told:
            return f"{name} is asked for {min(unheard)}, which no student was told"
        heard = family.call(item.world, name, arguments)
        if heard.startswith("error"):
            return f"{name} answers {heard!r:.80}"
        told |= set(_WORD.findall(heard))
    if unheard := (names & set(_WORD.findall(item.answer))) - told:
        return f"the answer {min(unheard)} is in no tool's result"
    return None if family.correct(item.answer, item.answer) else "the checker refuses the answer"


def bar(items: Sequence[Item]) -> float:
    """What no guess may score over."""
    return FEW_BAR if len({item.answer for item in items}) <= FEW_ANSWERS else BAR


def _guess(family: Family, items: Sequence[Item]) -> Check:
    """A student that knows all answers there are, and takes one blindly."""
    answers = [item.answer for item in items]
    # The next item's: each answer as often as it occurs, and independent of the item.
    replies = answers[1:] + answers[:1]
    mean = share_right(family, items, replies)
    return scored(GUESS, mean, len(items), mean <= bar(items), "another item's answer")


def _constant(family: Family, items: Sequence[Item]) -> Check:
    """A student that always gives the answer that it has seen most often."""
    seen, asked = items[: len(items) // 2], items[len(items) // 2 :]
    ((answer, _),) = Counter(item.answer for item in seen).most_common(1)
    mean = share_right(family, asked, [answer] * len(asked))
    share = sum(item.answer == answer for item in asked) / len(asked)
    # Few answers are weighed alike above, which says nothing of how often each one comes.
    ok = mean <= bar(items) and wilson(round(share * len(asked)), len(asked))[0] <= bar(items)
    return scored(CONSTANT, mean, len(asked), ok, f"{answer!r:.40}, {share:.1%} of all answers")


def _reader(family: Family, seen: Sequence[Item], asked: Sequence[Item], chance: float) -> Check:
    """A reader of questions alone: naive Bayes from words to answers, learnt on training items."""
    priors = Counter(item.answer for item in seen)
    counts: dict[str, Counter[str]] = {answer: Counter() for answer in priors}
    for item in seen:
        counts[item.answer].update(_features(item))
    known = len({word for words in counts.values() for word in words})
    totals = {answer: words.total() + known for answer, words in counts.items()}

    def read(item: Item) -> str:
        words = _features(item)
        return max(
            priors,
            key=lambda answer: (
                math.log(priors[answer])
                + sum(math.log((counts[answer][word] + 1) / totals[answer]) for word in words)
            ),
        )

    mean = share_right(family, asked, [read(item) for item in asked])
    check = scored("words of the question", mean, len(asked), None)
    ok = (check.low or 0.0) <= chance
    found = f"naive Bayes on {len(seen)} questions; chance is up to {chance:.3f}"
    return replace(check, ok=ok, found=found if ok else f"{found}; questions tell their answers")


def _features(item: Item) -> list[str]:
    words = _WORD.findall(item.prompt.casefold())
    return [*words, *(" ".join(pair) for pair in pairwise(words))]


def share_right(family: Family, items: Sequence[Item], replies: Sequence[str]) -> float:
    """Share of right replies; with few different answers, the mean of each answer's share."""
    right = [family.correct(reply, item.answer) for item, reply in zip(items, replies)]
    if bar(items) == BAR:
        return sum(right) / len(right)
    by_answer: dict[str, list[bool]] = {}
    for item, verdict in zip(items, right):
        by_answer.setdefault(item.answer, []).append(verdict)
    return sum(sum(v) / len(v) for v in by_answer.values()) / len(by_answer)
