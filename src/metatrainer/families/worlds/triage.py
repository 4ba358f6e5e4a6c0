"""Triage: support tickets, the customers who wrote them, and a policy that says where they go."""

import random

TOPICS = ("refund", "login", "delivery", "invoice")
TIERS = ("basic", "silver", "gold", "team", "trial")
QUEUES = ("billing", "account", "logistics", "support")
PRIORITIES = ("low", "normal", "high", "urgent")
TICKETS = 4


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One ticket to route: level 1 states the tier, level 2 wants the customer read first."""
    drawn = rng.sample(names, 2 * TICKETS)
    tickets, customers = drawn[:TICKETS], drawn[TICKETS:]
    world = {
        "tickets": {
            t: {"customer": rng.choice(customers), "topic": rng.choice(TOPICS)} for t in tickets
        },
        "customers": {c: {"tier": rng.choice(TIERS)} for c in customers},
        "policy": {
            f"{topic} {tier}": f"{rng.choice(QUEUES)} {rng.choice(PRIORITIES)}"
            for topic in TOPICS
            for tier in TIERS
        },
    }
    ticket = rng.choice(tickets)
    customer, topic = world["tickets"][ticket]["customer"], world["tickets"][ticket]["topic"]
    tier = world["customers"][customer]["tier"]
    calls = [["ticket", {"name": ticket}]]
    if level > 1:
        calls.append(["customer", {"name": customer}])
    calls.append(["policy", {"topic": topic, "tier": tier}])
    hint = f" of a {tier} customer" if level == 1 else ""
    return {
        "prompt": f"Where does ticket {ticket}{hint} go?",
        "world": world,
        "answer": world["policy"][f"{topic} {tier}"],
        "calls": calls,
    }
