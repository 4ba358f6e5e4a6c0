"""Faults of a submitted package that its source shows, so that nothing has to be run.

Reads Python as a syntax tree; knows nothing about tasks, settings or sandboxes.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator

from metatrainer.jobs.findings import Finding

OLD_API = ("load_environment", "Rubric", "SingleTurnEnv", "MultiTurnEnv", "ToolEnv")

_PARSING = threading.Lock()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_source(files: dict[str, str]) -> list[Finding]:
    """Findings of all Python files; syntax errors alone where there are any."""
    trees: dict[str, ast.Module] = {}
    broken: list[Finding] = []
    for file, text in files.items():
        if file.endswith(".py"):
            try:
                trees[file] = _parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                broken.append(_syntax(file, error))
    if broken:
        return broken
    found = [f for file, tree in trees.items() for f in (*_rewards(file, tree), *_old(file, tree))]
    if not any(_mentions_reward(tree) for tree in trees.values()):
        found.append(
            Finding(
                "E-REWARD", None, None, "no @vf.reward method", "", "add one to the vf.Task class"
            )
        )
    return found


def _parse(text: str) -> ast.Module:
    # CPython 3.11 counts the depth of the tree it builds in one place for all threads: a garbage
    # collection inside one parse that lets another thread parse ends in a SystemError.
    with _PARSING:
        return ast.parse(text)


def _syntax(file: str, error: Exception) -> Finding:
    line = error.lineno if isinstance(error, SyntaxError) else None
    said = error.msg if isinstance(error, SyntaxError) else "this file cannot be parsed"
    return Finding("E-SYNTAX", file, line, said, "", "fix this line")


def _rewards(file: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(map(_is_reward, node.decorator_list)):
            if isinstance(node, ast.FunctionDef):
                found = f"reward {node.name} is not async"
                fix = f"write 'async def {node.name}'"
                yield Finding("E-ASYNC", file, node.lineno, found, "", fix)
            yield from _arguments(file, node)


def _arguments(file: str, node: Function) -> Iterator[Finding]:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    required = names[: len(names) - len(node.args.defaults)]
    required += [
        a.arg
        for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is None
    ]
    wrong = [name for name in required if name not in ("self", "task", "trace")]
    if wrong:
        yield Finding(
            "E-ARGS",
            file,
            node.lineno,
            f"reward {node.name} takes {', '.join(wrong)}",
            "self, task, trace",
            "read trace.last_reply and task.answer",
        )


def _old(file: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, Function):
            name = node.name
        if name in OLD_API:
            fix = "export a vf.Taskset whose vf.Task has @vf.reward methods"
            found = f"{name} is of verifiers v0, which is gone"
            yield Finding("E-V0", file, getattr(node, "lineno", None), found, "", fix)


def _is_reward(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(target, "attr", getattr(target, "id", None)) == "reward"


def _mentions_reward(tree: ast.Module) -> bool:
    return any(
        "reward" in (getattr(node, "attr", None), getattr(node, "id", None), alias)
        for node in ast.walk(tree)
        for alias in (getattr(node, "name", None),)
    )
