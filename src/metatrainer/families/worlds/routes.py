"""Routes: stops that may be closed, and ways between them, each with a change and a fare."""

import random

OTHERS = 2
"""Stops that no question is about."""


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One trip: where to change, with `level` + 1 ways to try (1, 2), or two changes (3).

    How many of the cheaper ways are closed is drawn evenly, so that no place in the list is better.
    """
    count = level + 1 if level < 3 else 2
    start, goal, *rest = rng.sample(names, 2 + 2 * count + OTHERS)
    first, second, others = rest[:count], rest[count : 2 * count], rest[2 * count :]
    opened = rng.choice([(i, 0) for i in range(count)] if level < 3 else [(0, 0), (0, 1), (1, 0)])
    stops = {name: _status(rng, rng.random() < 0.5) for name in (start, goal, *rest)}
    legs = [(start, first, opened[0]), (first[opened[0]], second, opened[1])]
    ways = {name: {goal: _fares(rng, rng.sample(others, OTHERS))} for name in first}
    calls: list[tuple[str, dict[str, str]]] = []
    for at, changes, best in legs[: 1 if level < 3 else 2]:
        ways[at] = {goal: _fares(rng, changes)}
        for i, change in enumerate(changes[: best + 1]):
            stops[change] = _status(rng, i == best)
        calls.append(("ways", {"start": at, "goal": goal}))
        calls += [("status", {"stop": change}) for change in changes[: best + 1]]
    what = "change" if level < 3 else "change the second time"
    return {
        "prompt": f"Where does one {what} from {start} to {goal}, cheapest?",
        "world": {"stops": stops, "ways": ways},
        "answer": calls[-1][1]["stop"],
        "calls": calls,
    }


def _status(rng: random.Random, is_open: bool) -> dict:
    return {"open": is_open, "gates": rng.randint(2, 9)}


def _fares(rng: random.Random, changes: list[str]) -> dict:
    """Fares by change, rising."""
    return dict(zip(changes, sorted(rng.sample(range(1, 10), len(changes)))))
