"""Renders what the agent is told from the run's settings and the task, through one template.

The numbers in the text are those of the reward and the limits, so the two cannot drift apart.
Short and plain, because the smallest agents are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from pydantic.fields import FieldInfo

from metatrainer.agent.task import Task
from metatrainer.config import RunSettings
from metatrainer.families import Family, Item
from metatrainer.jobs.spec import TrainingSpec
from metatrainer.reward import RewardConfig

PATH = "INSTRUCTIONS.md"
"""Where the agent can read the text again."""
_TEMPLATE = Path(__file__).with_name("instructions.md.j2")
_ANSWER_CHARS = 60


def render(task: Task, settings: RunSettings) -> str:
    """The instructions of one episode."""
    uplift, absolute = shares(settings.reward)
    return _template().render(
        family=task.family,
        dev=[_worked(task.family, item) for item in task.dev],
        limits=settings.limits,
        seconds=f"{settings.limits.max_seconds:g}",
        max_turns=settings.agent.max_turns,
        students=settings.students,
        keys=_ranges(),
        uplift=uplift,
        absolute=absolute,
    )


def shares(reward: RewardConfig) -> tuple[int, int]:
    """Percentages of uplift and absolute score in quality."""
    whole = reward.uplift + reward.absolute
    return round(100 * reward.uplift / whole), round(100 * reward.absolute / whole)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _ranges() -> dict[str, str]:
    """The numbers of job.toml and what they may be, from their declaration."""
    return {
        name: _range(field) + ("" if field.is_required() else f", or left out: {field.default}")
        for name, field in TrainingSpec.model_fields.items()
        if field.metadata
    }


def _range(field: FieldInfo) -> str:
    bounds = {
        kind: f"{getattr(bound, kind):g}"
        for bound in field.metadata
        for kind in ("ge", "gt", "le")
        if hasattr(bound, kind)
    }
    low = bounds["ge"] if "ge" in bounds else f"above {bounds['gt']}"
    return f"{low} to {bounds['le']}"


def _worked(family: Family, item: Item) -> dict[str, Any]:
    calls = [
        {
            "text": f"{name}({', '.join(arguments.values())})",
            "answer": family.call(item.world, name, arguments)[:_ANSWER_CHARS],
        }
        for name, arguments in item.calls
    ]
    return {"prompt": item.prompt, "calls": calls, "answer": item.answer}
