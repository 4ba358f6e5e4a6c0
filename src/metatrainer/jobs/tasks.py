"""Whether loaded tasks can be trained on by trusted code: enough of them, whole, on sound worlds.

Validation asks this, and so must whoever loads the tasks again: submitted code may give others.
Knows nothing about rewards, settings or sandboxes.
"""

from __future__ import annotations

import json
from collections import Counter

from metatrainer.families import Family
from metatrainer.jobs.findings import Finding
from metatrainer.sandbox.host import TaskRow

MIN_TASKS = 8
"""Different tasks that a job needs at least."""


def check_tasks(rows: list[TaskRow], family: Family, package: str) -> Finding | None:
    """The first fault of a job's tasks, None if there is none.

    package: the file to name in the finding.
    """
    return _enough(rows, package) or _whole(rows, family, package)


def _enough(rows: list[TaskRow], package: str) -> Finding | None:
    different = len({json.dumps([row.prompt, row.data], sort_keys=True) for row in rows})
    if different < MIN_TASKS:
        found = f"load() gives {different} different tasks"
        fix = f"yield {MIN_TASKS} or more"
        return Finding("E-TASKS", package, None, found, f"at least {MIN_TASKS}", fix)
    key, count = Counter(row.key for row in rows).most_common(1)[0]
    if count > 1 and different == len(rows):
        found = f"{count} tasks have the key {key[:40]!r}"
        return Finding("E-KEYS", package, None, found, "unique keys", "remove key")
    return None


def _whole(rows: list[TaskRow], family: Family, package: str) -> Finding | None:
    for number, row in enumerate(rows):
        if problem := _problem(row, family):
            code, found, fix = problem
            return Finding(code, package, None, f"task {number}: {found}", "", fix)
    return None


def _problem(row: TaskRow, family: Family) -> tuple[str, str, str] | None:
    declare = "declare 'world: dict' and 'answer: str' in the vf.TaskData class"
    for name in ("world", "answer"):
        if name not in row.data:
            return "E-DATA", f"no field {name}", declare
    if not row.prompt.strip():
        return "E-DATA", "the prompt is empty", "give each task a prompt"
    answer = row.data["answer"]
    if not isinstance(answer, str) or not answer.strip():
        return "E-DATA", f"answer = {answer!r:.40}, not a text", "give each task its right answer"
    if problem := family.check_world(row.data["world"]):
        return "E-WORLD", problem, "build worlds as environment/worlds.py does"
    return None
