"""The ledger: one SQLite file that holds everything that happened in a run.

Only the controller writes it. Every write is idempotent by its primary key, is on disk when the
call returns, and a result and its change of state are one transaction: kill the writer at any
moment, open the file again, call again.

Knows nothing about how episodes are played or jobs are run.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import secrets
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from metatrainer.errors import LedgerError

SCHEMA_VERSION = 3
NO_POST_SCORE = -1.0
"""What CSV exports print where a job has no post score. Never stored, never a reward."""

_SCHEMA = """
CREATE TABLE run (
    id TEXT PRIMARY KEY,
    preset TEXT NOT NULL,
    config TEXT NOT NULL CHECK (json_valid(config)),
    seed INTEGER NOT NULL,
    hidden_seed INTEGER NOT NULL,
    versions TEXT NOT NULL CHECK (json_valid(versions)),
    created REAL NOT NULL
) STRICT;
-- One row each time a controller opens the ledger to write; last is its newest write.
CREATE TABLE sitting (
    n INTEGER PRIMARY KEY,
    began REAL NOT NULL,
    last REAL NOT NULL
) STRICT;
CREATE TABLE task (
    id TEXT PRIMARY KEY,
    family TEXT NOT NULL,
    split TEXT NOT NULL,
    spec TEXT NOT NULL CHECK (json_valid(spec))
) STRICT;
CREATE TABLE episode (
    id TEXT PRIMARY KEY,
    phase TEXT NOT NULL,
    step INTEGER NOT NULL,
    grp INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    task TEXT NOT NULL REFERENCES task (id),
    done INTEGER NOT NULL DEFAULT 0,
    validation REAL,
    quality REAL,
    speed REAL,
    total REAL,
    outcome TEXT,
    post REAL CHECK (post BETWEEN 0 AND 1),
    best_pre REAL CHECK (best_pre BETWEEN 0 AND 1),
    student TEXT,
    seconds REAL,
    CHECK (NOT done OR (validation IS NOT NULL AND quality IS NOT NULL AND speed IS NOT NULL
                        AND total IS NOT NULL AND outcome IS NOT NULL AND seconds IS NOT NULL))
) STRICT;
CREATE INDEX episode_of_step ON episode (phase, step);
CREATE TABLE message (
    episode TEXT NOT NULL REFERENCES episode (id),
    n INTEGER NOT NULL,
    role TEXT NOT NULL,
    content TEXT NOT NULL CHECK (json_valid(content)),
    PRIMARY KEY (episode, n)
) STRICT;
-- tokens: 32-bit integers, logprobs: 64-bit floats, both little-endian.
CREATE TABLE turn (
    episode TEXT NOT NULL REFERENCES episode (id),
    turn INTEGER NOT NULL,
    message TEXT NOT NULL CHECK (json_valid(message)),
    prompt_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (episode, turn)
) STRICT;
CREATE TABLE attempt (
    episode TEXT NOT NULL REFERENCES episode (id),
    n INTEGER NOT NULL,
    ok INTEGER NOT NULL,
    findings TEXT NOT NULL CHECK (json_valid(findings)),
    files TEXT NOT NULL CHECK (json_valid(files)),
    seconds REAL NOT NULL,
    PRIMARY KEY (episode, n)
) STRICT;
-- A job that was lost with its worker is started again under the next attempt.
CREATE TABLE job (
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    episode TEXT NOT NULL REFERENCES episode (id),
    student TEXT NOT NULL,
    spec TEXT NOT NULL CHECK (json_valid(spec)),
    done INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,
    message TEXT,
    result TEXT CHECK (result IS NULL OR json_valid(result)),
    seconds REAL,
    usd REAL,
    PRIMARY KEY (id, attempt),
    CHECK (NOT done OR (outcome IS NOT NULL AND seconds IS NOT NULL AND usd IS NOT NULL))
) STRICT;
CREATE INDEX job_of_episode ON job (episode);
CREATE TABLE eval (
    scope TEXT NOT NULL,
    student TEXT NOT NULL,
    family TEXT NOT NULL,
    n INTEGER NOT NULL,
    mean REAL NOT NULL CHECK (mean BETWEEN 0 AND 1),
    low REAL NOT NULL,
    high REAL NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (scope, student, family)
) STRICT;
-- A machine that was rented for the run. billed: dollars on the provider's bill, once asked for.
CREATE TABLE pod (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    gpu TEXT NOT NULL,
    usd_per_hour REAL NOT NULL CHECK (usd_per_hour >= 0),
    began REAL NOT NULL,
    ended REAL CHECK (ended >= began),
    billed REAL
) STRICT;
CREATE TABLE step (
    n INTEGER PRIMARY KEY,
    mean_reward REAL NOT NULL,
    metrics TEXT NOT NULL CHECK (json_valid(metrics)),
    seconds REAL NOT NULL
) STRICT;
"""


@dataclass(frozen=True)
class RunRow:
    id: str
    preset: str
    config: str
    seed: int
    hidden_seed: int
    versions: str
    created: float


@dataclass(frozen=True)
class TaskRow:
    id: str
    family: str
    split: str
    spec: str


@dataclass(frozen=True)
class EpisodeRow:
    """The reward's fields are None until the episode is done; post, best_pre and student stay
    None where the episode has no such thing."""

    id: str
    phase: str
    step: int
    grp: int
    idx: int
    task: str
    done: bool
    validation: float | None
    quality: float | None
    speed: float | None
    total: float | None
    outcome: str | None
    post: float | None
    best_pre: float | None
    student: str | None
    seconds: float | None


@dataclass(frozen=True)
class MessageRow:
    episode: str
    n: int
    role: str
    content: str


@dataclass(frozen=True)
class TurnRow:
    episode: str
    turn: int
    message: str
    prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    seconds: float


@dataclass(frozen=True)
class AttemptRow:
    episode: str
    n: int
    ok: bool
    findings: str
    files: str
    seconds: float


@dataclass(frozen=True)
class JobRow:
    """One attempt at a job. outcome, result, seconds and usd are None until it is done."""

    id: str
    attempt: int
    episode: str
    student: str
    spec: str
    done: bool
    outcome: str | None
    message: str | None
    result: str | None
    seconds: float | None
    usd: float | None


@dataclass(frozen=True)
class EvalRow:
    scope: str
    student: str
    family: str
    n: int
    mean: float
    low: float
    high: float
    seconds: float


@dataclass(frozen=True)
class PodRow:
    """Times are Unix times; ended is None while it is paid for."""

    id: str
    name: str
    gpu: str
    usd_per_hour: float
    began: float
    ended: float | None
    billed: float | None


@dataclass(frozen=True)
class StepRow:
    n: int
    mean_reward: float
    metrics: str
    seconds: float


Row = TypeVar("Row")


class Ledger:
    """An open ledger: the run's one writer, or (readonly) anyone's view of it while it goes on.

    Methods that write return whether the row was new; a repeated write changes nothing. All of
    them may be called from any thread. Arguments that end in _json are JSON text.
    """

    def __init__(self, path: Path, *, readonly: bool = False):
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        self._began = time.time()
        self._sitting: int | None = None
        self._guard = None if readonly else _only_writer(path)
        try:
            self._db = _connect(path, readonly)
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Close the file and let another writer in. Closing twice does nothing."""
        with self._lock:
            self._db.close()
            self._release()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes inside one: all of them are on disk after it, or none. May be nested.

        Other threads wait meanwhile, so nothing slow belongs inside. On a read-only ledger: all
        reads inside see the same moment.
        """
        with self._lock:
            if self._depth == 0:
                self._begin()
            self._depth += 1
            try:
                yield
                if self._depth == 1:
                    self._touch()
                    self._db.execute("COMMIT")
            except BaseException as error:
                if self._depth == 1 and self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise self._cannot_write(error) from error
                raise
            finally:
                self._depth -= 1

    # -- writing ----------------------------------------------------------------------------

    def create_run(
        self,
        run: str,
        preset: str,
        config_json: str,
        seed: int,
        versions: Mapping[str, str],
        hidden_seed: int | None = None,
    ) -> bool:
        """Enter the run. hidden_seed, of the hidden evals, is drawn here unless a test gives it."""
        if hidden_seed is None:
            hidden_seed = secrets.randbits(62)
        versions_json = json.dumps(dict(versions))
        with self.transaction():
            before = self._rows(RunRow, "SELECT * FROM run")
            if before and before[0].id != run:
                raise LedgerError(f"{self.path} holds the run {before[0].id}, not {run}")
            now = time.time()
            values = (run, preset, config_json, seed, hidden_seed, versions_json, now)
            return self._insert("run", values)

    def add_task(self, id: str, family: str, split: str, spec_json: str) -> bool:
        """Enter a task drawn from a family."""
        return self._insert("task", (id, family, split, spec_json))

    def open_episode(
        self, id: str, phase: str, step: int, grp: int, idx: int, task_id: str
    ) -> bool:
        """Enter an episode that begins. One that exists already keeps all it has."""
        sql = "INSERT INTO episode (id, phase, step, grp, idx, task) VALUES (?, ?, ?, ?, ?, ?)"
        return self._write(sql + _KEEP, (id, phase, step, grp, idx, task_id))

    def record_message(self, episode: str, n: int, role: str, content_json: str) -> bool:
        """Enter the n-th message of an episode's conversation."""
        return self._insert("message", (episode, n, role, content_json))

    def record_turn(
        self,
        episode: str,
        turn: int,
        message_json: str,
        prompt_tokens: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        seconds: float,
    ) -> bool:
        """Enter what the agent sampled in one turn, so that a resumed episode can replay it.

        message_json: the parsed message. prompt_tokens: length of the prompt.
        """
        packed = (array("i", tokens).tobytes(), array("d", logprobs).tobytes())
        return self._insert("turn", (episode, turn, message_json, prompt_tokens, *packed, seconds))

    def record_attempt(
        self, episode: str, n: int, ok: bool, findings_json: str, files_json: str, seconds: float
    ) -> bool:
        """Enter a submission for validation, its verdict and the files as they were."""
        return self._insert("attempt", (episode, n, int(ok), findings_json, files_json, seconds))

    def start_job(
        self, job_id: str, episode: str, attempt: int, student: str, spec_json: str
    ) -> bool:
        """Enter a job before it starts.

        attempt: from 1, the next number after a job was lost with its worker.
        """
        sql = "INSERT INTO job (id, attempt, episode, student, spec) VALUES (?, ?, ?, ?, ?)"
        return self._write(sql + _KEEP, (job_id, attempt, episode, student, spec_json))

    def finish_job(
        self,
        job_id: str,
        attempt: int,
        outcome: str,
        message: str,
        result_json: str,
        seconds: float,
        usd: float = 0.0,
    ) -> bool:
        """Enter how a started job ended and its cost; the first result that arrives counts."""
        sql = (
            "UPDATE job SET done = 1, outcome = ?, message = ?, result = ?, seconds = ?, usd = ?"
            " WHERE id = ? AND attempt = ? AND NOT done"
        )
        values = (outcome, message, result_json, seconds, usd, job_id, attempt)
        with self.transaction():
            if self._write(sql, values):
                return True
            self._must_exist(f"job {job_id} attempt {attempt}", self.job(job_id, attempt))
            return False

    def record_eval(
        self,
        scope: str,
        student: str,
        family: str,
        n: int,
        mean: float,
        low: float,
        high: float,
        seconds: float,
    ) -> bool:
        """Enter a score on hidden items. scope: "baseline", or the job that trained the student."""
        return self._insert("eval", (scope, student, family, n, mean, low, high, seconds))

    def finish_episode(
        self,
        episode: str,
        validation: float,
        quality: float,
        speed: float,
        total: float,
        outcome: str,
        post: float | None,
        best_pre: float | None,
        student: str | None,
        seconds: float,
    ) -> bool:
        """Enter an open episode's reward; the first one counts."""
        sql = (
            "UPDATE episode SET done = 1, validation = ?, quality = ?, speed = ?, total = ?,"
            " outcome = ?, post = ?, best_pre = ?, student = ?, seconds = ?"
            " WHERE id = ? AND NOT done"
        )
        terms = (validation, quality, speed, total)
        rest = (outcome, post, best_pre, student, seconds, episode)
        with self.transaction():
            if self._write(sql, terms + rest):
                return True
            self._must_exist(f"episode {episode}", self.episode(episode))
            return False

    def finish_step(self, step: int, mean_reward: float, metrics_json: str, seconds: float) -> bool:
        """Enter an outer update that is done."""
        return self._insert("step", (step, mean_reward, metrics_json, seconds))

    def record_pod(self, id: str, name: str, gpu: str, usd_per_hour: float) -> bool:
        """Enter a rented machine, from now on paid for."""
        return self._insert("pod", (id, name, gpu, usd_per_hour, time.time(), None, None))

    def end_pod(self, id: str) -> bool:
        """Enter that a rented machine is not paid for any more."""
        # A clock that was set back makes no negative bill.
        sql = "UPDATE pod SET ended = max(began, ?) WHERE id = ? AND ended IS NULL"
        return self._write(sql, (time.time(), id))

    def bill_pod(self, id: str, usd: float) -> bool:
        """Enter what the provider's bill says of a machine; the newest counts."""
        return self._write("UPDATE pod SET billed = ? WHERE id = ?", (usd, id))

    # -- reading ----------------------------------------------------------------------------

    def run(self) -> RunRow | None:
        """The run, if it has been entered."""
        return _first(self._rows(RunRow, "SELECT * FROM run"))

    def seconds(self) -> float:
        """Time that controllers spent on the run, pauses between them left out."""
        (total,) = self._fetch("SELECT coalesce(sum(last - began), 0.0) FROM sitting")[0]
        return float(total)

    def left_at(self) -> float | None:
        """When the controller before this one wrote last, in Unix time."""
        sql = "SELECT max(last) FROM sitting WHERE n IS NOT ?"
        (last,) = self._fetch(sql, self._sitting)[0]
        return last if last is None else float(last)

    def tasks(self) -> list[TaskRow]:
        return self._rows(TaskRow, "SELECT * FROM task ORDER BY rowid")

    def episode(self, id: str) -> EpisodeRow | None:
        """The episode, open or done."""
        return _first(self._rows(EpisodeRow, "SELECT * FROM episode WHERE id = ?", id))

    def finished_episode(self, id: str) -> EpisodeRow | None:
        """The episode if it has its reward: then there is nothing left to play."""
        row = self.episode(id)
        return row if row and row.done else None

    def episodes(self, phase: str | None = None) -> list[EpisodeRow]:
        """All episodes, or those of one phase, in the order of the run."""
        return self._rows(
            EpisodeRow,
            "SELECT * FROM episode WHERE ? IN (phase, '') ORDER BY step, grp, idx, rowid",
            phase or "",
        )

    def episodes_of(self, phase: str, step: int) -> list[EpisodeRow]:
        """The episodes of one step, in the order of the run."""
        sql = "SELECT * FROM episode WHERE phase = ? AND step = ? ORDER BY grp, idx, rowid"
        return self._rows(EpisodeRow, sql, phase, step)

    def messages(self, episode: str) -> list[MessageRow]:
        return self._rows(MessageRow, "SELECT * FROM message WHERE episode = ? ORDER BY n", episode)

    def turns(self, episode: str) -> list[TurnRow]:
        """What the agent sampled in an episode so far, token by token."""
        return self._rows(TurnRow, "SELECT * FROM turn WHERE episode = ? ORDER BY turn", episode)

    def attempts(self, episode: str) -> list[AttemptRow]:
        return self._rows(AttemptRow, "SELECT * FROM attempt WHERE episode = ? ORDER BY n", episode)

    def job(self, job_id: str, attempt: int | None = None) -> JobRow | None:
        """One attempt at a job; left out, the newest."""
        sql = "SELECT * FROM job WHERE id = ? AND ? IN (attempt, 0) ORDER BY attempt DESC LIMIT 1"
        return _first(self._rows(JobRow, sql, job_id, attempt or 0))

    def jobs(self) -> list[JobRow]:
        """The newest attempt of every job."""
        return self._rows(
            JobRow,
            "SELECT * FROM job WHERE attempt = (SELECT max(attempt) FROM job j WHERE j.id = job.id)"
            " ORDER BY rowid",
        )

    def open_jobs(self) -> list[JobRow]:
        """Attempts that started and have no result: on resume, collect them or start the next."""
        return self._rows(JobRow, "SELECT * FROM job WHERE NOT done ORDER BY rowid")

    def evals(self, scope: str | None = None) -> list[EvalRow]:
        """All scores, or those of one scope."""
        sql = "SELECT * FROM eval WHERE ? IN (scope, '') ORDER BY rowid"
        return self._rows(EvalRow, sql, scope or "")

    def pods(self) -> list[PodRow]:
        """Every machine that was rented for the run."""
        return self._rows(PodRow, "SELECT * FROM pod ORDER BY rowid")

    def steps(self) -> list[StepRow]:
        return self._rows(StepRow, "SELECT * FROM step ORDER BY n")

    def query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Rows of a SELECT, for views that want a few columns of many rows."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def version(self) -> int:
        """A number that changes when another process has written since this ledger was opened."""
        return int(self.query("PRAGMA data_version")[0][0])

    def export_csv(self, folder: Path) -> list[Path]:
        """Write episodes.csv, jobs.csv, evals.csv and steps.csv; returns their paths.

        A missing post score is printed as NO_POST_SCORE; anything else that is missing is empty.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with self.transaction():
            return [self._export(folder / f"{name}.csv", sql) for name, sql in _EXPORTS.items()]

    # -- inside -----------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE" if self._guard else "BEGIN")
        except sqlite3.OperationalError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: sqlite3.OperationalError) -> LedgerError:
        return LedgerError(f"{self.path}: {error}; mend that and resume the run: nothing is lost")

    def _insert(self, table: str, values: Sequence[Any]) -> bool:
        marks = ", ".join("?" * len(values))
        return self._write(f"INSERT INTO {table} VALUES ({marks}){_KEEP}", values)

    def _write(self, sql: str, values: Sequence[Any]) -> bool:
        if self._guard is None:
            raise LedgerError(f"{self.path} was opened to read only")
        with self.transaction():
            try:
                return self._db.execute(sql, values).rowcount == 1
            except sqlite3.IntegrityError as error:
                key = ", ".join(repr(v) for v in values if isinstance(v, str | int))
                raise LedgerError(f"{self.path} refuses a row: {error} ({key[:200]})") from error

    def _touch(self) -> None:
        """Note the time of this write, in the transaction that makes it."""
        if self._guard is None:
            return
        now = time.time()
        if self._sitting is None:
            sql = "INSERT INTO sitting (began, last) VALUES (?, ?)"
            self._sitting = self._db.execute(sql, (self._began, now)).lastrowid
        else:
            self._db.execute("UPDATE sitting SET last = ? WHERE n = ?", (now, self._sitting))

    def _fetch(self, sql: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def _rows(self, kind: Callable[..., Row], sql: str, *values: Any) -> list[Row]:
        return [kind(**_decoded(row)) for row in self._fetch(sql, *values)]

    def _export(self, path: Path, sql: str) -> Path:
        with self._lock:
            cursor = self._db.execute(sql, {"missing": NO_POST_SCORE})
            header = [column[0] for column in cursor.description]
            _write_csv(path, header, cursor)
        return path

    def _must_exist(self, what: str, row: object | None) -> None:
        if row is None:
            raise LedgerError(f"{self.path} has no {what}: it must be entered before it ends")

    def _release(self) -> None:
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None


_KEEP = " ON CONFLICT DO NOTHING"

_LAST_ATTEMPT = "job.attempt = (SELECT max(attempt) FROM job j WHERE j.id = job.id)"
_EXPORTS = {
    "episodes": "SELECT e.id, phase, step, grp AS 'group', idx AS 'index', family, done,"
    " validation, quality, speed, total, outcome, coalesce(post, :missing) AS post, best_pre,"
    " student, seconds, (SELECT count(*) FROM attempt WHERE episode = e.id) AS attempts,"
    " (SELECT count(*) FROM turn WHERE episode = e.id) AS turns"
    " FROM episode e JOIN task ON task.id = e.task ORDER BY step, grp, idx, e.rowid",
    "jobs": "SELECT job.id, attempt, job.episode, job.student, job.done, job.outcome, message,"
    " coalesce(e.post, :missing) AS post, e.best_pre, job.seconds, job.usd, spec"
    f" FROM job JOIN episode e ON e.id = job.episode WHERE {_LAST_ATTEMPT} ORDER BY job.rowid",
    "evals": "SELECT * FROM eval ORDER BY rowid",
    "steps": "SELECT n AS step, mean_reward, seconds, metrics FROM step ORDER BY n",
}
_FLAGS = ("done", "ok")
_ARRAYS = {"tokens": "i", "logprobs": "d"}


def _only_writer(path: Path) -> int:
    """Take the lock of the run's one writer; the kernel drops it when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    guard = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(guard)
        raise LedgerError(
            f"{path} is being written by another process; stop that run first, or watch it with"
            f" `metatrainer report {path.parent}`"
        ) from None
    return guard


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    if readonly and not path.exists():
        raise LedgerError(f"no ledger at {path}; a run's folder holds one once it has started")
    address = path.resolve().as_uri() + ("?mode=ro" if readonly else "?mode=rwc")
    db = sqlite3.connect(
        address, uri=True, isolation_level=None, check_same_thread=False, timeout=30
    )
    db.row_factory = sqlite3.Row
    try:
        db.execute("PRAGMA foreign_keys = ON")
        if not readonly:
            _prepare(db)
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        db.close()
        raise LedgerError(f"{path} is no ledger: {error}") from error
    if version != SCHEMA_VERSION:
        db.close()
        raise LedgerError(
            f"{path} has schema version {version}, this metatrainer reads {SCHEMA_VERSION};"
            " use the release that wrote it"
        )
    return db


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == 0:
        # One script, one transaction: a kill in between leaves an empty file, not half a schema.
        db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def _decoded(row: sqlite3.Row) -> dict[str, Any]:
    return {key: _decode(key, row[key]) for key in row.keys()}  # noqa: SIM118 (rows iterate values)


def _decode(column: str, value: Any) -> Any:
    if column in _FLAGS:
        return bool(value)
    if column in _ARRAYS:
        return array(_ARRAYS[column], value).tolist()
    return value


def _first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    unfinished.rename(path)
