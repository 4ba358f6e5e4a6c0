"""persona: multi-hop questions about people, answered by looking up one relation at a time."""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import persona as worlds


@tool
def lookup(world: World, name: str, relation: str) -> str:
    """Who stands in a relation to a person."""
    return str(world[name][relation])


def _world_problem(world: World) -> str | None:
    for person, relations in world.items():
        if not relations or not all(isinstance(v, str) for v in relations.values()):
            return f"{person} must map relations to names"
    return None if world else "the world has no people"


FAMILY = Family(
    name="persona",
    title="Multi-hop persona queries",
    goal="answer questions that hop along relations between people, one lookup at a time",
    answer_format="the name alone",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(lookup,),
    sample=worlds.sample,
    world_problem=_world_problem,
)
