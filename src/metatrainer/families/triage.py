"""triage: queue, priority and action of a support ticket, by topic, customer's tier and policy.

Held out: used only to test whether what the agent learned carries over.
"""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import triage as worlds


@tool
def ticket(world: World, name: str) -> str:
    """Topic and customer of a ticket, and how many days it is old."""
    entry = world["tickets"][name]
    return f"{entry['topic']} from {entry['customer']}, {entry['days']} days"


@tool
def customer(world: World, name: str) -> str:
    """Tier of a customer, and how many seats it pays for."""
    entry = world["customers"][name]
    return f"{entry['tier']}, {entry['seats']} seats"


@tool
def policy(world: World, topic: str, tier: str) -> str:
    """Queue, priority and action for a topic and a tier, or the tier whose rule holds instead."""
    return str(world["policy"][f"{topic} {tier}"])


def _world_problem(world: World) -> str | None:
    for entry in world["tickets"].values():
        if not {"topic", "customer", "days"} <= set(entry):
            return "each ticket must have a topic, a customer and days"
    if not all({"tier", "seats"} <= set(entry) for entry in world["customers"].values()):
        return "each customer must have a tier and seats"
    if not all(isinstance(rule, str) for rule in world["policy"].values()):
        return "the policy must map topic and tier to queue, priority and action"
    return None if world["policy"] else "the policy is empty"


FAMILY = Family(
    name="triage",
    title="Support tickets",
    goal="handle support tickets: read the ticket and its customer, then ask the policy",
    answer_format="queue, priority and action, as the policy says them",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(ticket, customer, policy),
    sample=worlds.sample,
    world_problem=_world_problem,
)
