"""Triage: support tickets, the customers who wrote them, and a policy that says what is done."""

import random

TOPICS = ("refund", "login", "delivery", "invoice")
TIERS = ("basic", "silver", "gold", "team", "trial")
QUEUES = ("billing", "access", "shipping", "sales")
PRIORITIES = ("low", "normal", "high")
ACTIONS = ("answer", "repay", "escalate")
TICKETS = 4


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One ticket: level 1 states the tier, level 2 wants the customer read, level 3 goes on.

    At level 3 the policy sends the ticket's tier on to another one.
    """
    drawn = rng.sample(names, 2 * TICKETS)
    customers = drawn[TICKETS:]
    tickets: dict[str, dict] = {
        ticket: {
            "customer": rng.choice(customers),
            "topic": rng.choice(TOPICS),
            "days": rng.randint(2, 9),
        }
        for ticket in drawn[:TICKETS]
    }
    tiers: dict[str, dict] = {
        name: {"tier": rng.choice(TIERS), "seats": rng.randint(2, 9)} for name in customers
    }
    policy = {
        f"{topic} {tier}": " ".join(rng.choice(part) for part in (QUEUES, PRIORITIES, ACTIONS))
        for topic in TOPICS
        for tier in TIERS
    }
    ticket = rng.choice(list(tickets))
    customer, topic = tickets[ticket]["customer"], tickets[ticket]["topic"]
    tier = tiers[customer]["tier"]
    calls = [["ticket", {"name": ticket}]]
    if level > 1:
        calls.append(["customer", {"name": customer}])
    calls.append(["policy", {"topic": topic, "tier": tier}])
    if level > 2:
        other = rng.choice([t for t in TIERS if t != tier])
        policy[f"{topic} {tier}"] = f"as {other}"
        calls.append(["policy", {"topic": topic, "tier": other}])
        tier = other
    hint = f" of a {tier} customer" if level == 1 else ""
    return {
        "prompt": f"How is ticket {ticket}{hint} handled?",
        "world": {"tickets": tickets, "customers": tiers, "policy": policy},
        "answer": policy[f"{topic} {tier}"],
        "calls": calls,
    }
