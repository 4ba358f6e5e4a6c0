"""The ledger on a real SQLite file: idempotent writes, guarded states, readers, exports."""

from __future__ import annotations

import csv
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metatrainer.errors import LedgerError
from metatrainer.ledger import SCHEMA_VERSION, Ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger(path) as ledger:
        ledger.create_run("r", "nano", "{}", 0, {"metatrainer": "0"})
        ledger.add_task("t", "persona", "train", "{}")
        yield ledger


def finish(ledger: Ledger, episode: str, total: float = 0.5, post: float | None = 0.4) -> bool:
    return ledger.finish_episode(episode, 1.0, 0.2, 0.1, total, "ok", post, 0.3, "wren", 2.0)


def open_episode(ledger: Ledger, episode: str, index: int = 0) -> bool:
    return ledger.open_episode(episode, "train", 0, 0, index, "t")


def test_what_is_written_is_read_back_by_another_connection(ledger: Ledger, path: Path) -> None:
    open_episode(ledger, "e")
    ledger.record_message("e", 0, "user", '"hello"')
    ledger.record_turn("e", 0, '{"a": 1}', 7, [5, 151643], [-0.1, -1e-12], 0.5)
    ledger.record_attempt("e", 1, True, "[]", '{"job.toml": ""}', 0.1)
    ledger.start_job("j", "e", 1, "wren", '{"max_steps": 20}')
    ledger.finish_job("j", 1, "ok", "", '{"curve": []}', 3.0)
    ledger.record_eval("j", "wren", "persona", 128, 0.4, 0.32, 0.48, 1.0)
    finish(ledger, "e")
    ledger.finish_step(0, 0.5, '{"kl": 0.1}', 9.0)

    with Ledger(path, readonly=True) as view:
        turn = view.turns("e")[0]
        assert (turn.tokens, turn.logprobs) == ([5, 151643], [-0.1, -1e-12])
        assert view.messages("e")[0].content == '"hello"'
        assert view.attempts("e")[0].ok is True
        job = view.job("j")
        assert job and job.outcome == "ok" and view.open_jobs() == []
        assert view.evals("j")[0].mean == 0.4 and view.evals("baseline") == []
        episode = view.finished_episode("e")
        assert episode and episode.total == 0.5 and episode.post == 0.4
        assert [s.n for s in view.steps()] == [0]


def test_writing_again_changes_nothing_and_says_so(ledger: Ledger) -> None:
    assert open_episode(ledger, "e") and not open_episode(ledger, "e")
    assert ledger.record_turn("e", 0, "{}", 1, [1], [-1.0], 0.1)
    assert not ledger.record_turn("e", 0, "{}", 1, [2], [-2.0], 0.1)
    assert ledger.turns("e")[0].tokens == [1]
    assert finish(ledger, "e", total=0.5) and not finish(ledger, "e", total=0.9)
    assert not open_episode(ledger, "e")
    episode = ledger.finished_episode("e")
    assert episode and episode.total == 0.5


def test_an_open_episode_is_not_finished(ledger: Ledger) -> None:
    open_episode(ledger, "e")
    assert ledger.finished_episode("e") is None
    episode = ledger.episode("e")
    assert episode and not episode.done and episode.total is None


def test_a_job_ends_once_and_only_after_it_started(ledger: Ledger) -> None:
    open_episode(ledger, "e")
    with pytest.raises(LedgerError, match="job j attempt 1"):
        ledger.finish_job("j", 1, "ok", "", "{}", 1.0)
    ledger.start_job("j", "e", 1, "wren", "{}")
    assert [j.id for j in ledger.open_jobs()] == ["j"]
    assert ledger.finish_job("j", 1, "lost", "worker died", "{}", 1.0)
    assert not ledger.finish_job("j", 1, "ok", "", "{}", 1.0)
    assert ledger.open_jobs() == []


def test_the_newest_attempt_speaks_for_the_job(ledger: Ledger) -> None:
    open_episode(ledger, "e")
    ledger.start_job("j", "e", 1, "wren", "{}")
    ledger.finish_job("j", 1, "lost", "", "{}", 1.0)
    ledger.start_job("j", "e", 2, "wren", "{}")
    assert [(j.attempt, j.done) for j in ledger.jobs()] == [(2, False)]
    assert [j.attempt for j in ledger.open_jobs()] == [2]
    ledger.finish_job("j", 2, "ok", "", "{}", 1.0)
    first, newest = ledger.job("j", 1), ledger.job("j")
    assert first and newest and (first.outcome, newest.outcome) == ("lost", "ok")


def test_a_transaction_is_all_or_nothing(ledger: Ledger) -> None:
    open_episode(ledger, "e")
    ledger.start_job("j", "e", 1, "wren", "{}")
    with pytest.raises(RuntimeError), ledger.transaction():
        ledger.finish_job("j", 1, "ok", "", "{}", 1.0)
        ledger.record_eval("j", "wren", "persona", 8, 0.5, 0.2, 0.8, 1.0)
        raise RuntimeError
    assert [j.id for j in ledger.open_jobs()] == ["j"]
    assert ledger.evals("j") == []


@pytest.mark.parametrize(
    "write",
    [
        lambda ledger: finish(ledger, "e", total=float("nan")),
        lambda ledger: finish(ledger, "e", post=-1.0),
        lambda ledger: finish(ledger, "nobody"),
        lambda ledger: ledger.record_message("nobody", 0, "user", '""'),
        lambda ledger: ledger.record_message("e", 0, "user", "not json"),
        lambda ledger: ledger.finish_step(0, 0.0, '{"kl": NaN}', 1.0),
        lambda ledger: ledger.create_run("another", "nano", "{}", 0, {}),
    ],
    ids=["nan", "sentinel", "no-episode", "no-parent", "not-json", "nan-in-json", "other-run"],
)
def test_what_cannot_be_true_is_refused(ledger: Ledger, write) -> None:
    open_episode(ledger, "e")
    with pytest.raises(LedgerError):
        write(ledger)
    assert ledger.finished_episode("e") is None
    assert ledger.messages("e") == [] and ledger.steps() == []


def test_the_hidden_seed_is_drawn_once(path: Path) -> None:
    def seed() -> int:
        with Ledger(path) as ledger:
            ledger.create_run("r", "nano", "{}", 0, {})
            run = ledger.run()
            assert run
            return run.hidden_seed

    first = seed()
    assert seed() == first
    with Ledger(path.with_name("other.sqlite")) as other:
        other.create_run("r", "nano", "{}", 0, {})
        run = other.run()
        # Two draws of 62 bits are equal once in 4e18.
        assert run and run.hidden_seed != first


def test_there_is_one_writer_and_readers_do_not_disturb_it(ledger: Ledger, path: Path) -> None:
    with pytest.raises(LedgerError, match="another process"):
        Ledger(path)
    with Ledger(path, readonly=True) as view, view.transaction():
        assert view.episodes() == []
        open_episode(ledger, "e")
        assert view.episodes() == [], "a reader's transaction sees one moment"
    with Ledger(path, readonly=True) as view:
        assert len(view.episodes()) == 1
        with pytest.raises(LedgerError, match="read only"):
            open_episode(view, "f", 1)


def test_a_closed_ledger_lets_the_next_writer_in(path: Path) -> None:
    Ledger(path).close()
    Ledger(path).close()


def test_threads_may_write_at_the_same_time(ledger: Ledger) -> None:
    def write(start: int) -> None:
        for i in range(start, start + 20):
            open_episode(ledger, f"e{i}", i)
            finish(ledger, f"e{i}")

    threads = [threading.Thread(target=write, args=(20 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.idx for e in ledger.episodes("train") if e.done] == list(range(80))
    assert ledger.episodes("heldout_before") == []


def test_time_between_sittings_does_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 107.0, 5000.0, 5001.0, 5001.0, 5003.0])
    monkeypatch.setattr("metatrainer.ledger.time.time", lambda: next(clock))
    with Ledger(path) as ledger:
        ledger.create_run("r", "nano", "{}", 0, {})
    with Ledger(path) as ledger:
        ledger.add_task("t", "persona", "train", "{}")
        ledger.add_task("u", "persona", "train", "{}")
        assert ledger.seconds() == 7.0 + 1.0


def test_a_missing_or_strange_file_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(path, readonly=True)
    path.write_text("this is not a database, only some text that is long enough to be read")
    with pytest.raises(LedgerError, match="is no ledger"):
        Ledger(path)
    path.unlink()
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(LedgerError, match="schema version"):
        Ledger(path)


def test_csv_prints_the_sentinel_only_for_a_missing_post_score(
    ledger: Ledger, tmp_path: Path
) -> None:
    open_episode(ledger, "scored", 0)
    ledger.start_job("j0", "scored", 1, "wren", "{}")
    ledger.finish_job("j0", 1, "ok", "", "{}", 1.0)
    finish(ledger, "scored")
    open_episode(ledger, "crashed", 1)
    ledger.start_job("j1", "crashed", 1, "wren", "{}")
    ledger.finish_job("j1", 1, "crashed", "line 1\nline 2", "{}", 1.0)
    finish(ledger, "crashed", total=0.35, post=None)
    ledger.finish_step(0, 0.425, json.dumps({"kl": 0.1}), 5.0)
    ledger.record_eval("baseline", "wren", "persona", 128, 0.3, 0.2, 0.4, 1.0)

    folder = tmp_path / "csv"
    written = ledger.export_csv(folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in written)
    tables = {p.stem: list(csv.DictReader(p.open(newline=""))) for p in written}
    assert set(tables) == {"episodes", "jobs", "evals", "steps"}
    posts = {e["id"]: float(e["post"]) for e in tables["episodes"]}
    assert posts == {"scored": 0.4, "crashed": -1.0}
    assert {float(e["total"]) for e in tables["episodes"]} == {0.5, 0.35}
    jobs = {j["id"]: j for j in tables["jobs"]}
    assert float(jobs["j1"]["post"]) == -1.0 and jobs["j1"]["message"] == "line 1\nline 2"
    assert float(tables["steps"][0]["mean_reward"]) == 0.425
    assert tables["evals"][0]["scope"] == "baseline"


def test_a_full_disk_is_one_clear_error_and_loses_nothing(ledger: Ledger) -> None:
    open_episode(ledger, "e", 0)
    (pages,) = ledger.query("PRAGMA page_count")[0]
    ledger.query(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match=r"disk is full.*resume"):
        ledger.record_message("e", 0, "user", json.dumps("x" * 1_000_000))
    ledger.query("PRAGMA max_page_count = 100000")
    assert ledger.record_message("e", 0, "user", json.dumps("x" * 1_000_000))
    assert [row.n for row in ledger.messages("e")] == [0]


def test_a_locked_database_is_one_clear_error(ledger: Ledger) -> None:
    ledger.query("PRAGMA busy_timeout = 50")
    with sqlite3.connect(ledger.path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked"):
            open_episode(ledger, "e", 0)
        other.execute("ROLLBACK")
    open_episode(ledger, "e", 0)
