"""Inventory: items of a colour that may be out of stock; each names a substitute, good or not."""

import itertools
import random

ITEMS = 8
COLOURS = ("red", "blue", "green")


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One order: which item of a colour ships in the end, after one to `level` substitutions.

    An item on the way is out of stock or has a wrong colour, and only the last one has neither.
    """
    items = rng.sample(names, ITEMS)
    depth = rng.randint(1, level)
    chain = items[: depth + 1]
    wanted = rng.choice(COLOURS)
    others = [colour for colour in COLOURS if colour != wanted]
    world = {
        item: {
            "stock": rng.choice([0, rng.randint(1, 9)]),
            "colour": rng.choice(COLOURS),
            "substitute": rng.choice([i for i in items if i != item]),
        }
        for item in items
    }
    for item, substitute in itertools.pairwise(chain):
        out = rng.random() < 0.5
        world[item] = {
            "stock": 0 if out else rng.randint(1, 9),
            "colour": wanted if out else rng.choice(others),
            "substitute": substitute,
        }
    world[chain[-1]] |= {"stock": rng.randint(1, 9), "colour": wanted}
    return {
        "prompt": f"Which {wanted} item ships for an order of {chain[0]}?",
        "world": world,
        "answer": chain[-1],
        "calls": [["stock", {"item": item}] for item in chain],
    }
