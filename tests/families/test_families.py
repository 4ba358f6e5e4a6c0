"""Every family: items that are different and solvable, tools that answer, splits that are apart."""

import itertools
import json
import random
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction

import pytest

from metatrainer import families
from metatrainer.errors import ConfigError
from metatrainer.families.names import FIRST, SECOND, SPLITS, names

N = 128


@pytest.fixture(params=families.NAMES)
def family(request):
    return families.get(request.param)


def test_splits_share_no_name_and_hold_every_syllable():
    parts = [set(names(split)) for split in SPLITS]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(FIRST) * len(SECOND)
    for part in parts:
        assert {n[: -len(s)] for n in part for s in SECOND if n.endswith(s)} >= set(FIRST)
        assert all(any(n.endswith(s) for n in part) for s in SECOND)


def test_items_are_reproducible_and_different(family):
    for level in family.levels:
        items = family.items("hidden", 3, N, level)
        assert items == family.items("hidden", 3, N, level)
        assert items[:10] != family.items("hidden", 4, N, level)[:10]
        assert len({(i.prompt, str(i.world)) for i in items}) == N
        assert {i.level for i in items} == {level}


def test_ids_do_not_give_the_seed_away(family):
    secret = 987654321
    assert all(str(secret) not in item.id for item in family.items("hidden", secret, 4))


def test_a_perfect_student_is_always_right(family):
    """Following the oracle's calls, the answer is always what the tools said."""
    for level in family.levels:
        for item in family.items("hidden", 5, N, level):
            heard = [family.call(item.world, name, args) for name, args in item.calls]
            assert not any(h.startswith("error") for h in heard)
            # The last result is the answer, but where it says that the last thing asked for is.
            told = [heard[-1], *item.calls[-1][1].values()]
            assert any(family.correct(f" {said}\n", item.answer) for said in told)
            assert family.check_world(item.world) is None


def test_nothing_is_won_without_tools(family):
    """No constant answer and no name in the question is right often."""
    items = family.items("hidden", 6, 512)
    answers = [i.answer for i in items]
    most = max(answers.count(a) for a in set(answers)) / len(answers)
    # No answer has an expected share over 3 %; five standard errors of 512 items are 4 %.
    assert most < 0.07
    assert not any(i.answer in i.prompt.replace("?", "").split() for i in items)


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        ("ledger", ("entries", {"account": "", "page": "3"}), "error: unknown page 3; pages: 1 to"),
        ("ledger", ("entries", {"account": "", "page": "two"}), "error: entries found nothing"),
        ("ledger", ("convert", {"amount": "1", "source": "yen", "target": "gold"}), "unknown gold"),
        ("ledger", ("add", {"first": "9" * 20, "second": "1"}), "error: add found nothing"),
        ("calendar", ("check", {"name": "", "time": "25:00"}), "error: unknown time 25:00"),
        ("calendar", ("clock", {"name": "", "time": "noon"}), "error: unknown time noon"),
    ],
)
def test_tools_explain_what_they_cannot_do(name, call, said):
    family = families.get(name)
    world = family.items("dev", 0, 1)[0].world
    somebody = next(iter(world["accounts"] if name == "ledger" else world))
    tool, arguments = call
    given = {key: value or somebody for key, value in arguments.items()}
    assert said in family.call(world, tool, given)


def test_a_statement_has_pages_that_come_to_the_balance():
    family = families.get("ledger")
    world = family.items("dev", 0, 1)[0].world
    account = next(iter(world["accounts"]))
    pages = [family.call(world, "entries", {"account": account, "page": str(n)}) for n in (1, 2)]
    found = [int(n) for page in pages for n in page.split(": ")[1].split(", ")]
    assert [page.split(":")[0] for page in pages] == ["page 1 of 2", "page 2 of 2"]
    said = family.call(world, "balance", {"account": account})
    assert said.startswith(f"{sum(found)} {world['accounts'][account]['currency']}, limit")


def test_conversion_and_clocks_against_python():
    """Rates and zones as the standard library computes them."""
    ledger, calendar = families.get("ledger"), families.get("calendar")
    for seed in range(50):
        world = ledger.items("dev", seed, 1)[0].world
        rates = world["rates"]
        for source, target in itertools.product(rates, rates):
            said = ledger.call(
                world, "convert", {"amount": "37", "source": source, "target": target}
            )
            assert abs(int(said) - Fraction(37 * rates[source], rates[target])) <= Fraction(1, 2)
        people = calendar.items("dev", seed, 1)[0].world
        for name, person in people.items():
            zone = timezone(timedelta(minutes=person["zone"]))
            there = datetime(2026, 1, 1, 21, 45, tzinfo=UTC).astimezone(zone)
            said = calendar.call(people, "clock", {"name": name, "time": "21:45"})
            assert said == f"{there:%H:%M}"


def test_the_meeting_is_the_first_time_at_which_both_are_free():
    family = families.get("calendar")
    for level in family.levels:
        for item in family.items("dev", 0, 40, level):
            start, *_, last = [arguments["time"] for _, arguments in item.calls]
            pair = {arguments["name"] for _, arguments in item.calls[:2]}
            minutes = range(int(start[:2]) * 60, 24 * 60)
            free = (
                f"{m // 60:02}:{m % 60:02}"
                for m in minutes
                if all(
                    family.call(
                        item.world, "check", {"name": n, "time": f"{m // 60:02}:{m % 60:02}"}
                    )
                    == "free"
                    for n in pair
                )
            )
            assert next(free) == last


def test_the_trip_is_the_cheapest_open_one():
    family = families.get("routes")
    for item in family.items("dev", 0, 100):
        start, goal = item.calls[0][1].values()
        ways = item.world["ways"][start][goal]
        fares = {ways[stop]: stop for stop in ways if item.world["stops"][stop]["open"]}
        assert item.answer == fares[min(fares)]


def test_wrong_calls_are_answered(family):
    item = family.items("dev", 0, 1)[0]
    tool = family.tools[0]
    first = tool.parameters["required"][0]
    assert "no tool" in family.call(item.world, "fly", {})
    assert first in family.call(item.world, tool.name, {})
    nobody = dict.fromkeys(tool.parameters["required"], "Nobody")
    assert "unknown Nobody" in family.call(item.world, tool.name, nobody)
    assert family.call(item.world, tool.name, nobody | {first: ["x"]}).startswith("error")


@pytest.mark.parametrize("world", [None, 3, [], {}, {"x": 1}, {"x": {"y": object()}}])
def test_a_bad_world_is_described(family, world):
    assert isinstance(family.check_world(world), str)


def test_no_mutation_of_a_world_breaks_a_tool(family):
    """Whatever check_world lets through, calls are answered: 500 random damages to a world."""
    rng = random.Random(0)
    item = family.items("dev", 0, 1)[0]
    for _ in range(500):
        world = json.loads(json.dumps(item.world))
        at, parent, key = world, world, next(iter(world))
        while isinstance(at, dict) and at and rng.random() < 0.7:
            parent, key = at, rng.choice(list(at))
            at = at[key]
        parent[key] = rng.choice([None, 0, [], {}, "x", {"x": None}, [1]])
        if family.check_world(world) is None:
            for name, arguments in item.calls:
                assert isinstance(family.call(world, name, arguments), str)


def test_unknown_names_and_levels(family):
    with pytest.raises(ConfigError, match="did you mean 'persona'"):
        families.get("personna")
    with pytest.raises(ValueError, match="levels"):
        family.items("train", 0, 1, 99)


def test_starter_files_stand_alone(family, tmp_path, monkeypatch):
    """The world generator that an agent gets needs nothing of ours and knows no hidden name."""
    files = family.starter_files()
    scope: dict = {}
    exec(files["environment/worlds.py"], scope)
    exec(files["environment/names.py"], scope)
    drawn = scope["sample"](random.Random(0), family.eval_level, list(scope["NAMES"]))
    assert family.check_world(drawn["world"]) is None
    assert set(scope["NAMES"]) == set(names("train"))
    hidden = set(names("hidden")) | set(names("dev"))
    assert not any(name in text for name in hidden for text in files.values())
