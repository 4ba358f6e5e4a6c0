"""What an agent learned: how it wrote jobs in each step and family, computed from the ledger alone.

The two rungs are apart: whether jobs are valid, and how good valid ones are. Knows nothing about
how the numbers are shown.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from metatrainer.errors import ConfigError
from metatrainer.ledger import Ledger
from metatrainer.report.entropy import Surprise, entropy, surprises
from metatrainer.report.submission import Features, features, fingerprint

ALL = "all"
"""Stands for the families of a step together."""
SETTINGS = ("learning_rate", "max_steps", "batch_size", "group_size", "lora_rank")
"""Of a job; their medians are shown."""
Table = Mapping[str, Mapping[str, float]]
"""Measured scores: family -> student -> share of right answers."""


@dataclass(frozen=True)
class Cell:
    """The episodes of one family, or of all, in one step. None: nothing to take it from."""

    phase: str
    """train, heldout_before or heldout_after."""
    step: int
    family: str
    episodes: int
    valid: float
    """First rung: share of episodes that got a job accepted."""
    first_try: float
    """Share of episodes whose first submission was accepted."""
    attempts: float
    """Submissions in an episode."""
    quality: float | None
    """Second rung: mean quality of jobs that were accepted."""
    students: dict[str, int]
    """Jobs by the student that they train."""
    best_chosen: float | None
    """Share of jobs that train the student which the table of scores has as the best."""
    settings: dict[str, float]
    """Medians over jobs, by name."""
    tasks: float | None
    """Median number of practice tasks, where the text says it."""
    levels: dict[str, int]
    """Jobs by the levels that they practise."""
    rewards: float | None
    """Mean number of reward functions."""
    exact: float | None
    """Share of jobs that reward the very answer."""
    calls: float | None
    """Share of jobs whose reward looks at tool calls."""
    novelty: float | None
    """Share of jobs that no earlier one of the run was like, but for layout and comments."""
    entropy: float | None
    """Of the agent's tokens, in nats; a script has none."""
    dead_groups: float
    """Share of groups whose rewards are all equal."""


@dataclass(frozen=True)
class Learned:
    """All cells in the order of the run, of the steps that are done; in each step the one of all
    families first."""

    cells: list[Cell]

    def training(self, family: str = ALL) -> list[Cell]:
        """The steps of the training, in order."""
        return [c for c in self.cells if c.phase == "train" and c.family == family]

    @property
    def families(self) -> list[str]:
        """Those that were trained on."""
        return sorted({c.family for c in self.cells if c.phase == "train"} - {ALL})

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(cell).items()}
            for cell in self.cells
        ]


def learned(ledger: Ledger, table: Table | None = None) -> Learned:
    """Read a run. table: which student is best; left out, the run's own untrained scores say it."""
    with ledger.transaction():
        table = table or untrained(ledger)
        episodes = list(_episodes(ledger, table))
    cells: dict[tuple[str, int, str], list[_Episode]] = defaultdict(list)
    for episode in episodes:
        cells[episode.phase, episode.step, ALL].append(episode)
        cells[episode.phase, episode.step, episode.family].append(episode)
    return Learned([_cell(*key, found) for key, found in cells.items()])


def untrained(ledger: Ledger) -> Table:
    """Scores of the untrained students that the run itself measured."""
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for row in ledger.evals("baseline"):
        table[row.family][row.student] = row.mean
    return table


def read_table(path: Path) -> Table:
    """Scores of trained students from the output of benchmarks/students.py. Raises ConfigError.

    Of several learning rates the best counts.
    """
    table: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        for row in json.loads(path.read_text())["rows"]:
            for job in row["trained"]:
                scores, student = table[job["family"]], row["student"]
                score = job["after"]["mean"] if job["after"] else 0.0
                scores[student] = max(score, scores.get(student, 0.0))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{path} is no table of trained students; benchmarks/students.py prints one"
        ) from None
    return table


@dataclass(frozen=True)
class _Job:
    """What is looked at of a job that was accepted."""

    student: str
    best: bool | None
    settings: dict[str, float]
    features: Features
    new: bool


@dataclass(frozen=True)
class _Episode:
    phase: str
    step: int
    group: int
    family: str
    total: float
    quality: float
    attempts: int
    job: _Job | None
    surprise: Surprise


_EPISODES = """
SELECT episode.id, phase, step, grp, family, total, quality,
    (SELECT count(*) FROM attempt WHERE attempt.episode = episode.id) AS attempts,
    (SELECT files FROM attempt WHERE attempt.episode = episode.id AND ok) AS files,
    (SELECT spec FROM job WHERE job.episode = episode.id ORDER BY attempt DESC) AS spec,
    (SELECT student FROM job WHERE job.episode = episode.id) AS chosen
FROM episode JOIN task ON task.id = episode.task
WHERE done AND (phase LIKE 'heldout%' OR phase = 'train' AND step IN (SELECT n FROM step))
ORDER BY phase = 'heldout_after', phase = 'train', step, grp, idx
"""


def _episodes(ledger: Ledger, table: Table) -> Iterator[_Episode]:
    """Finished episodes in the order of the run."""
    seen: set[str] = set()
    said = surprises(ledger)
    for row in ledger.query(_EPISODES):
        yield _Episode(
            phase=row["phase"],
            step=row["step"],
            group=row["grp"],
            family=row["family"],
            total=row["total"],
            quality=row["quality"],
            attempts=row["attempts"],
            job=_job(row, table.get(row["family"], {}), seen) if row["chosen"] else None,
            surprise=said.get(row["id"], Surprise(0.0, 0)),
        )


def _job(row: Any, scores: Mapping[str, float], seen: set[str]) -> _Job:
    """seen: fingerprints of the run so far, to which this one's is added."""
    files = json.loads(row["files"] or "{}")
    spec = json.loads(row["spec"]).get("prime_rl", {})
    mark = fingerprint(files)
    new = mark not in seen
    seen.add(mark)
    best = scores[row["chosen"]] == max(scores.values()) if row["chosen"] in scores else None
    settings = {name: spec[name] for name in SETTINGS if name in spec}
    return _Job(row["chosen"], best, settings, features(files), new)


def _cell(phase: str, step: int, family: str, episodes: Sequence[_Episode]) -> Cell:
    jobs = [episode.job for episode in episodes if episode.job]
    groups: dict[int, set[float]] = defaultdict(set)
    for episode in episodes:
        groups[episode.group].add(episode.total)
    found = [job.features for job in jobs]
    return Cell(
        phase=phase,
        step=step,
        family=family,
        episodes=len(episodes),
        valid=len(jobs) / len(episodes),
        first_try=fmean(e.job is not None and e.attempts == 1 for e in episodes),
        attempts=fmean(episode.attempts for episode in episodes),
        quality=_mean([episode.quality for episode in episodes if episode.job]),
        students=dict(Counter(job.student for job in jobs).most_common()),
        best_chosen=_mean([job.best for job in jobs if job.best is not None]),
        settings={
            name: float(median(values))
            for name in SETTINGS
            if (values := [job.settings[name] for job in jobs if name in job.settings])
        },
        tasks=_median([f.tasks for f in found if f.tasks is not None]),
        levels=dict(Counter(f.levels for f in found if f.levels is not None).most_common()),
        rewards=_mean([f.rewards for f in found]),
        exact=_mean([f.exact for f in found]),
        calls=_mean([f.calls for f in found]),
        novelty=_mean([job.new for job in jobs]),
        entropy=entropy([episode.surprise for episode in episodes]),
        dead_groups=fmean(len(rewards) == 1 for rewards in groups.values()),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None
