from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from lab import HIDDEN_SEED, ID, SETTINGS, Lab, files_of

from metatrainer.agent import policies
from metatrainer.agent.task import draw_task
from metatrainer.episode import EpisodeId


def play_many(lab: Lab, make: policies.ScriptMaker, n: int) -> list[str]:
    """Outcomes of n episodes with different seeds."""
    outcomes = []
    for seed in range(n):
        lab.id = EpisodeId("play", 0, 0, seed)
        outcomes.append(lab.follow(make(lab.task, random.Random(seed))).outcome)
    return outcomes


def test_random_jobs_are_valid_and_differ(lab: Lab) -> None:
    for seed, family in enumerate(2 * (*SETTINGS.families, *SETTINGS.heldout)):
        lab.id = EpisodeId("play", 0, 0, seed)
        lab.task = draw_task(SETTINGS, family, seed, HIDDEN_SEED)
        assert lab.follow(policies.random_choices(lab.task, random.Random(seed))).outcome == "ok"
    assert len({row.spec for row in lab.ledger.jobs()}) == 12


@pytest.mark.parametrize("mistake", sorted(policies.MISTAKES))
def test_every_mistake_is_answered_and_never_trains(lab: Lab, mistake: str) -> None:
    terms = lab.follow(policies.MISTAKES[mistake](lab.task))
    assert terms.outcome in ("rejected", "no_submission")
    assert terms.total <= 0
    assert lab.pool.orders == []
    rows = [json.loads(row.content) for row in lab.ledger.messages(str(ID))]
    told = [row["content"] for row in rows[1:] if row["role"] != "assistant"]
    assert told
    assert all(len(text) < 400 for text in told)


def test_a_skilled_agent_writes_the_reference_job(lab: Lab) -> None:
    assert lab.follow(policies.noisy(lab.task, random.Random(0), skill=1.0)).validation == 1.0
    (order,) = lab.pool.orders
    reference = files_of(order)
    lab.id = EpisodeId("play", 0, 0, 1)
    lab.follow(policies.reference(lab.task, random.Random(0)))
    assert files_of(lab.pool.orders[1]) == reference


def test_jobs_of_known_quality(lab: Lab) -> None:
    """The poor one is valid, the leaking one is refused for that reason each time."""
    lab.follow(policies.poor(lab.task, random.Random(0)))
    (order,) = lab.pool.orders
    assert "max_steps = 5" in files_of(order)["job.toml"]
    lab.id = EpisodeId("play", 0, 0, 1)
    assert lab.follow(policies.leaking(lab.task, random.Random(0))).outcome == "cheating"
    assert len(lab.pool.orders) == 1
    assert "E-LEAK" in lab.answers()[-1]


def test_less_skill_means_less_reward_and_more_variety(lab: Lab) -> None:
    shares = {}
    for skill in (0.2, 0.9):
        outcomes = play_many(lab, lambda task, rng, s=skill: policies.noisy(task, rng, s), 30)
        shares[skill] = Counter(outcomes)["ok"] / len(outcomes)
        lab.ledger.close()
        lab = Lab(lab.folder / str(skill), lab.validator)
    # 30 episodes each: the standard error of either share is under 0.1.
    assert 0.1 < shares[0.2] < shares[0.9] - 0.2


def test_the_same_seed_gives_the_same_conversation(lab: Lab) -> None:
    def conversation(index: int) -> list[str]:
        lab.id = EpisodeId("play", 0, 0, index)
        lab.follow(policies.noisy(lab.task, random.Random(5), 0.3))
        return [row.content for row in lab.ledger.messages(str(lab.id))]

    assert conversation(0) == conversation(1)
    assert all("\n" not in text for text in conversation(0))


def test_a_script_that_is_over_keeps_answering(lab: Lab) -> None:
    def script() -> policies.Script:
        yield policies.call("list_files")

    assert lab.follow(script()).outcome == "no_submission"
    agent = [row for row in lab.ledger.messages(str(ID)) if row.role == "assistant"]
    assert len(agent) == SETTINGS.agent.max_turns
