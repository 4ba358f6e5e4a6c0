"""cover: who covers for a patient's doctor, from the clinic's records."""

from __future__ import annotations

from metatrainer_cover import worlds

from metatrainer.families.base import Family, World, tool


@tool
def lookup(world: World, name: str, relation: str) -> str:
    """One field of a person's record."""
    return str(world[name][relation])


def _world_problem(world: World) -> str | None:
    for person, record in world.items():
        if not record or not all(isinstance(value, str) for value in record.values()):
            return f"{person} must have a record of texts"
    return None if world else "the clinic has no people"


FAMILY = Family(
    name="cover",
    title="Who covers for a patient's doctor",
    goal="find the doctor who is to be called for a patient, one record at a time",
    answer_format="the name alone",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(lookup,),
    sample=worlds.sample,
    world_problem=_world_problem,
)
