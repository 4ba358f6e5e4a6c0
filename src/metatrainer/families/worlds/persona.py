"""Personas: people who name each other in six relations, and questions that hop along them."""

import random

RELATIONS = ("boss", "friend", "rival", "mentor", "partner", "doctor")
PEOPLE = 8


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One question of `level` hops: "Who is the mentor of the boss of BelMar?"."""
    people = rng.sample(names, PEOPLE)
    world = {
        person: {relation: rng.choice([p for p in people if p != person]) for relation in RELATIONS}
        for person in people
    }
    while True:
        path = [rng.choice(RELATIONS) for _ in range(level)]
        visited = [rng.choice(people)]
        for relation in path:
            visited.append(world[visited[-1]][relation])
        if len(set(visited)) == level + 1:
            break
    chain = "".join(f"the {relation} of " for relation in reversed(path))
    return {
        "prompt": f"Who is {chain}{visited[0]}?",
        "world": world,
        "answer": visited[-1],
        "calls": [
            ["lookup", {"name": person, "relation": relation}]
            for person, relation in zip(visited, path)
        ],
    }
