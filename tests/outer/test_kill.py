"""A run of two steps under kill -9 at many points: it ends as if nothing had been."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_run
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from metatrainer import money
from metatrainer.ledger import Ledger
from metatrainer.outer import checkpoints

KILLS = 36
POINTS = 524
"""Of an undisturbed run; a few more or less, as samples meet in one write or in two."""


class Starter:
    """Starts the run's processes, one after another."""

    def __init__(self, model: Path):
        self._process = subprocess.Popen(
            [sys.executable, kill_run.__file__, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, run_dir: Path, die_at: int | None) -> bool:
        """Begin a run or go on with it. Whether it came to its end, before it was killed."""
        assert self._process.stdin and self._process.stdout
        resume = run_dir.exists()
        run_dir.mkdir(exist_ok=True)
        wanted = {"run_dir": str(run_dir), "resume": resume, "die_at": die_at}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        assert code in (0, -signal.SIGKILL), "its error is in this test's stderr"
        return code == 0

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def starter(model: Path) -> Iterator[Starter]:
    made = Starter(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def straight(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("kill") / "run"
    assert starter.play(run_dir, None)
    return run_dir


def totals(run_dir: Path) -> dict[str, Any]:
    """All of a run that does not depend on time, and what it cost but for lost attempts."""
    with Ledger(run_dir / "ledger.sqlite", readonly=True) as ledger:
        settings = kill_run.settings_for(Path("model"))
        spent = money.spending(ledger, settings.money)
        ids = [row.id for row in ledger.episodes()]
        return {
            "episodes": {
                e.id: (e.done, e.validation, e.quality, e.total, e.outcome, e.post, e.student)
                for e in ledger.episodes()
            },
            "messages": {id: [(m.n, m.content) for m in ledger.messages(id)] for id in ids},
            "turns": {
                id: [(t.turn, t.prompt_tokens, t.tokens) for t in ledger.turns(id)] for id in ids
            },
            "attempts": {id: [(a.n, a.ok, a.files) for a in ledger.attempts(id)] for id in ids},
            "jobs": {j.id: (j.episode, j.student, j.outcome, j.usd) for j in ledger.jobs()},
            "evals": [(e.scope, e.student, e.family, e.mean) for e in ledger.evals()],
            "steps": [(s.n, s.mean_reward) for s in ledger.steps()],
            "usd": round(spent.jobs - spent.lost, 6),
        }


def lost(run_dir: Path) -> int:
    """Attempts at jobs that ended with their controller."""
    with Ledger(run_dir / "ledger.sqlite", readonly=True) as ledger:
        attempts = [ledger.job(j.id, n) for j in ledger.jobs() for n in range(1, j.attempt)]
    assert all(row and row.outcome == "lost" for row in attempts)
    return len(attempts)


def trained(run_dir: Path) -> dict[str, Any]:
    """The last checkpoint: weights, both moments of Adam, and the number of its steps."""
    record = checkpoints.last(run_dir / "logs", "state_path")
    assert record and record["batch"] == 2
    path = run_dir / "checkpoints" / record["state_path"].removeprefix("tinker://")
    file = path / "state" / "adapter_state.safetensors"
    with safe_open(file, "pt") as opened:
        return {**load_file(file), "steps": opened.metadata()["steps"]}


def check(run_dir: Path, straight: Path, kills: int) -> None:
    found, expected = totals(run_dir), totals(straight)
    for what, value in expected.items():
        assert found[what] == value, what
    assert lost(run_dir) <= kills, "an attempt is only lost by a kill"
    ours, theirs = trained(run_dir), trained(straight)
    assert ours.pop("steps") == theirs.pop("steps") == "2"
    for name, tensor in theirs.items():
        # The same tokens, sampled in batches of other sizes, have log-probabilities that differ by
        # rounding (fp32), and so have gradients: by up to 1.4e-5 of the largest entry in 36 kills.
        assert (ours[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


def test_the_undisturbed_run_is_worth_killing(straight: Path) -> None:
    """It holds all that could be counted twice, and an update that depends on Adam's state."""
    found = totals(straight)
    assert len(found["episodes"]) == 2 * 2 * 3 + 2 * 2 and len(found["steps"]) == 2
    outcomes = [episode[4] for episode in found["episodes"].values()]
    assert outcomes.count("ok") == len(found["jobs"]) >= 10
    assert any(not ok for attempts in found["attempts"].values() for _, ok, _ in attempts)
    assert found["usd"] == kill_run.SECONDS * len(found["jobs"])
    state = trained(straight)
    # Without what the first step left in it, the first moment would be (1 - beta1) of a gradient.
    first = straight / "checkpoints" / "run-0000" / "weights" / "000001" / "state"
    before = load_file(first / "adapter_state.safetensors")
    assert (0.9 * before["moment1"]).abs().max() > 0.1 * state["moment1"].abs().max()


def test_killed_again_and_again_it_ends_the_same(
    starter: Starter, straight: Path, tmp_path: Path
) -> None:
    """At points drawn at random, while it goes on and while it recovers."""
    rng = random.Random(0)
    kills = runs = 0
    while kills < KILLS:
        run_dir = tmp_path / f"run-{runs}"
        runs += 1
        here = 0
        while not starter.play(run_dir, rng.randint(1, 400)):
            here += 1
        kills += here
        check(run_dir, straight, here)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_killed_once_at_every_point_it_ends_the_same(
    starter: Starter, straight: Path, tmp_path: Path, part: int
) -> None:
    for point in range(1 + part, POINTS, 8):
        run_dir = tmp_path / f"at-{point}"
        if starter.play(run_dir, point):
            continue
        assert starter.play(run_dir, None)
        check(run_dir, straight, 1)
