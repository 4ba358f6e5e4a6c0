"""triage: find the desk for a support ticket, by its topic, its customer's tier and the policy.

Held out: used only to test whether what the agent learned carries over.
"""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import triage as worlds


@tool
def ticket(world: World, name: str) -> str:
    """The topic of a ticket and the customer who wrote it."""
    entry = world["tickets"][name]
    return f"{entry['topic']} from {entry['customer']}"


@tool
def customer(world: World, name: str) -> str:
    """The tier of a customer."""
    return str(world["customers"][name]["tier"])


@tool
def policy(world: World, topic: str, tier: str) -> str:
    """The desk that takes a topic from a tier of customers."""
    return str(world["policy"][f"{topic} {tier}"])


def _world_problem(world: World) -> str | None:
    for entry in world["tickets"].values():
        if not {"topic", "customer"} <= set(entry):
            return "each ticket must have a topic and a customer"
    if not all("tier" in entry for entry in world["customers"].values()):
        return "each customer must have a tier"
    if not all(isinstance(label, str) for label in world["policy"].values()):
        return "the policy must map topic and tier to a desk"
    return None if world["policy"] else "the policy is empty"


FAMILY = Family(
    name="triage",
    title="Support tickets",
    goal="route support tickets: read the ticket and its customer, then ask the policy",
    answer_format="the desk's name alone",
    levels=(1, 2),
    eval_level=2,
    tools=(ticket, customer, policy),
    sample=worlds.sample,
    world_problem=_world_problem,
)
