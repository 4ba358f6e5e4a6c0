"""The reward's rules, with the original experiment's numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from metatrainer.reward import (
    RewardConfig,
    Terms,
    quality_term,
    speed_term,
    terms,
    validation_term,
)

SEED = RewardConfig()


def reward(config: RewardConfig = SEED, **changes: Any) -> Terms:
    """The terms of a good job at first try, but for `changes`."""
    case = {
        "parseable": True, "accepted_attempt": 1, "outcome": "ok", "post": 0.6, "best_pre": 0.4,
        "seconds": 15.0, "limit": 30.0,
    }  # fmt: skip
    return terms(config, **(case | changes))


def test_the_weights_are_the_original_ones() -> None:
    assert (SEED.validation, SEED.quality, SEED.speed) == (0.35, 0.60, 0.05)
    assert (SEED.uplift, SEED.absolute, SEED.no_submission) == (0.75, 0.25, -0.1)


def test_a_good_job_at_first_try() -> None:
    got = reward()
    assert (got.validation, got.speed) == (1.0, 0.5)
    assert got.quality == pytest.approx(0.25 * 0.6 + 0.75 * 0.2)
    assert got.total == pytest.approx(0.35 + 0.60 * 0.30 + 0.05 * 0.5)
    assert (got.outcome, got.post, got.best_pre) == ("ok", 0.6, 0.4)


@pytest.mark.parametrize(("attempt", "value"), [(1, 1.0), (2, 0.5), (3, 0.25), (None, 0.0)])
def test_validation_decays_with_each_further_attempt(attempt: int | None, value: float) -> None:
    assert validation_term(attempt, SEED) == value
    assert validation_term(attempt, RewardConfig(attempt_decay=1.0)) == float(attempt is not None)


def test_nothing_that_could_be_parsed_costs_a_tenth() -> None:
    assert reward(parseable=False, accepted_attempt=None, outcome="no_submission").total == -0.1


def test_submissions_that_were_all_refused_earn_nothing() -> None:
    got = reward(accepted_attempt=None, outcome="rejected", post=None)
    assert (got.validation, got.quality, got.speed, got.total) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("outcome", ["crashed", "timeout", "env_error", "diverged"])
def test_a_job_that_fails_keeps_only_its_validation(outcome: str) -> None:
    got = reward(outcome=outcome, post=None)
    assert (got.quality, got.speed) == (0.0, 0.0)
    assert got.total == pytest.approx(0.35)


def test_no_speed_is_paid_for_failing_quickly() -> None:
    assert reward(outcome="crashed", post=None, seconds=0.0).speed == 0.0
    assert reward(seconds=0.0).speed == 1.0


@pytest.mark.parametrize(("seconds", "value"), [(0, 1.0), (15, 0.5), (30, 0.0), (45, 0.0)])
def test_speed_is_the_share_of_time_left(seconds: float, value: float) -> None:
    assert speed_term(seconds, 30.0) == value


def test_cheating_earns_neither_quality_nor_validation() -> None:
    got = reward(cheated=True)
    assert (got.validation, got.quality, got.speed, got.total) == (0.0, 0.0, 0.0, 0.0)
    assert got.post == 0.6, "what it scored is still on record"


def test_harm_scores_below_a_crash_unless_a_floor_is_set() -> None:
    worse = {"post": 0.2, "best_pre": 0.4}
    assert quality_term(0.2, 0.4, SEED) == pytest.approx(-0.10)
    assert reward(**worse).total < reward(outcome="crashed", post=None).total
    floored = RewardConfig(quality_floor=0.0)
    assert reward(floored, **worse).quality == 0.0
    assert reward(floored, **worse).total >= reward(floored, outcome="crashed", post=None).total
    assert reward(floored).quality == reward().quality
