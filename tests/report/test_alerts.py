"""Alerts name what goes wrong in a step, and nothing where nothing does."""

from __future__ import annotations

from pathlib import Path

from metatrainer.ledger import Ledger
from metatrainer.report.alerts import (
    Played,
    alerts_after,
    alerts_of_run,
    alerts_of_step,
    dead_groups,
)


def _played(
    rewards: list[float], outcome: str = "ok", submission: str | None = None
) -> list[Played]:
    return [
        Played(i // 4, reward, "ok", submission or f"digest-{i}")
        for i, reward in enumerate(rewards)
    ]


def _kinds(episodes: list[Played]) -> list[str]:
    return [alert.kind for alert in alerts_of_step(3, episodes)]


def test_a_healthy_step_raises_none() -> None:
    assert _kinds(_played([0.1 * i for i in range(16)])) == []


def test_equal_rewards_everywhere_are_a_collapse() -> None:
    assert _kinds(_played([-0.1] * 16)) == ["collapsed"]


def test_more_than_half_of_the_groups_dead() -> None:
    rewards = [0.1] * 4 + [0.2] * 4 + [0.3] * 4 + [0.1, 0.2, 0.3, 0.4]
    assert dead_groups(_played(rewards)) == 0.75
    assert _kinds(_played(rewards)) == ["dead groups"]
    assert _kinds(_played([*rewards[4:], 0.5, 0.6, 0.7, 0.8])) == []


def test_faults_of_the_run_are_told_from_failures_of_the_agent() -> None:
    episodes = _played([0.1 * i for i in range(16)])
    lost = [Played(e.group, e.total, "lost", e.submission) for e in episodes[:1]]
    rejected = [Played(e.group, e.total, "rejected", None) for e in episodes[:8]]
    assert _kinds(lost + episodes[1:]) == ["faults"]
    assert _kinds(rejected + episodes[8:]) == []


def test_the_same_submission_again_and_again() -> None:
    assert _kinds(_played([0.1 * i for i in range(16)], submission="same")) == ["no novelty"]


def test_an_agent_that_has_stopped_exploring(tmp_path: Path) -> None:
    """Entropy is that of all tokens of a step together, long turns weigh more."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create_run("r", "nano", "{}", 0, {})
        ledger.add_task("t", "persona", "train", "{}")
        for step, surprise in enumerate((0.5, 0.2, 0.05)):
            for index in range(8):
                id = f"train-{step:03d}-{index // 4:02d}-{index % 4:02d}"
                ledger.open_episode(id, "train", step, index // 4, index % 4, "t")
                ledger.record_turn(id, 0, "{}", 9, [1] * 30, [-surprise] * 30, 1.0)
                ledger.record_turn(id, 1, "{}", 9, [1] * 10, [0.0] * 10, 1.0)
                ledger.finish_episode(id, 0, 0, 0, index / 8, "ok", None, None, None, 1.0)
            ledger.finish_step(step, 0.0, "{}", 1.0)
        assert [(alert.step, alert.kind) for alert in alerts_of_run(ledger)] == [(2, "low entropy")]
        (alert,) = alerts_after(ledger, 2)
        assert "0.0375 nats, at first 0.3750" in alert.text


def test_a_few_episodes_say_nothing() -> None:
    assert _kinds(_played([0.0] * 4)) == []


def test_alerts_are_read_from_a_ledger(tmp_path: Path) -> None:
    """A step that collapsed, one with jobs of one submission, one still going on."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create_run("r", "nano", "{}", 0, {})
        ledger.add_task("t", "persona", "train", "{}")
        for step, same in ((0, True), (1, False), (2, True)):
            for index in range(16):
                id = f"train-{step:03d}-{index // 4:02d}-{index % 4:02d}"
                ledger.open_episode(id, "train", step, index // 4, index % 4, "t")
                ledger.start_job(f"{id}-0123abcd", id, 1, "wren", "{}")
                total = -0.1 if same else index / 16
                ledger.finish_episode(id, 0, 0, 0, total, "ok", None, None, None, 1.0)
            if step < 2:
                ledger.finish_step(step, 0.0, "{}", 1.0)
        kinds = [(alert.step, alert.kind) for alert in alerts_of_run(ledger)]
        assert kinds == [(0, "collapsed"), (1, "no novelty")]
        assert [alert.kind for alert in alerts_after(ledger, 2)] == ["collapsed"]
