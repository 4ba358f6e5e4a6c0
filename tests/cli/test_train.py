"""A whole small run through the command line: both loops for real, killed and gone on with."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metatrainer.config import load_config
from metatrainer.ledger import JobRow, Ledger, TurnRow
from metatrainer.rundir import create

NANO = str(Path(__file__).parents[2] / "configs" / "nano.toml")
EPISODES = 2 * 2 * 4 + 2 * 2
SMALL = [
    "outer.steps=2",
    "outer.groups=2",
    "outer.group_size=4",
    "outer.heldout_episodes=2",
    "evaluation.items=16",
]


class Training:
    """A `metatrainer train` under way in a folder."""

    def __init__(self, folder: Path, *arguments: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "metatrainer", "train", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell that starts the tests in the background has them ignore ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.seen: list[str] = []

    def wait_for(self, start: str) -> None:
        """Read its output up to a line that starts so."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.seen.append(line)
            if line.startswith(start):
                return
        pytest.fail(f"ended without {start!r}:\n{''.join(self.seen)}")

    def end(self) -> tuple[int, str]:
        """Exit code and all that it printed."""
        rest, _ = self.process.communicate(timeout=240)
        return self.process.returncode, "".join([*self.seen, rest])


@pytest.fixture
def training(tmp_path: Path) -> Iterator[list[Training]]:
    """Trainings that a test starts; none outlives it."""
    started: list[Training] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.communicate()


def begin(folder: Path, *settings: str) -> Training:
    sets = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    return Training(folder, NANO, "--run-dir", "runs/r", *sets)


def record(folder: Path) -> tuple[dict[tuple[str, int], TurnRow], dict[str, JobRow]]:
    """Everything that was sampled, and every job that is done."""
    with Ledger(folder / "runs" / "r" / "ledger.sqlite", readonly=True) as ledger:
        turns = [turn for e in ledger.episodes() for turn in ledger.turns(e.id)]
        jobs = {job.id: job for job in ledger.jobs() if job.done}
    return {(turn.episode, turn.turn): turn for turn in turns}, jobs


def test_a_killed_run_is_brought_to_its_end_with_nothing_done_twice(
    tmp_path: Path, training: list[Training]
) -> None:
    training.append(begin(tmp_path))
    training[0].wait_for("step   0")
    training[0].process.send_signal(signal.SIGKILL)
    training[0].end()
    turns, jobs = record(tmp_path)
    assert turns

    training.append(Training(tmp_path, "--resume", "r"))
    code, output = training[1].end()
    assert code == 0, output
    after_turns, after_jobs = record(tmp_path)
    assert turns.items() <= after_turns.items(), "what was sampled stays as it was sampled"
    assert jobs.items() <= after_jobs.items(), "a job that was done is not run again"
    assert len(after_turns) > len(turns)

    folder = tmp_path / "runs" / "r"
    report = json.loads((folder / "report.json").read_text())
    assert (report["steps"], report["episodes"]) == (2, EPISODES)
    assert len(report["reward"]["per_step"]) == 2 and report["heldout"]["triage"]["n"] == 2
    assert report["jobs"]["submitted"] == len(after_jobs) > 0
    assert all((folder / name).exists() for name in ("figure.png", "figure.svg", "report.md"))
    assert "reward" in output and "step   1" in output


def test_ctrl_c_ends_in_order_and_says_how_to_go_on(
    tmp_path: Path, training: list[Training]
) -> None:
    training.append(begin(tmp_path))
    training[0].wait_for("held-out before")
    training[0].process.send_signal(signal.SIGINT)
    code, output = training[0].end()
    assert code == 130
    assert "train --resume runs/r" in output and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills_change_nothing(tmp_path: Path, training: list[Training]) -> None:
    """Real agent, sandbox, jobs and workers, against a run that is left alone."""
    rng = random.Random(0)

    def prepare(name: str) -> Path:
        """A run that is to be gone on with from its very beginning, with hidden items as given."""
        tables = ["reward.speed=0", "limits.max_seconds=60", "pool.workers=1", "pool.packed=1"]
        run = create(load_config(Path(NANO), [*SMALL, *tables]), tmp_path / "runs" / name)
        with Ledger(run.ledger) as ledger:
            config = run.settings.model_dump_json()
            ledger.create_run(name, "nano", config, 0, {}, hidden_seed=3)
        return run.path

    def go_on(run: Path, rows: int | None) -> bool:
        """Whether the run came to its end, before it was killed.

        rows: of its record that come into being before the kill, and then up to half a second.
        """
        training.append(Training(tmp_path, "--resume", run.name))
        process = training[-1].process
        if rows is not None:
            target = recorded(run) + rows
            while process.poll() is None and recorded(run) < target:
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 0.5))
            process.send_signal(signal.SIGKILL)
        code, output = training[-1].end()
        assert code in (0, -signal.SIGKILL), output
        return code == 0

    straight = prepare("straight")
    assert go_on(straight, None)
    kills = runs = 0
    while kills < 30:
        run = prepare(f"killed-{runs}")
        runs += 1
        while not go_on(run, rng.randint(1, 20)):
            kills += 1
        assert whole(run) == whole(straight)


def recorded(run: Path) -> int:
    """Samples, verdicts, jobs begun and ended, episodes and steps so far."""
    with Ledger(run / "ledger.sqlite", readonly=True) as ledger:
        ((count,),) = ledger.query(
            "SELECT (SELECT count(*) FROM turn) + (SELECT count(*) FROM attempt)"
            " + (SELECT count(*) + sum(done) FROM job) + (SELECT sum(done) FROM episode)"
            " + (SELECT count(*) FROM step)"
        )
        return count or 0


def whole(run: Path) -> dict[str, Any]:
    """All of a run that does not depend on time; of jobs, how the last attempt ended."""
    with Ledger(run / "ledger.sqlite", readonly=True) as ledger:
        assert ledger.open_jobs() == []
        ids = [row.id for row in ledger.episodes()]
        return {
            "episodes": [(e.id, e.total, e.outcome, e.post, e.student) for e in ledger.episodes()],
            "messages": {id: [m.content for m in ledger.messages(id)] for id in ids},
            "turns": {id: [t.tokens for t in ledger.turns(id)] for id in ids},
            "attempts": {id: [(a.ok, a.files) for a in ledger.attempts(id)] for id in ids},
            "jobs": {job.id: job.outcome for job in ledger.jobs()},
            "evals": sorted((e.scope, e.student, e.family, e.mean) for e in ledger.evals()),
            "steps": [(step.n, step.mean_reward) for step in ledger.steps()],
        }
