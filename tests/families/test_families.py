"""Every family: items that are different and solvable, tools that answer, splits that are apart."""

import json
import random

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
            said = item.calls[-1][1]["item"] if family.name == "inventory" else heard[-1]
            assert family.correct(f" {said}\n", item.answer)
            assert family.check_world(item.world) is None


def test_nothing_is_won_without_tools(family):
    """No constant answer and no name in the question is right often."""
    items = family.items("hidden", 6, 512)
    answers = [i.answer for i in items]
    most = max(answers.count(a) for a in set(answers)) / len(answers)
    assert most < 0.12
    assert not any(i.answer in i.prompt.replace("?", "").split() for i in items)


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
