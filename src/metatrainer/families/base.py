"""What a family of tasks is: a generator of items, tools over an item's world, an exact checker.

Knows nothing about students, agents, jobs or rewards. The same tools serve the embedded trainer,
the hidden evaluation and any other harness.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metatrainer.families.names import Split, names

World = Mapping[str, Any]
"""JSON data that the tools of a family read; its shape is the family's own."""


@dataclass(frozen=True)
class Item:
    """One question about one world."""

    id: str
    """Unique within a run: family, split, a hash of the seed, position."""
    prompt: str
    """The user message that the student sees."""
    world: World
    """What the tools answer from; the student never sees it whole."""
    answer: str
    """The one right reply."""
    level: int
    """Difficulty; what it counts is the family's own (hops, substitutions)."""
    calls: tuple[tuple[str, dict[str, str]], ...]
    """Tool calls of a perfect student, in order."""


@dataclass(frozen=True)
class Tool:
    """A tool that students call: a function of a world and string arguments."""

    name: str
    description: str
    """One line; it becomes part of the tool's schema."""
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    run: Callable[..., str]
    """(world, **arguments) -> text for the student. Raises KeyError on a key it does not know."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }


def tool(function: Callable[..., str]) -> Tool:
    """A Tool from a function: its name, its docstring's first line, its keyword arguments."""
    arguments = list(inspect.signature(function).parameters)[1:]
    return Tool(
        name=function.__name__,
        description=(inspect.getdoc(function) or "").splitlines()[0].rstrip("."),
        parameters={
            "type": "object",
            "properties": {name: {"type": "string"} for name in arguments},
            "required": arguments,
        },
        run=function,
    )


@dataclass(frozen=True)
class Family:
    """A kind of task."""

    name: str
    title: str
    goal: str
    """What the agent is told to teach."""
    answer_format: str
    """How a right reply looks, for agent and student alike."""
    levels: tuple[int, ...]
    eval_level: int
    """Level of the hidden evaluation."""
    tools: tuple[Tool, ...]
    sample: Callable[[random.Random, int, list[str]], dict[str, Any]]
    """The generator: (rng, level, names) -> prompt, world, answer, calls."""
    world_problem: Callable[[World], str | None]
    """None if the tools can run on a world, else what is wrong with it."""

    def items(self, split: Split, seed: int, n: int, level: int | None = None) -> list[Item]:
        """`n` different items of a split, the same for the same arguments.

        Raises ValueError for a level that the family does not have, and when the generator
        repeats itself so much that `n` different questions can't be drawn.
        """
        level = self.eval_level if level is None else level
        if level not in self.levels:
            raise ValueError(f"{self.name} has levels {self.levels}, not {level}")
        rng = random.Random(f"{self.name} {split} {seed} {level}")
        # The seed of hidden items is a secret, and an item's id may be shown.
        label = hashlib.sha256(f"{split} {seed}".encode()).hexdigest()[:8]
        pool = list(names(split))
        seen: dict[str, Item] = {}
        for _ in range(20 * n):
            if len(seen) == n:
                break
            item = self.item(rng, level, pool, f"{self.name}-{split}-{label}-{len(seen)}")
            seen.setdefault(json.dumps([item.prompt, item.world], sort_keys=True), item)
        if len(seen) < n:
            raise ValueError(f"{self.name}: only {len(seen)} different {split} items, not {n}")
        return list(seen.values())

    def item(self, rng: random.Random, level: int, names: list[str], id: str) -> Item:
        """One item about entities with the given names."""
        drawn = self.sample(rng, level, names)
        calls = tuple((name, dict(arguments)) for name, arguments in drawn["calls"])
        return Item(id, drawn["prompt"], drawn["world"], drawn["answer"], level, calls)

    def call(self, world: World, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool for a student. Every mistake is answered with text, none raises."""
        found = next((t for t in self.tools if t.name == name), None)
        if found is None:
            return f"error: no tool {name[:40]}"
        wanted = found.parameters["required"]
        if sorted(arguments) != sorted(wanted):
            return f"error: {name} takes {', '.join(wanted)}"
        try:
            return found.run(world, **{key: str(value) for key, value in arguments.items()})
        except KeyError as error:
            return f"error: unknown {str(error.args[0])[:40]}"
        except (TypeError, AttributeError, ValueError):
            return f"error: {name} found nothing it can read"

    def check_world(self, world: Any) -> str | None:
        """None if the tools can run on this world, else what is wrong with it."""
        if not isinstance(world, Mapping):
            return f"world is a {type(world).__name__}; it must be a dict"
        try:
            json.dumps(world)
            return self.world_problem(world)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            return f"world has not the shape of the family's own: {error!r}"

    def correct(self, reply: str, answer: str) -> bool:
        """Exact match after trimming: the checker of the hidden evaluation."""
        return reply.strip() == answer

    def starter_files(self) -> dict[str, str]:
        """The starter scaffold's environment package: a naive taskset and a world generator."""
        train = list(names("train"))
        return {
            "environment/__init__.py": _STARTER.format(level=self.levels[0], family=self.name),
            "environment/worlds.py": Path(inspect.getfile(self.sample)).read_text(),
            "environment/names.py": "NAMES = (\n"
            + "".join(f'    "{" ".join(train[i : i + 12])} "\n' for i in range(0, len(train), 12))
            + ").split()\n",
        }


_STARTER = '''"""Practice tasks for a small student on {family}, and its reward."""

import random

import verifiers.v1 as vf

from . import worlds
from .names import NAMES

LEVELS = [{level}]
TASKS = 64


class Data(vf.TaskData):
    world: dict
    answer: str


class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        reply = trace.last_reply.strip()
        return 1.0 if self.data.answer in reply else 0.0


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        rng = random.Random(0)
        for i in range(TASKS):
            drawn = worlds.sample(rng, LEVELS[i % len(LEVELS)], NAMES)
            yield Task(Data(prompt=drawn["prompt"], world=drawn["world"], answer=drawn["answer"]))


__all__ = ["Tasks"]
'''
