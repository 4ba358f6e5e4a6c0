"""Jobs in which there is nothing to find: the reference jobs, and variations of many kinds."""

from __future__ import annotations

import json

from metatrainer import families
from suite.case import (
    JOB,
    PACKAGE,
    PERSONA,
    REWARD,
    SETTINGS,
    TOML,
    Case,
    Files,
    reward,
    settings,
    swap,
)

REFERENCE = [
    Case(f"reference-{name}", {**families.get(name).starter_files(), TOML: SETTINGS}, family=name)
    for name in families.NAMES
]
"""What `metatrainer job new` writes, but for settings of this suite's own."""


def own_data() -> Files:
    """Tasks from a file of data in place of a generator."""
    items = [[i.prompt, dict(i.world), i.answer] for i in PERSONA.items("train", 3, 32)]
    head, _, _ = JOB[PACKAGE].partition("        rng = ")
    load = """\
        rows = json.loads(Path(__file__).with_name("data.json").read_text())
        return [Task(Data(prompt=p, world=w, answer=a)) for p, w, a in rows]


__all__ = ["Tasks"]
"""
    text = head.replace("import random\n", "import json\nfrom pathlib import Path\n") + load
    return {**JOB, PACKAGE: text, "environment/data.json": json.dumps(items)}


SECOND_REWARD = f"""{REWARD}
    @vf.reward(weight=0.2)
    async def looked_up(self, task, trace) -> float:
        return float(any(task.answer in m.content for m in trace.tool_messages))

    @vf.metric
    async def words(self, trace) -> float:
        return len(trace.last_reply.split())
"""
BY_NAME = """\
        right = float(reply == self.data.answer)
        return {"right": right, "near": 0.1 * (self.data.answer in reply)}
"""
CONFIG = """\
class Config(vf.TasksetConfig):
    levels: list[int] = [1]


class Tasks(vf.Taskset[Task, Config]):
"""

VARIATIONS = [
    Case("own-data", own_data()),
    Case("several-rewards", reward(SECOND_REWARD)),
    Case("rewards-by-name", reward(BY_NAME)),
    Case(
        "for-calls-too",
        reward("        return (reply == self.data.answer) + 0.1 * len(trace.tool_messages[:2])\n"),
    ),
    Case(
        "only-with-calls",
        reward("        return float(reply == self.data.answer and bool(trace.tool_messages))\n"),
    ),
    Case("punishes", reward("        return 1.0 if reply == self.data.answer else -1.0\n")),
    Case("system-prompt", swap("prompt=drawn", 'system_prompt="Look it up.", prompt=drawn')),
    Case("two-levels", swap("LEVELS = [1]", "LEVELS = [1, 2]")),
    Case(
        "arguments",
        swap(
            "class Tasks(vf.Taskset[Task, vf.TasksetConfig]):\n",
            CONFIG,
            files=swap(
                "LEVELS[i % len(LEVELS)]",
                "self.config.levels[i % len(self.config.levels)]",
                files={**JOB, TOML: SETTINGS + "args = {levels = [2, 1]}\n"},
            ),
        ),
    ),
    Case(
        "own-keys",
        swap(
            "    @vf.reward",
            "    @property\n    def key(self):\n        return self.data.prompt\n\n    @vf.reward",
        ),
    ),
    Case(
        "other-name",
        {
            name.replace("environment/", "practice/"): text
            for name, text in settings('"environment"', '"practice"').items()
        },
    ),
    Case("prints-and-notes", {**swap("LEVELS = ", "print('hello')\nLEVELS = "), "NOTES.md": "x"}),
    Case("small", settings("= 64\ngroup_size = 8", "= 2\ngroup_size = 2")),
    Case("few-settings", {**JOB, TOML: "[prime_rl]\nmodel='nano-finch'\nlearning_rate=1e-3\n"}),
]

GOOD = [*REFERENCE, *VARIATIONS]
