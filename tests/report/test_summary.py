"""The numbers of a report, from ledgers whose content is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metatrainer.errors import LedgerError
from metatrainer.ledger import Ledger
from metatrainer.report.summary import Summary, estimate, summarise
from metatrainer.report.text import headline


def summary_of(folder: Path) -> Summary:
    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        return summarise(ledger)


def test_the_json_has_the_promised_keys_and_no_others(make_run) -> None:
    report = summary_of(make_run(steps=6, planned=6)).as_json()
    assert list(report) == [
        "run", "preset", "steps", "episodes", "errored", "seconds", "jobs", "reward", "quality",
        "validation", "heldout", "students_chosen", "usd", "learned",
    ]  # fmt: skip
    assert set(report["jobs"]) == {"submitted", "succeeded", "crashed", "utilisation"}
    for term in ("reward", "quality", "validation"):
        assert set(report[term]) == {"per_step", "first3", "last3"}
        assert len(report[term]["per_step"]) == 6
    assert set(report["heldout"]) == {"triage"}
    assert set(report["heldout"]["triage"]) == {"before", "after", "n"}
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_an_episode_whose_job_was_lost_is_in_no_mean(make_run) -> None:
    folder = make_run(steps=1, planned=1)
    before = summary_of(folder)
    with Ledger(folder / "ledger.sqlite") as ledger:
        for phase in ("train", "heldout_after"):
            ledger.open_episode(f"{phase}-lost", phase, 0, 0, 99, "triage")
            ledger.finish_episode(f"{phase}-lost", 1, 0, 0, 0.35, "lost", None, None, "w", 1.0)
    after = summary_of(folder)
    assert (before.errored, after.errored) == (0, 2)
    assert after.episodes == before.episodes + 2
    assert after.reward == before.reward
    assert after.heldout["triage"] == before.heldout["triage"]
    assert "(2 without a reward)" in headline(after)


def test_the_numbers_are_those_of_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    totals = [[0.0, 0.2], [0.2, 0.4], [0.4, 0.6], [0.6, 0.8]]
    with Ledger(path) as ledger:
        ledger.create_run("r", "nano", '{"outer": {"steps": 4}}', 0, {})
        ledger.add_task("p", "persona", "train", "{}")
        for step, values in enumerate(totals):
            for i, total in enumerate(values):
                episode = f"e{step}{i}"
                ledger.open_episode(episode, "train", step, 0, i, "p")
                ledger.start_job(f"j{step}{i}", episode, 1, "wren", "{}")
                outcome = "ok" if i else "timeout"
                ledger.finish_job(f"j{step}{i}", 1, outcome, "", "{}", 1.0)
                ledger.finish_episode(
                    episode, 1.0, total / 2, 0.0, total, outcome, None, None, "wren", 1.0
                )
            ledger.finish_step(step, sum(values) / 2, "{}", 1.0)
    report = summary_of(tmp_path).as_json()
    assert report["reward"] == {"per_step": [0.1, 0.3, 0.5, 0.7], "first3": 0.3, "last3": 0.5}
    assert report["quality"]["per_step"] == [0.05, 0.15, 0.25, 0.35]
    assert report["validation"]["last3"] == 1.0
    assert report["jobs"] == {"submitted": 8, "succeeded": 4, "crashed": 4, "utilisation": None}
    assert report["students_chosen"] == {"wren": 8}
    assert (report["steps"], report["episodes"], report["heldout"]) == (4, 8, {})


def test_heldout_episodes_never_enter_the_curve(make_run) -> None:
    report = summary_of(make_run(steps=3, planned=3, heldout=5)).as_json()
    assert report["episodes"] == 3 * 16 + 2 * 5
    assert report["heldout"]["triage"]["n"] == 5
    assert report["heldout"]["triage"]["before"] != report["heldout"]["triage"]["after"]


def test_an_unfinished_run_has_what_is_there(make_run) -> None:
    folder = make_run(steps=2, planned=9)
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.open_episode("under-way", "train", 2, 0, 0, "persona")
        ledger.start_job("running", "under-way", 1, "wren", "{}")
        ledger.open_episode("ahead", "train", 2, 0, 1, "persona")
        ledger.finish_episode("ahead", 1, 1, 1, 1, "ok", 1.0, 0.3, "wren", 1.0)
    summary = summary_of(folder)
    assert (summary.steps, summary.steps_planned) == (2, 9)
    assert len(summary.reward.per_step) == 2, "a step counts once it is finished"
    assert summary.reward.first == summary.reward.last
    assert summary.jobs.submitted == summary.jobs.succeeded + summary.jobs.crashed + 1
    held = summary.as_json()["heldout"]["triage"]
    assert held["before"] is not None and held["after"] is None


def test_before_the_first_step_there_are_no_means(make_run) -> None:
    report = summary_of(make_run(steps=0, planned=4, heldout=0)).as_json()
    assert report["reward"] == {"per_step": [], "first3": None, "last3": None}
    assert report["heldout"] == {}


def test_an_empty_ledger_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger, pytest.raises(LedgerError, match="no run"):
        summarise(ledger)


def test_an_interval_covers_the_mean_and_narrows_with_n() -> None:
    few, many = estimate([0.0, 1.0] * 2), estimate([0.0, 1.0] * 200)
    assert few and many
    assert few.mean == many.mean == 0.5
    assert few.low < many.low < 0.5 < many.high < few.high
    # 1.96 * sqrt(p (1 - p) / n) for n = 400, up to Bessel's correction of 0.1 %.
    assert many.high - 0.5 == pytest.approx(0.049, rel=0.01)
    alone = estimate([0.3])
    assert alone and (alone.low, alone.high) == (0.3, 0.3)
    assert estimate([]) is None


def test_utilisation_is_of_the_slots_while_a_step_has_jobs(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create_run("run", "nano", "{}", 0, {})
        ledger.add_task("p", "persona", "train", "{}")
        # Two slots: full for 2 of 4 s and half full for the rest; a pause; then one job alone.
        jobs = ((0, 0, 100.0, 4.0), (0, 1, 100.0, 2.0), (1, 0, 900.0, 2.0))
        for n, (step, slot, began, seconds) in enumerate(jobs):
            ledger.open_episode(f"e{n}", "train", step, 0, n, "p")
            ledger.start_job(f"j{n}", f"e{n}", 1, "wren", "{}")
            result = json.dumps({"slot": slot, "began": began})
            ledger.finish_job(f"j{n}", 1, "ok", "", result, seconds)
        assert summarise(ledger).jobs.utilisation == pytest.approx(8.0 / (2 * 4.0 + 2 * 2.0))
