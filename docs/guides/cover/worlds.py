"""A clinic: patients with a doctor each, doctors with a partner, a mentor and a boss."""

import random

AMONG_DOCTORS = ("partner", "mentor", "boss")
PATIENTS, DOCTORS = 6, 6
WARDS = ("north", "south", "east", "west")


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One question: a patient's doctor, then `level` - 1 steps among doctors."""
    people = rng.sample(names, PATIENTS + DOCTORS)
    patients, doctors = people[:PATIENTS], people[PATIENTS:]
    world = {
        # The ward is in the records and of no use: tools in life say more than is asked.
        patient: {"doctor": rng.choice(doctors), "ward": rng.choice(WARDS)}
        for patient in patients
    }
    for doctor in doctors:
        others = [other for other in doctors if other != doctor]
        world[doctor] = {relation: rng.choice(others) for relation in AMONG_DOCTORS}
    while True:
        steps = ["doctor", *(rng.choice(AMONG_DOCTORS) for _ in range(level - 1))]
        visited = [rng.choice(patients)]
        for relation in steps:
            visited.append(world[visited[-1]][relation])
        if len(set(visited)) == level + 1:  # nobody twice, so that no step can be left out
            break
    chain = "".join(f"the {relation} of " for relation in reversed(steps))
    return {
        "prompt": f"Who is {chain}{visited[0]}?",
        "world": world,
        "answer": visited[-1],
        "calls": [
            ["lookup", {"name": person, "relation": relation}]
            for person, relation in zip(visited, steps)
        ],
    }
