"""inventory: find the item that ships, following substitutes that are in stock and of the colour.

Every result names a substitute, needed or not, as a shop's page does.
"""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import inventory as worlds


@tool
def stock(world: World, item: str) -> str:
    """Colour of an item, how many are left, and its substitute."""
    entry = world[item]
    left = f"{entry['stock']} left" if entry["stock"] > 0 else "out"
    return f"{entry['colour']}, {left}, see {entry['substitute']}"


def _world_problem(world: World) -> str | None:
    for item, entry in world.items():
        if not isinstance(entry["stock"], int):
            return f"{item} must have a whole number `stock`"
        if not isinstance(entry["colour"], str) or not isinstance(entry["substitute"], str):
            return f"{item} must have a `colour` and the name of a `substitute`"
    return None if world else "the world has no items"


FAMILY = Family(
    name="inventory",
    title="Orders and substitutes",
    goal="find the item that ships for an order: in stock and of the colour asked for, else its "
    "substitute, and so on",
    answer_format="the item's name alone",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(stock,),
    sample=worlds.sample,
    world_problem=_world_problem,
)
