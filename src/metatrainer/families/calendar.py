"""calendar: find when two people can meet, asking one after the other, across time zones."""

from __future__ import annotations

import re

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import calendar as worlds

_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@tool
def check(world: World, name: str, time: str) -> str:
    """Whether a person is free at a time in UTC, and until when busy if not."""
    busy, at = world[name]["busy"], _minutes(time)
    ends = [end for start, end in busy if _minutes(start) <= at < _minutes(end)]
    return f"busy until {max(ends)}" if ends else "free"


@tool
def clock(world: World, name: str, time: str) -> str:
    """A time in UTC on the clock of a person."""
    there = (_minutes(time) + world[name]["zone"]) % worlds.DAY
    return f"{there // 60:02}:{there % 60:02}"


def _minutes(time: str) -> int:
    """Minutes since midnight. Raises KeyError for what is no time from 00:00 to 23:59."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise KeyError(f"time {time}; write it like 09:30")
    return 60 * int(found[1]) + int(found[2])


def _world_problem(world: World) -> str | None:
    for name, person in world.items():
        if not isinstance(person["zone"], int):
            return f"{name} must have a `zone` in minutes"
        for start, end in person["busy"]:
            if _minutes(start) >= _minutes(end):
                return f"{name} is busy until before {start}"
    return None if world else "the world has no people"


FAMILY = Family(
    name="calendar",
    title="Meetings across time zones",
    goal="find when two people can first meet: ask them in turn about the latest time named until "
    "one is free at what the other can, then read that time on the clock asked for",
    answer_format="the time alone, like 09:30",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(check, clock),
    sample=worlds.sample,
    world_problem=_world_problem,
)
