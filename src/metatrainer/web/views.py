"""What each page shows, read from ledgers: one function a page, one dataclass a view.

Reads with few, narrow queries, so that a page opens fast on a large run. Knows nothing about HTTP
or HTML.
"""

from __future__ import annotations

import difflib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metatrainer.errors import ConfigError
from metatrainer.ledger import EpisodeRow, EvalRow, Ledger
from metatrainer.report.alerts import Alert, Played, alerts_of_run, dead_groups
from metatrainer.report.summary import TERMS, Estimate, estimate_by

LIVE_SECONDS = 120.0
"""A run that has written nothing for longer is taken to be stopped."""
LISTED_JOBS = 400
"""Newest jobs in the pool's table."""
DRAWN_JOBS = 2000
"""Newest jobs in the picture of the slots over time."""
DIFF_LINES = 400
PHASES = {
    "train": "training",
    "heldout_before": "held out, before",
    "heldout_after": "held out, after",
    "play": "play",
}


@dataclass(frozen=True)
class Head:
    """What every page of a run says at its top."""

    name: str
    preset: str
    state: str
    """running, stopped or done."""
    steps: int
    steps_planned: int
    episodes: int
    seconds: float
    left: float | None
    """Seconds to the end at the pace so far; None before a step is done and after the last."""


@dataclass(frozen=True)
class RunView:
    """A run: its curves, held-out families, alerts, students."""

    head: Head
    steps: list[int]
    curves: dict[str, list[Estimate]]
    """reward and its terms, a point for each of `steps`."""
    families: dict[str, dict[int, Estimate]]
    """Reward of each training family by step."""
    heldout: dict[str, dict[str, Estimate]]
    """family -> "before", "after", "quality before", "quality after"."""
    alerts: list[Alert]
    chosen: dict[str, list[int]]
    """Jobs of each student by step."""
    outcomes: dict[str, int]
    baselines: list[EvalRow]
    config: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class GroupView:
    """Episodes of one task, in order."""

    group: int
    task: str
    family: str
    episodes: list[EpisodeRow]

    @property
    def dead(self) -> bool:
        """All its rewards are equal."""
        done = [e.total for e in self.episodes if e.done]
        return len(done) > 1 and len(set(done)) == 1


@dataclass(frozen=True)
class StepView:
    """One step of training, or one pass over the held-out families."""

    head: Head
    phase: str
    step: int
    groups: list[GroupView]
    dead: float
    seconds: float | None
    before: int | None
    after: int | None


@dataclass(frozen=True)
class AttemptView:
    """One submission: its verdict, and what changed since the one before."""

    n: int
    ok: bool
    seconds: float
    cheating: bool
    findings: list[dict[str, Any]]
    files: dict[str, str]
    diff: list[str]


@dataclass(frozen=True)
class EpisodeView:
    """The whole trajectory of one episode."""

    head: Head
    episode: EpisodeRow
    family: str
    messages: list[dict[str, Any]]
    """Each with role, content, tool_calls and, for the agent's own, prompt_tokens and tokens."""
    attempts: list[AttemptView]
    job: str | None


@dataclass(frozen=True)
class JobView:
    """One training job."""

    head: Head
    id: str
    attempt: int
    episode: EpisodeRow
    student: str
    done: bool
    outcome: str | None
    message: str | None
    seconds: float | None
    spec: dict[str, Any]
    result: dict[str, Any]
    files: dict[str, str]
    before: EvalRow | None
    after: EvalRow | None


@dataclass(frozen=True)
class PoolView:
    """Jobs as the slots ran them."""

    head: Head
    outcomes: dict[str, int]
    busy: float
    """Seconds that slots spent on jobs."""
    slots: int | None
    utilisation: float | None
    """busy over what the slots could have done; None where that is not known."""
    jobs: list[dict[str, Any]]
    spans: list[dict[str, Any]] = field(default_factory=list)
    """slot, began and ended of the newest jobs, in seconds since the first of them began."""


# Runs


def runs(root: Path) -> list[Path]:
    """Folders below root that hold a ledger, newest first; root itself if it is one."""
    if (root / "ledger.sqlite").exists():
        return [root]
    found = [path.parent for path in root.glob("*/ledger.sqlite")]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def head(ledger: Ledger, now: float | None = None) -> Head:
    """Raises ConfigError where the ledger holds no run yet."""
    run = ledger.run()
    if run is None:
        raise ConfigError(f"{ledger.path} holds no run yet; it is entered when the run starts")
    planned = int(json.loads(run.config).get("outer", {}).get("steps", 0))
    (steps, in_steps) = ledger.query("SELECT count(*), coalesce(sum(seconds), 0) FROM step")[0]
    (episodes,) = ledger.query("SELECT count(*) FROM episode WHERE done")[0]
    (last,) = ledger.query("SELECT max(last) FROM sitting")[0]
    quiet = (time.time() if now is None else now) - (last or run.created)
    state = "running" if quiet < LIVE_SECONDS else "stopped"
    if steps >= planned and (state == "stopped" or _heldout_is_over(ledger, run.config)):
        state = "done"
    left = (planned - steps) * in_steps / steps if steps and steps < planned else None
    return Head(run.id, run.preset, state, steps, planned, episodes, ledger.seconds(), left)


def run_view(ledger: Ledger) -> RunView:
    """The run page."""
    with ledger.transaction():
        top = head(ledger)
        row = ledger.run()
        assert row is not None  # head would have raised
        done = [int(r[0]) for r in ledger.query("SELECT n FROM step ORDER BY n")]
        sums = ledger.query(_SUMS)
        heldout = ledger.query(_HELDOUT)
        alerts = alerts_of_run(ledger)
        baselines = ledger.evals("baseline")
        students = ledger.query(_CHOSEN)
        outcomes = ledger.query("SELECT outcome, count(*) FROM episode WHERE done GROUP BY 1")
    steps = set(done)
    whole = _by_step([r for r in sums if r["step"] in steps])
    return RunView(
        head=top,
        steps=sorted(whole),
        curves={term: [whole[s][term] for s in sorted(whole)] for term in ("reward", *TERMS)},
        families=_by_family([r for r in sums if r["step"] in steps]),
        heldout=_heldout(heldout),
        alerts=alerts,
        chosen=_chosen(students, sorted(steps)),
        outcomes={r[0]: r[1] for r in outcomes},
        baselines=baselines,
        config=json.loads(row.config),
        versions=json.loads(row.versions),
    )


def step_view(ledger: Ledger, phase: str, step: int) -> StepView:
    """A step page. Raises ConfigError for a step that has no episode."""
    with ledger.transaction():
        top = head(ledger)
        episodes = ledger.episodes_of(phase, step)
        tasks = {t.id: t.family for t in ledger.tasks()}
        seconds = ledger.query("SELECT seconds FROM step WHERE n = ?", step)
        around = ledger.query(_AROUND, step, step, phase)[0]
    if not episodes:
        raise ConfigError(f"step {step} of {PHASES.get(phase, phase)} has no episode yet")
    groups: dict[int, list[EpisodeRow]] = defaultdict(list)
    for row in episodes:
        groups[row.grp].append(row)
    played = [Played(e.grp, e.total or 0.0, e.outcome or "", None) for e in episodes if e.done]
    return StepView(
        head=top,
        phase=phase,
        step=step,
        groups=[
            GroupView(group, rows[0].task, tasks[rows[0].task], rows)
            for group, rows in sorted(groups.items())
        ],
        dead=dead_groups(played),
        seconds=seconds[0][0] if seconds and phase == "train" else None,
        before=around[0],
        after=around[1],
    )


def episode_view(ledger: Ledger, id: str) -> EpisodeView:
    """An episode page. Raises ConfigError for an id that the ledger does not have."""
    with ledger.transaction():
        top = head(ledger)
        episode = ledger.episode(id)
        if episode is None:
            raise ConfigError(f"no episode {id[:80]!r} in {top.name}")
        (family,) = ledger.query("SELECT family FROM task WHERE id = ?", episode.task)[0]
        messages = ledger.messages(id)
        turns = ledger.query(_TURNS, id)
        attempts = ledger.attempts(id)
        job = ledger.query("SELECT id FROM job WHERE episode = ? LIMIT 1", id)
    spoken = iter(turns)
    shown = []
    for message in messages:
        content = json.loads(message.content)
        if message.role == "assistant" and (turn := next(spoken, None)):
            content |= {"prompt_tokens": turn["prompt_tokens"], "tokens": turn["tokens"]}
        shown.append(content)
    views: list[AttemptView] = []
    for attempt in attempts:
        files, known = json.loads(attempt.files), json.loads(attempt.findings)
        views.append(
            AttemptView(
                attempt.n,
                attempt.ok,
                attempt.seconds,
                known["cheating"],
                known["findings"],
                files,
                diff(views[-1].files, files) if views else [],
            )
        )
    return EpisodeView(top, episode, family, shown, views, job[0][0] if job else None)


def job_view(ledger: Ledger, id: str) -> JobView:
    """A job page. Raises ConfigError for an id that the ledger does not have."""
    with ledger.transaction():
        top = head(ledger)
        job = ledger.job(id)
        if job is None:
            raise ConfigError(f"no job {id[:80]!r} in {top.name}")
        episode = ledger.episode(job.episode)
        assert episode is not None  # the ledger's own constraint
        accepted = [a for a in ledger.attempts(job.episode) if a.ok]
        after = ledger.evals(id)
        before = ledger.query(_BEFORE, job.student, episode.task)
    return JobView(
        head=top,
        id=job.id,
        attempt=job.attempt,
        episode=episode,
        student=job.student,
        done=job.done,
        outcome=job.outcome,
        message=job.message,
        seconds=job.seconds,
        spec=json.loads(job.spec),
        result=json.loads(job.result or "null") or {},
        files=json.loads(accepted[-1].files) if accepted else {},
        before=EvalRow(**dict(before[0])) if before else None,
        after=after[0] if after else None,
    )


def pool_view(ledger: Ledger) -> PoolView:
    """The pool page."""
    with ledger.transaction():
        top = head(ledger)
        run = ledger.run()
        rows = ledger.query(_JOBS, LISTED_JOBS)
        ended = ledger.query("SELECT outcome, count(*), sum(seconds) FROM job GROUP BY 1")
        spans = ledger.query(_SPANS, DRAWN_JOBS)
    pool = json.loads(run.config).get("pool", {}) if run else {}
    slots = pool["workers"] * pool["packed"] if pool.get("workers") else None
    slots = slots or (1 + max(s["slot"] for s in spans) if spans else None)
    busy = sum(r[2] or 0.0 for r in ended)
    start = min((s["began"] for s in spans), default=0.0)
    stop = max((s["ended"] for s in spans), default=0.0)
    used = sum(s["ended"] - s["began"] for s in spans)
    return PoolView(
        head=top,
        outcomes={r[0] or "running": r[1] for r in ended},
        busy=busy,
        slots=slots,
        utilisation=used / (slots * (stop - start)) if slots and stop > start else None,
        jobs=[dict(row) for row in rows],
        spans=[
            {**dict(s), "began": s["began"] - start, "ended": s["ended"] - start} for s in spans
        ],
    )


def diff(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What changed between two submissions, as lines of a unified diff."""
    lines: list[str] = []
    for path in sorted({*old, *new}):
        before, after = old.get(path, "").splitlines(), new.get(path, "").splitlines()
        lines += difflib.unified_diff(before, after, path, path, lineterm="", n=2)
    return lines[:DIFF_LINES]


# How rows become views

_SUMS = """
SELECT step, family, count(*) AS n,
    sum(total) AS reward, sum(total * total) AS reward2,
    sum(validation) AS validation, sum(validation * validation) AS validation2,
    sum(quality) AS quality, sum(quality * quality) AS quality2,
    sum(speed) AS speed, sum(speed * speed) AS speed2
FROM episode JOIN task ON task.id = episode.task
WHERE phase = 'train' AND done GROUP BY step, family ORDER BY step, family
"""
_HELDOUT = """
SELECT phase, family, count(*) AS n, sum(total) AS reward, sum(total * total) AS reward2,
    sum(quality) AS quality, sum(quality * quality) AS quality2
FROM episode JOIN task ON task.id = episode.task
WHERE phase LIKE 'heldout%' AND done GROUP BY phase, family ORDER BY family
"""
_CHOSEN = """
SELECT step, student, count(*) FROM episode
WHERE phase = 'train' AND done AND student IS NOT NULL GROUP BY step, student
"""
_AROUND = """
SELECT (SELECT max(step) FROM episode WHERE phase = p.phase AND step < ?),
    (SELECT min(step) FROM episode WHERE phase = p.phase AND step > ?) FROM (SELECT ? AS phase) p
"""
_TURNS = """
SELECT prompt_tokens, length(tokens) / 4 AS tokens FROM turn WHERE episode = ? ORDER BY turn
"""
_BEFORE = """
SELECT eval.* FROM eval JOIN task ON task.family = eval.family
WHERE scope = 'baseline' AND student = ? AND task.id = ?
"""
_JOBS = """
SELECT job.id, job.attempt, job.episode, job.student, job.done, job.outcome, job.message,
    job.seconds, episode.post, episode.best_pre, episode.quality
FROM job JOIN episode ON episode.id = job.episode ORDER BY job.rowid DESC LIMIT ?
"""
_SPANS = """
WITH newest AS (SELECT id, outcome, result FROM job WHERE done ORDER BY rowid DESC LIMIT ?)
SELECT id, outcome, result ->> '$.slot' AS slot, result ->> '$.began' AS began,
    (result ->> '$.began') + (result ->> '$.seconds') AS ended
FROM newest WHERE result ->> '$.slot' IS NOT NULL AND result ->> '$.began' IS NOT NULL
ORDER BY began
"""


def _estimate(total: float, squares: float, n: int) -> Estimate:
    """From the sums that a query gives."""
    mean = total / n
    return estimate_by(mean, squares - n * mean * mean, n)


def _by_step(rows: Sequence[Any]) -> dict[int, dict[str, Estimate]]:
    """The terms of each step over all its families."""
    steps: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        steps[row["step"]].append(row)
    return {
        step: {
            term: _estimate(
                sum(r[term] for r in of_step),
                sum(r[f"{term}2"] for r in of_step),
                sum(r["n"] for r in of_step),
            )
            for term in ("reward", *TERMS)
        }
        for step, of_step in steps.items()
    }


def _by_family(rows: Sequence[Any]) -> dict[str, dict[int, Estimate]]:
    found: dict[str, dict[int, Estimate]] = defaultdict(dict)
    for row in rows:
        found[row["family"]][row["step"]] = _estimate(row["reward"], row["reward2"], row["n"])
    return dict(sorted(found.items()))


def _heldout(rows: Sequence[Any]) -> dict[str, dict[str, Estimate]]:
    found: dict[str, dict[str, Estimate]] = defaultdict(dict)
    for row in rows:
        when = row["phase"].removeprefix("heldout_")
        found[row["family"]][when] = _estimate(row["reward"], row["reward2"], row["n"])
        found[row["family"]][f"quality {when}"] = _estimate(
            row["quality"], row["quality2"], row["n"]
        )
    return dict(found)


def _chosen(rows: Sequence[Any], steps: list[int]) -> dict[str, list[int]]:
    counts = {(step, student): n for step, student, n in rows}
    students = sorted({student for _, student in counts})
    return {s: [counts.get((step, s), 0) for step in steps] for s in students}


def _heldout_is_over(ledger: Ledger, config: str) -> bool:
    settings = json.loads(config)
    wanted = len(settings.get("heldout", ())) * settings.get("outer", {}).get("heldout_episodes", 0)
    sql = "SELECT count(*) FROM episode WHERE done AND phase = 'heldout_after'"
    return bool(ledger.query(sql)[0][0] >= wanted)
