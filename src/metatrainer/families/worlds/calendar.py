"""Calendar: people with a time zone each and hours in which they are busy, in UTC."""

import random

PEOPLE = 4
DAY = 24 * 60
"""Minutes."""


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One meeting of two people: when, on the clock of one of them.

    Asked in turn, beginning with the first, each is busy at the time that the other one named, or
    free: busy `level` times in all, or once less after the first was free at once.
    Level 1 has one busy answer.
    """
    start = 60 * rng.randint(8, 11)
    early = rng.random() < 0.5
    answers = [False] if early else [True]
    answers += [True] * max(level - 1, int(early))
    while True:
        people = {name: _person(rng) for name in rng.sample(names, PEOPLE)}
        pair = list(people)[:2]
        asked = _meet(rng, people, pair, start, answers)
        if _first_common(people, pair, start) == asked[-1][1]:
            break
    owner = rng.choice(pair)
    time = asked[-1][1]
    calls = [["check", {"name": name, "time": _text(at)}] for name, at in asked]
    calls.append(["clock", {"name": owner, "time": _text(time)}])
    return {
        "prompt": f"When can {pair[0]} and {pair[1]} first meet from {_text(start)} on, "
        f"on the clock of {owner}?",
        "world": {name: _shown(person) for name, person in people.items()},
        "answer": _text((time + people[owner]["zone"]) % DAY),
        "calls": calls,
    }


def _person(rng: random.Random) -> dict:
    """Somebody with a zone (minutes before UTC) and a busy evening."""
    return {"zone": 30 * rng.randint(-23, 24), "busy": [[21 * 60, 22 * 60]]}


def _meet(
    rng: random.Random, people: dict, pair: list[str], start: int, answers: list[bool]
) -> list[tuple[str, int]]:
    """Make the pair busy as the answers say. Returns who is asked about which time, in order."""
    asked, at = [], start
    for i, busy in enumerate([*answers, False]):
        asked.append((pair[i % 2], at))
        if busy:
            # Starts are at full hours and meetings at quarters, so the question names no answer.
            length = 60 * rng.randint(0, 1) + (rng.choice([15, 45]) if at % 60 == 0 else 30)
            people[pair[i % 2]]["busy"].append([at - 15 * rng.randint(0, 2), at + length])
            at += length
    return asked


def _first_common(people: dict, pair: list[str], start: int) -> int:
    """The first minute from a start on at which neither is busy."""
    busy = [span for name in pair for span in people[name]["busy"]]
    return next(m for m in range(start, DAY) if not any(a <= m < b for a, b in busy))


def _shown(person: dict) -> dict:
    return {
        "zone": person["zone"],
        "busy": [[_text(a), _text(b)] for a, b in sorted(person["busy"])],
    }


def _text(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
