"""Comparing agents: intervals against theory, pairs that are pairs, held-out families apart."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from metatrainer.play import Played
from metatrainer.report.leaderboard import HELDOUT, TRAINED, bootstrap, markdown, rank
from metatrainer.reward import Terms


def played(agent: str, family: str, index: int, total: float, student: str | None = "wren"):
    terms = Terms(1.0, total / 2, 0.0, total, "ok")
    return Played(agent, family, index, terms, attempts=1 + index % 2, student=student)


def test_the_interval_is_that_of_the_mean():
    """For many values the percentile bootstrap is 1.96 standard errors either way."""
    values = np.random.default_rng(0).exponential(size=400)
    found = bootstrap(list(values))
    error = 1.96 * values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - error, rel=0.02)
    assert found.high == pytest.approx(values.mean() + error, rel=0.02)
    assert bootstrap([0.5] * 4).low == bootstrap([0.5] * 4).high == 0.5


def test_pairing_sees_what_means_alone_do_not():
    """Tasks differ much, agents by 0.1 on each: the order of arrival must not matter either."""
    rng = random.Random(0)
    tasks = [rng.random() for _ in range(16)]
    episodes = [
        played(agent, "persona", i, task + extra)
        for agent, extra in (("b", 0.0), ("a", 0.1))
        for i, task in enumerate(tasks)
    ]
    rng.shuffle(episodes)
    board = rank(episodes, heldout=())
    first, second = board.rows
    assert (first.agent, second.agent) == ("a", "b")
    assert first.reward.low < second.reward.high, "apart the intervals overlap"
    (difference,) = board.differences
    assert (difference.first, difference.second) == ("a", "b")
    assert difference.reward.mean == pytest.approx(0.1)
    assert difference.reward.low == pytest.approx(0.1)
    assert difference.quality.mean == pytest.approx(0.05)


def test_episodes_that_do_not_match_are_no_pairs():
    with pytest.raises(AssertionError):
        rank([played("a", "persona", 0, 1.0), played("b", "persona", 1, 1.0)], heldout=())


def test_held_out_families_stand_apart_and_everything_is_shown():
    episodes = [
        played(agent, family, i, 0.25, student=None if i else "wren")
        for agent in ("x", "y")
        for family in ("persona", "triage")
        for i in range(2)
    ]
    board = rank(episodes, heldout=("triage",))
    assert [(r.part, r.reward.n) for r in board.rows] == [(TRAINED, 2)] * 2 + [(HELDOUT, 2)] * 2
    assert board.rows[0].students == {"wren": 1} and board.rows[0].attempts.mean == 1.5
    text = markdown(board)
    assert "| trained | x | 0.250 [0.250, 0.250] | 0.125 " in text and "wren 1" in text
    assert "| held out | x - y | 0.000 " in text
    assert json.loads(json.dumps(board.as_json()))["rows"][0]["reward"]["n"] == 2


def test_a_task_on_which_an_agent_failed_counts_for_nobody_and_is_shown():
    episodes = [played(agent, "persona", i, i / 4) for agent in "ab" for i in range(4)]
    episodes[0] = replace(episodes[0], terms=None, usd=0.5)
    episodes[1] = replace(episodes[1], usd=0.25)
    board = rank(episodes, heldout=())
    rows = {row.agent: row for row in board.rows}
    assert (rows["a"].failed, rows["b"].failed) == (1, 0)
    assert rows["a"].reward.n == rows["b"].reward.n == 3
    assert rows["b"].reward.mean == pytest.approx(0.5), "without the task that a failed on"
    assert (rows["a"].usd, rows["b"].usd) == (0.75, 0.0)
    assert "| 0.75 | 3 | 1 |" in markdown(board)
