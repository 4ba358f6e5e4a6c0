"""A person as the student: what their lines are answered."""

import pytest

from metatrainer import families
from metatrainer.errors import ConfigError
from metatrainer.families import play


@pytest.mark.parametrize("name", families.NAMES)
def test_a_perfect_person_is_right(name):
    family = families.get(name)
    for level in family.levels:
        item = play.deal(family, level, seed=1)[0]
        for tool, arguments in item.calls:
            line = " ".join([tool, *(f'"{value}"' for value in arguments.values())])
            assert play.reply(family, item, line).text == family.call(item.world, tool, arguments)
        assert play.reply(family, item, f"answer  {item.answer} ").right is True
        assert play.reply(family, item, "answer who knows").right is False


@pytest.mark.parametrize("line", ["fly", "lookup", "lookup a b c", 'lookup "a', "lookup a b", "\0"])
def test_other_lines_are_answered_and_the_item_goes_on(line):
    family = families.get("persona")
    (item, *_) = play.deal(family, None, 0)
    reply = play.reply(family, item, line)
    assert reply.text and reply.right is None


def test_a_level_out_of_range_names_the_range():
    with pytest.raises(ConfigError, match="persona has levels 1 to 3, not 4"):
        play.deal(families.get("persona"), 4, 0)


def test_items_are_the_same_for_a_seed_and_of_no_hidden_name():
    family = families.get("triage")
    assert play.deal(family, 1, 5) == play.deal(family, 1, 5) != play.deal(family, 1, 6)
    assert play.deal(family, None, 5) == family.items("dev", 5, play.ROUNDS)
