"""What a submission is like, read from its text alone: nothing of it is run.

Knows the names of the starter scaffold and of verifiers; knows nothing about rewards or ledgers.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from metatrainer.jobs.spec import JOB_FILE

_TASKS, _LEVELS = "TASKS", "LEVELS"
"""Constants of the starter scaffold; an environment written from nothing need not have them."""
_CALLS = frozenset({"tool_calls", "tool_messages"})


@dataclass(frozen=True)
class Features:
    """Of the data and the rubric of a job. None: its text does not say."""

    tasks: int | None
    """Practice tasks."""
    levels: str | None
    """Their levels, as in "1, 2"."""
    rewards: int
    """Reward functions."""
    exact: bool
    """One of them asks for the very answer (==)."""
    calls: bool
    """One of them looks at tool calls."""


def features(files: Mapping[str, str]) -> Features:
    """Features of a submission; what cannot be parsed has none."""
    trees = [tree for text in _python(files).values() if (tree := _parsed(text))]
    constants = {name: value for tree in trees for name, value in _constants(tree)}
    rewards = [function for tree in trees for function in _rewards(tree)]
    tasks, levels = constants.get(_TASKS), constants.get(_LEVELS)
    return Features(
        tasks=tasks if isinstance(tasks, int) else None,
        levels=", ".join(map(str, levels)) if isinstance(levels, list | tuple) else None,
        rewards=len(rewards),
        exact=any(_asks_for_the_answer(function) for function in rewards),
        calls=any(
            getattr(node, "attr", getattr(node, "value", None)) in _CALLS
            for function in rewards
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute | ast.Constant)
        ),
    )


def fingerprint(files: Mapping[str, str]) -> str:
    """The same for submissions that differ in layout, comments or the order of settings alone."""
    normal = {path: _normal(path, text) for path, text in files.items()}
    return hashlib.sha256(json.dumps(normal, sort_keys=True).encode()).hexdigest()


def _python(files: Mapping[str, str]) -> dict[str, str]:
    return {path: text for path, text in files.items() if path.endswith(".py")}


# Most files of a run's submissions are the starter's own, over and over.
@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=64)
def _normal(path: str, text: str) -> str:
    try:
        if path == JOB_FILE:
            return json.dumps(tomllib.loads(text), sort_keys=True, default=str)
        if path.endswith(".py") and (tree := _parsed(text)):
            return ast.unparse(tree)
    except (ValueError, RecursionError):
        pass
    return " ".join(text.split())


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Names that the module sets to a literal."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                continue


def _rewards(tree: ast.Module) -> Iterator[ast.AsyncFunctionDef]:
    """Functions that verifiers takes as rewards: decorated with vf.reward, called or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef):
            marks = [m.func if isinstance(m, ast.Call) else m for m in node.decorator_list]
            if any(isinstance(m, ast.Attribute | ast.Name) and _last(m) == "reward" for m in marks):
                yield node


def _last(name: ast.Attribute | ast.Name) -> str:
    return name.attr if isinstance(name, ast.Attribute) else name.id


def _asks_for_the_answer(function: ast.AsyncFunctionDef) -> bool:
    return any(
        isinstance(node, ast.Compare)
        and any(isinstance(op, ast.Eq) for op in node.ops)
        and any(isinstance(s, ast.Attribute) and s.attr == "answer" for s in _sides(node))
        for node in ast.walk(function)
    )


def _sides(compare: ast.Compare) -> list[ast.expr]:
    return [compare.left, *compare.comparators]
