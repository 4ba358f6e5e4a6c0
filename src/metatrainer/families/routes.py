"""routes: plan the cheapest trip over a network in which stops are closed."""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import routes as worlds

SHOWN = 3
"""Ways that are shown of a trip; the API leaves out the rest."""


@tool
def ways(world: World, start: str, goal: str) -> str:
    """Where one can change between two stops, and the fare of each way, cheapest first."""
    fares = sorted(world["ways"][start][goal].items(), key=lambda way: way[1])
    more = f", {len(fares) - SHOWN} more" if len(fares) > SHOWN else ""
    return ", ".join(f"{change} {fare}" for change, fare in fares[:SHOWN]) + more


@tool
def status(world: World, stop: str) -> str:
    """Whether a stop is open, and how many gates it has."""
    found = world["stops"][stop]
    return f"{'open' if found['open'] else 'closed'}, {found['gates']} gates"


def _world_problem(world: World) -> str | None:
    for name, found in world["stops"].items():
        if not isinstance(found["open"], bool) or "gates" not in found:
            return f"stop {name} must say whether it is `open`, and its `gates`"
    for start, goals in world["ways"].items():
        for fares in goals.values():
            if not fares or not all(isinstance(fare, int) for fare in fares.values()):
                return f"ways from {start} must have whole numbers as fares"
    return None if world["stops"] else "the world has no stops"


FAMILY = Family(
    name="routes",
    title="Trips with closures",
    goal="plan trips: list the ways, cheapest first, and take the first one whose change is open",
    answer_format="the name of the stop alone",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(ways, status),
    sample=worlds.sample,
    world_problem=_world_problem,
)
