"""A report as text: what a person must find in it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from metatrainer.ledger import Ledger
from metatrainer.report.summary import Summary, summarise
from metatrainer.report.text import duration, markdown, print_report, sparkline


def summary_of(folder: Path) -> Summary:
    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        return summarise(ledger)


def printed(summary: Summary) -> str:
    out = io.StringIO()
    print_report(summary, Console(file=out, width=80))
    return out.getvalue()


def test_the_table_shows_reward_terms_and_heldout_apart(make_run) -> None:
    summary = summary_of(make_run(steps=6, planned=6))
    text = printed(summary)
    for word in ("reward", "validation", "quality", "speed", "triage", "wren", "finch"):
        assert word in text
    assert f"{summary.reward.first:.3f}" in text and f"{summary.reward.last:.3f}" in text
    held = summary.heldout["triage"]
    assert held.before and f"{held.before.mean:.3f} [{held.before.low:.3f}" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_an_unfinished_run_says_how_far_it_is(make_run) -> None:
    assert "2 of 9 steps" in printed(summary_of(make_run(steps=2, planned=9)))
    assert "0 of 9 steps" in printed(summary_of(make_run("b", steps=0, planned=9, heldout=0)))


def test_markdown_tables_are_whole_and_the_figure_is_shown(make_run) -> None:
    page = markdown(summary_of(make_run(steps=4, planned=4)), figure="figure.png")
    assert page.startswith("# nano-synthetic\n") and "](figure.png)" in page
    blocks = [b.splitlines() for b in page.split("\n\n") if b.startswith("|")]
    assert len(blocks) == 6
    for block in blocks:
        assert len({line.count("|") for line in block}) == 1
    assert "](" not in markdown(summary_of(make_run("b", steps=1, planned=1)))


def test_costs_are_shown_where_there_are_any(make_run, tmp_path: Path) -> None:
    assert "Cost" not in printed(summary_of(make_run(steps=2, planned=2)))
    paid = tmp_path / "nano-paid"
    with Ledger(paid / "ledger.sqlite") as ledger:
        config = {"money": {"usd_per_slot_hour": 2.0, "usd_per_million_sampled_tokens": 1e4}}
        ledger.create_run("nano-paid", "nano", json.dumps(config), 0, {})
        ledger.add_task("p", "persona", "train", "{}")
        ledger.open_episode("e", "train", 0, 0, 0, "p")
        ledger.record_turn("e", 0, "{}", 10, [1] * 50, [0.0] * 50, 1.0)
        for attempt, outcome in enumerate(("lost", "ok"), start=1):
            ledger.start_job("j", "e", attempt, "wren", "{}")
            ledger.finish_job("j", attempt, outcome, "", "{}", 1.0, 1.5)
    summary = summary_of(paid)
    assert summary.as_json()["usd"]["total"] == 3.5
    text = printed(summary)
    for words in ("of them lost attempts", "1.50", "3.00", "0.5000", "3.50"):
        assert words in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(7.6, "8 s"), (59.9, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_read_like_speech(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) in ("▁▄█", "▁▅█")
    assert len(set(sparkline([0.3, 0.3]))) == 1
    assert sparkline([]) == ""
