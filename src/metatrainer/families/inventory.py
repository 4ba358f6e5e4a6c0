"""inventory: find the item that ships, following substitutes while things are out of stock."""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import inventory as worlds


@tool
def stock(world: World, item: str) -> str:
    """Whether an item is in stock, and its substitute if not."""
    entry = world[item]
    return "in stock" if entry["stock"] > 0 else f"out, see {entry['substitute']}"


def _world_problem(world: World) -> str | None:
    for item, entry in world.items():
        if not isinstance(entry["stock"], int) or not isinstance(entry["substitute"], str):
            return f"{item} must have a whole number `stock` and a name `substitute`"
    return None if world else "the world has no items"


FAMILY = Family(
    name="inventory",
    title="Orders and substitutes",
    goal="find the item that ships for an order, following substitutes while items are out",
    answer_format="the item's name alone",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(stock,),
    sample=worlds.sample,
    world_problem=_world_problem,
)
