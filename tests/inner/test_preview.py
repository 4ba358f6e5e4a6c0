"""What a job would have to learn from, predicted from its untrained student."""

from __future__ import annotations

import random

import pytest
from practice import Practice, settings

from metatrainer import families
from metatrainer.engine import Engine
from metatrainer.errors import EnvError
from metatrainer.inner.grpo import train_job
from metatrainer.inner.preview import preview
from metatrainer.students import catalogue

FAMILY = families.get("persona")


@pytest.fixture(scope="module")
def engine():
    return Engine(catalogue.verified_folder("nano-wren"))


def look(engine, reward=None, rollouts=64, **changes):
    practice = Practice(FAMILY, reward=reward)
    return preview(engine, settings(**changes), practice.load(), practice, FAMILY, rollouts)


def codes(found, seconds=60.0, **changes):
    return [f.code for f in found.warnings(settings(**changes), "environment/__init__.py", seconds)]


def test_a_good_job_has_a_signal_and_its_first_step_bears_the_prediction_out(engine):
    found = look(engine, rollouts=128)
    assert (found.rollouts, found.groups, len(found.messages)) == (128, 16, 16)
    assert codes(found) == []
    practice = Practice(FAMILY)
    spec = settings(max_steps=2)
    deadline = engine.clock() + 60
    trained = train_job(engine, spec, practice.load(), practice, FAMILY, 3, deadline)
    # 128 rollouts of each: a share near a half is known to within 0.18 (4 standard deviations of
    # the difference, groups taken for independent ones of twice the size).
    assert found.reward == pytest.approx(sum(r["reward"] for r in trained.curve) / 2, abs=0.18)


def test_equal_rewards_are_no_signal(engine):
    right = look(engine, lambda item, reply: 1.0)
    assert right.alike == right.groups == 8 and codes(right) == ["W-SIGNAL"]
    wrong = look(engine, lambda item, reply: float(reply == "no such answer"))
    assert wrong.all_wrong == 8 and codes(wrong) == ["W-SIGNAL"]
    # By task, so that groups are all right or all wrong, never mixed.
    by_task = look(engine, lambda item, reply: float(item.answer < "M"))
    assert by_task.all_right + by_task.all_wrong == by_task.alike == 8
    assert 0 < by_task.all_right < 8


def test_noise_is_a_signal_as_far_as_this_can_tell(engine):
    rng = random.Random(0)
    assert codes(look(engine, lambda item, reply: rng.random())) == []


def test_conversations_that_are_too_long_and_time_that_does_not_suffice(engine):
    found = look(engine, seq_len=32, max_tokens=32)
    assert found.longest > 32 and "W-SEQ" in codes(found, seq_len=32, max_tokens=32)
    needed = found.seconds_of(8 * 64)
    assert "W-TIME" in codes(found, needed / 2) and "W-TIME" not in codes(found, needed * 2)
    assert found.seconds_of(1000) == pytest.approx(2 * found.seconds_of(500))


def test_an_environment_that_fails_is_said_to(engine):
    with pytest.raises(EnvError, match="every reward failed: it raised"):
        look(engine, lambda item, reply: None)
