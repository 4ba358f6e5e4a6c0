"""Controllers and workers killed at random moments: every job counts once and is paid once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_local import alive, descendants

from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir

PRICE = 3600.0
"""Dollars a slot-hour: a dollar a second."""
EPISODES = 8
CONTROLLER = Path(__file__).with_name("kill_controller.py")


def play_on(folder: Path, rng: random.Random, *, kill: bool) -> bool:
    """Let a controller go on with the run, and kill it or a worker. True: it came to the end."""
    command = [sys.executable, str(CONTROLLER), str(folder), str(EPISODES), str(PRICE)]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert controller.stdout
    started = controller.stdout.readline()  # the pool is up; what matters comes now
    assert started, controller.communicate()[1].decode()[-2000:]
    workers = descendants(controller.pid)
    if kill:
        time.sleep(rng.uniform(0.0, 0.6))
        victim = controller.pid if rng.random() < 0.7 else rng.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    _, errors = controller.communicate(timeout=60)
    assert controller.returncode in (0, -signal.SIGKILL), errors.decode()[-2000:]
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return controller.returncode == 0


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(0, 4), *(pytest.param(seed, 70, marks=pytest.mark.slow) for seed in (1, 2, 3))],
)
def test_kills_at_random_moments_lose_nothing_and_pay_nothing_twice(
    tmp_path: Path, seed: int, kills: int
) -> None:
    rng = random.Random(seed)
    done, runs = 0, 0
    while done < kills:
        folder = tmp_path / f"run-{runs}"
        runs += 1
        while done < kills and not play_on(folder, rng, kill=True):
            done += 1
        done += 1
        assert play_on(folder, rng, kill=False)
        check(folder)


def check(folder: Path) -> None:
    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        assert [row.done for row in ledger.episodes()] == [True] * EPISODES
        assert {row.outcome for row in ledger.episodes()} <= {"ok", "crashed"}
        assert ledger.open_jobs() == []
        assert len(ledger.jobs()) == EPISODES
        for last in ledger.jobs():
            attempts = [ledger.job(last.id, n) for n in range(1, last.attempt + 1)]
            assert [row.outcome for row in attempts if row] == ["lost"] * (last.attempt - 1) + [
                last.outcome
            ]
            job_dir = folder / "jobs" / last.id
            result = jobdir.read_result(job_dir, last.id)
            assert result and (result.outcome, result.attempt) == (last.outcome, last.attempt)
            # A worker that began an attempt left a line, unless it was killed before it could;
            # nobody began one twice.
            lines = job_dir / "runs"
            begun = len(lines.read_text().split()) if lines.exists() else 0
            assert begun <= len(list(job_dir.glob("attempt-*"))) <= last.attempt
            for row in attempts:
                assert row and row.usd == pytest.approx(row.seconds * PRICE / 3600)
            assert last.usd == pytest.approx(result.seconds * PRICE / 3600)
