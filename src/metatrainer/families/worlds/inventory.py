"""Inventory: items that may be out of stock and name a substitute, which may be out as well."""

import itertools
import random

ITEMS = 8


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One order: which item ships in the end, after one to `level` substitutions."""
    items = rng.sample(names, ITEMS)
    depth = rng.randint(1, level)
    chain = items[: depth + 1]
    world = {
        item: {
            "stock": rng.randint(1, 9),
            "substitute": rng.choice([i for i in items if i != item]),
        }
        for item in items
    }
    for item, substitute in itertools.pairwise(chain):
        world[item] = {"stock": 0, "substitute": substitute}
    return {
        "prompt": f"Which item ships for an order of {chain[0]}?",
        "world": world,
        "answer": chain[-1],
        "calls": [["stock", {"item": item}] for item in chain],
    }
