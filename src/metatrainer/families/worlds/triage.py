"""Triage: support tickets, the customers who wrote them, and a policy that says who takes them."""

import random

TOPICS = ("refund", "login", "delivery", "invoice")
TIERS = ("basic", "silver", "gold", "team", "trial")
TICKETS = 4
DESKS = 6


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One ticket to route: level 1 states the tier, level 2 wants the customer read first."""
    drawn = rng.sample(names, 2 * TICKETS + DESKS)
    customers, desks = drawn[TICKETS : 2 * TICKETS], drawn[2 * TICKETS :]
    tickets = {
        ticket: {"customer": rng.choice(customers), "topic": rng.choice(TOPICS)}
        for ticket in drawn[:TICKETS]
    }
    tiers = {customer: {"tier": rng.choice(TIERS)} for customer in customers}
    policy = {f"{topic} {tier}": rng.choice(desks) for topic in TOPICS for tier in TIERS}
    ticket = rng.choice(list(tickets))
    customer, topic = tickets[ticket]["customer"], tickets[ticket]["topic"]
    tier = tiers[customer]["tier"]
    calls = [["ticket", {"name": ticket}]]
    if level > 1:
        calls.append(["customer", {"name": customer}])
    calls.append(["policy", {"topic": topic, "tier": tier}])
    hint = f" of a {tier} customer" if level == 1 else ""
    return {
        "prompt": f"Which desk takes ticket {ticket}{hint}?",
        "world": {"tickets": tickets, "customers": tiers, "policy": policy},
        "answer": policy[f"{topic} {tier}"],
        "calls": calls,
    }
