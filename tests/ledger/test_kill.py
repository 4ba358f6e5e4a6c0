"""The ledger under kill -9: what was acknowledged is there, and nothing is there by half."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from metatrainer.ledger import Ledger

_WRITER = """
import sys
from pathlib import Path
from metatrainer.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]))
ledger.create_run("r", "nano", "{}", 0, {})
ledger.add_task("t", "persona", "train", "{}")
print("ready", flush=True)
for i in range(int(sys.argv[2]), 1_000_000):
    e, j = f"e{i}", f"j{i}"
    ledger.open_episode(e, "train", i, 0, 0, "t")
    ledger.record_turn(e, 0, "{}", 3, [i, i + 1], [-0.5, -0.25], 0.1)
    ledger.start_job(j, e, 1, "wren", "{}")
    with ledger.transaction():
        ledger.finish_job(j, 1, "ok", "", "{}", 1.0)
        ledger.record_eval(j, "wren", "persona", 128, 0.5, 0.4, 0.6, 1.0)
        ledger.finish_episode(e, 1.0, 0.1, 0.5, 0.4, "ok", 0.5, 0.3, "wren", 1.0)
    print(i, flush=True)
"""


def _write_and_kill(path: Path, start: int, seconds: float) -> int:
    """Run a writer, kill it that long after it began to write; the last episode it confirmed."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), str(start)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout
    assert writer.stdout.readline() == "ready\n"
    time.sleep(seconds)
    writer.kill()
    confirmed = writer.stdout.read().split("\n")[:-1]
    writer.wait()
    return int(confirmed[-1]) if confirmed else start - 1


def test_a_killed_writer_leaves_a_whole_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    rng = random.Random(1)
    confirmed = -1
    for _ in range(8):
        confirmed = _write_and_kill(path, confirmed + 1, rng.uniform(0.0, 0.15))
        with Ledger(path) as ledger:
            done = {e.id for e in ledger.episodes() if e.done}
            jobs = {j.episode for j in ledger.jobs() if j.done}
            scored = {"e" + e.scope[1:] for e in ledger.evals()}
            assert {f"e{i}" for i in range(confirmed + 1)} <= done
            assert done == jobs == scored, "a result and its change of state are one"
            for row in ledger.open_jobs():
                assert ledger.finish_job(row.id, row.attempt, "lost", "killed", "{}", 0.0)
                ledger.record_eval(row.id, "wren", "persona", 128, 0.5, 0.4, 0.6, 1.0)
                ledger.finish_episode(row.episode, 1, 0, 0, 0.35, "lost", None, None, None, 0.0)
    assert confirmed > 0, "no writer got anywhere: the test proves nothing"
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_run_can_be_read_while_another_process_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout
        while writer.stdout.readline() != "3\n":
            assert writer.poll() is None
        with Ledger(path, readonly=True) as view:
            assert {"e0", "e1", "e2", "e3"} <= {e.id for e in view.episodes() if e.done}
            assert view.turns("e3")[0].tokens == [3, 4]
    finally:
        writer.kill()
        writer.communicate()
