from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab as laboratory
import pytest
from lab import WRITE, Lab

from metatrainer import money
from metatrainer.agent.policies import call
from metatrainer.agent.validator import Validator
from metatrainer.config import AgentSettings, MoneySettings, PoolSettings, RunSettings
from metatrainer.errors import BudgetError, ConfigError
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, longest_seconds


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create_run("run", "nano", "{}", 0, {})
        ledger.add_task("t", "persona", "train", "{}")
        for phase, step in (("train", 0), ("train", 1), ("heldout_before", 0)):
            ledger.open_episode(f"{phase}-{step}", phase, step, 0, 0, "t")
        yield ledger


def settings_of(**given: Any) -> RunSettings:
    return RunSettings(pool=PoolSettings(workers=2, packed=2), money=MoneySettings(**given))


def run_job(ledger: Ledger, episode: str, attempt: int, outcome: str, usd: float) -> None:
    ledger.start_job(f"job-{episode}", episode, attempt, "wren", "{}")
    ledger.finish_job(f"job-{episode}", attempt, outcome, "", "{}", 1.0, usd)


def test_a_run_is_added_up_from_jobs_lost_attempts_tokens_and_baselines(ledger: Ledger) -> None:
    run_job(ledger, "train-0", 1, "lost", 0.25)
    run_job(ledger, "train-0", 2, "ok", 0.5)
    run_job(ledger, "train-1", 1, "crashed", 0.125)
    run_job(ledger, "heldout_before-0", 1, "ok", 2.0)
    ledger.start_job("open", "train-1", 1, "wren", "{}")
    ledger.record_eval("baseline", "wren", "persona", 8, 0.5, 0.4, 0.6, 1800.0)
    ledger.record_eval("job-train-0", "wren", "persona", 8, 0.5, 0.4, 0.6, 1800.0)  # in the job
    for turn, prompt in enumerate((100, 300)):
        ledger.record_turn("train-1", turn, "{}", prompt, [1] * 50, [0.0] * 50, 1.0)
    ledger.record_turn("heldout_before-0", 0, "{}", 1000, [1] * 10, [0.0] * 10, 1.0)
    prices = MoneySettings(
        usd_per_slot_hour=4.0,
        usd_per_million_prompt_tokens=1e4,
        usd_per_million_sampled_tokens=1e5,
        usd_per_million_trained_tokens=1e6,
    )
    spent = money.spending(ledger, prices)
    assert (spent.jobs, spent.lost, spent.jobs_paid) == (2.875, 0.25, 3)
    assert spent.per_job == pytest.approx(2.875 / 3)
    assert spent.baselines == pytest.approx(2.0)
    # Prompts of 400 and samples of 100; trained on the 350 of the last turn. Held out: no training.
    step_1, heldout = 4.0 + 10.0 + 350.0, 10.0 + 1.0
    assert spent.tokens == pytest.approx(step_1 + heldout)
    assert spent.per_step == {0: 0.75, 1: pytest.approx(0.125 + step_1)}
    assert spent.total == pytest.approx(2.875 + 2.0 + step_1 + heldout)


def test_what_is_under_way_counts_at_the_most_it_can_cost(ledger: Ledger) -> None:
    settings = settings_of(usd_per_slot_hour=3600.0, max_usd=1000.0)
    most = longest_seconds(settings)  # at a dollar a second
    assert most == 2 * 30 + 120
    money.admit_job(ledger, settings)
    for n in range(4):
        ledger.start_job(f"open-{n}", "train-0", 1, "wren", "{}")
    money.admit_job(ledger, settings)  # five of 180 are 900
    ledger.start_job("open-4", "train-0", 1, "wren", "{}")
    with pytest.raises(BudgetError, match=r"max_usd is 1000.00: 0.00 is spent.*900.00.*180.00"):
        money.admit_job(ledger, settings)
    money.admit_episode(ledger, settings)
    for n in range(5):
        ledger.finish_job(f"open-{n}", 1, "ok", "", "{}", 1.0, 200.0)
    with pytest.raises(BudgetError, match=r"1000\.00 is spent"):
        money.admit_episode(ledger, settings)


def test_caps_that_cannot_be_kept_are_refused_before_anything_begins() -> None:
    money.check(settings_of(usd_per_slot_hour=2.0, max_usd_per_hour=8.0))
    with pytest.raises(ConfigError, match=r"4 slots cost 8\.4 an hour"):
        money.check(settings_of(usd_per_slot_hour=2.1, max_usd_per_hour=8.0))
    hosted = settings_of(max_usd=1.0).model_copy(update={"agent": AgentSettings(backend="tinker")})
    with pytest.raises(ConfigError, match="usd_per_million_prompt_tokens is not set"):
        money.check(hosted)


def test_the_command_line_refuses_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[pool]\nworkers = 100\n[money]\nusd_per_slot_hour = 1\nmax_usd_per_hour = 40\n"
    )
    command = [sys.executable, "-m", "metatrainer", "train", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "400 slots cost 400 an hour" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.toml"]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """An episode whose jobs cost a dollar a second, at most 151 dollars each."""
    costly = MoneySettings(usd_per_slot_hour=3600.0, max_usd=200.0)
    settings = RunSettings(money=costly, pool=PoolSettings(workers=1, packed=1))
    monkeypatch.setattr(laboratory, "SETTINGS", settings)
    lab = Lab(tmp_path, Validator(1))
    yield lab
    lab.ledger.close()


def test_a_job_that_the_cap_does_not_allow_is_not_begun(lab: Lab) -> None:
    lab.ledger.add_task("t", "persona", "train", "{}")
    lab.ledger.open_episode("other", "train", 0, 0, 0, "t")
    run_job(lab.ledger, "other", 1, "ok", 60.0)
    with pytest.raises(BudgetError):
        lab.play(WRITE, call("submit_job"))
    assert lab.pool.orders == []
    assert [row.id for row in lab.ledger.jobs()] == ["job-other"]
    assert not list(lab.folder.glob("jobs/*"))


def test_an_attempt_that_went_with_its_controller_is_charged(lab: Lab) -> None:
    def die(order: JobOrder) -> None:
        jobdir.claim(order)
        raise KeyboardInterrupt

    lab.pool.on_run = die
    with pytest.raises(KeyboardInterrupt):
        lab.play(WRITE, call("submit_job"))
    (order,) = lab.pool.orders
    time.sleep(0.05)
    lab.ledger.add_task("late", "persona", "train", "{}")  # the last that is heard of it
    lab.ledger.close()
    ran = time.time() - os.stat(order.job_dir / "attempt-1").st_ctime
    time.sleep(0.2)  # a pause is not paid
    lab.ledger = Ledger(lab.folder / "ledger.sqlite")
    lab.pool.on_run = lambda order: None
    lab.play(WRITE, call("submit_job"))
    lost = lab.ledger.job(order.job_id, 1)
    assert lost and lost.outcome == "lost" and lost.usd and lost.seconds
    assert 0.05 <= lost.seconds <= ran
    assert lost.usd == pytest.approx(lost.seconds)
