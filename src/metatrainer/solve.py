"""From a family to a trained student: episodes until the budget ends, then the best is handed over.

Which student is best is told by the run's hidden items. The best of many owes some of its score to
luck (the winner's curse), so it is reported on other hidden items, which nobody chose by. Knows
nothing about how an agent writes jobs or how anything is shown.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from metatrainer import cards, families, folders, money
from metatrainer.agent.policies import Message, Policy, Scripted
from metatrainer.agent.task import draw_task, hidden_items
from metatrainer.config import RunSettings
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.errors import AgentError, BudgetError, ConfigError, MetatrainerError
from metatrainer.experiment import enter, staff, versions
from metatrainer.export import ADAPTER
from metatrainer.families import Family, Item
from metatrainer.families.adopt import adopt
from metatrainer.families.check import examine
from metatrainer.ledger import EvalRow, Ledger
from metatrainer.outer.plan import derive
from metatrainer.play import Agent
from metatrainer.pool import jobdir
from metatrainer.rundir import RunDir
from metatrainer.students import catalogue
from metatrainer.students.score import Score, difference

ORDER = "solve.json"
"""In a run's folder: what was asked for."""
SOLUTION = "solution"
"""In a run's folder: what is handed over."""
FAILURES = 3
"""So many in a row of the agent itself end the work; an episode that failed is left for later."""
FRESH_ITEMS = 512
"""Hidden items of the report."""
NOTHING = "a budget of 0 leaves nothing to do; give more, or leave it out"
BEFORE, AFTER = "report before", "report after"
"""Scopes in the ledger of the scores that are reported."""

Tell = Callable[[float, str], None]
"""Is told the part of the budget that is used, in [0, 1], and what happened."""


class Order(BaseModel):
    """What was asked for. At least one of the limits is set, or money.max_usd of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    folder: Path | None = None
    """Of the package that has the family; None for one that is installed."""
    agent: str
    episodes: int | None = None
    seconds: float | None = None
    """Past them no episode begins; those under way are played to their end."""


@dataclass(frozen=True)
class Solved:
    """The student that is handed over, and how good it is on items that nobody chose by."""

    family: str
    student: str
    job: str
    """Its folder's name in the run's jobs/."""
    episodes: int
    """Played in all."""
    jobs: int
    """That ended well: the student is the best of so many."""
    chosen_on: Score
    """On the items that it was chosen by: too good, by the luck of the best."""
    before: Score
    """The best untrained student, on the items of the report."""
    after: Score
    gain: float
    low: float
    high: float
    """95 % interval of the gain."""
    usd: float
    seconds: float
    folder: Path

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        scores = {k: getattr(self, k).model_dump() for k in ("chosen_on", "before", "after")}
        return {**asdict(self), **scores, "folder": str(self.folder)}


def find_family(given: str, site: Path) -> tuple[str, Path | None]:
    """A family by its name, or by the folder of its package, which is returned too.

    site: see `adopt`. Raises ConfigError, also for a family of a folder that is not sound.
    """
    if given in families.known() or not Path(given).is_dir():
        return families.get(given).name, None
    name = adopt(Path(given), site)
    wrong = next((c for c in examine(families.get(name)) if c.ok is False), None)
    if wrong:
        raise ConfigError(f"family {name} is not sound: {wrong.name}: {wrong.found}")
    return name, Path(given).resolve()


def check(order: Order, settings: RunSettings) -> None:
    """See that the budget ends some time and lets something begin. Raises ConfigError."""
    limits = (order.episodes, order.seconds, settings.money.max_usd)
    if all(limit is None for limit in limits):
        raise ConfigError("nothing says when to end; give --episodes, --seconds or --max-usd")
    if any(limit is not None and limit <= 0 for limit in limits):
        raise ConfigError(NOTHING)
    prices = settings.money
    free = not prices.usd_per_slot_hour and not money.has_token_prices(prices)
    if order.episodes is None and order.seconds is None and free:
        raise ConfigError(
            "at money.usd_per_slot_hour = 0 nothing costs anything and --max-usd never ends; set "
            "the price, or give --episodes or --seconds"
        )


def write_order(run: RunDir, order: Order) -> None:
    """Note what was asked for, for later processes."""
    jobdir.write_durably(run.path / ORDER, order.model_dump_json(indent=1))


def read_order(run: RunDir) -> Order:
    """What was asked for. Raises ConfigError for a run of another kind."""
    try:
        return Order.model_validate_json((run.path / ORDER).read_bytes())
    except (OSError, ValidationError):
        raise ConfigError(f"{run.path} was not begun by metatrainer solve") from None


def solve(order: Order, settings: RunSettings, run: RunDir, agent: Agent, tell: Tell) -> Solved:
    """Play what the budget still allows, then choose, report and hand over.

    Kill it anywhere and call it again: episodes and jobs that are done stay done. Raises
    MetatrainerError when no job ended well.
    """
    with Ledger(run.ledger) as ledger:
        hidden_seed = enter(ledger, run.name, settings)
        budget = _Budget(order, settings, ledger, tell)
        asyncio.run(_play(order, settings, run, ledger, agent, budget, hidden_seed))
        best = _best(ledger)
        if best is None:
            raise MetatrainerError(
                f"none of {len(ledger.episodes())} episodes led to a trained student; see them "
                f"with: metatrainer watch {run.path}"
            )
        tell(1.0, "scoring the best student on fresh items")
        return _hand_over(best, order, settings, run, ledger, hidden_seed)


class _Budget:
    """Gives out episodes until one of the limits is reached."""

    def __init__(self, order: Order, settings: RunSettings, ledger: Ledger, tell: Tell):
        self._order, self._settings, self._ledger, self._tell = order, settings, ledger, tell
        self._before = ledger.seconds()
        self._began: float | None = None
        self._over = frozenset(row.idx for row in ledger.episodes() if row.done)
        self._indices = (n for n in itertools.count() if n not in self._over)
        self._next = next(self._indices)

    @property
    def spent(self) -> bool:
        """Whether no further episode may begin."""
        seconds, episodes = self._order.seconds, self._order.episodes
        late = seconds is not None and self._elapsed() >= seconds
        return late or (episodes is not None and self._next >= episodes)

    def start(self) -> None:
        """From here on time counts: slots and sandboxes are up."""
        self._began = time.monotonic()

    def take(self) -> int:
        """The next episode to play."""
        taken, self._next = self._next, next(self._indices)
        return taken

    def played(self, text: str) -> None:
        """An episode is over."""
        spent = money.spending(self._ledger, self._settings.money).total
        done = sum(row.done for row in self._ledger.episodes())
        used = (
            (done, self._order.episodes),
            (self._elapsed(), self._order.seconds),
            (spent, self._settings.money.max_usd),
        )
        self._tell(min(1.0, max(part / limit for part, limit in used if limit)), text)

    def _elapsed(self) -> float:
        return self._before + (time.monotonic() - self._began if self._began else 0.0)


async def _play(
    order: Order,
    settings: RunSettings,
    run: RunDir,
    ledger: Ledger,
    agent: Agent,
    budget: _Budget,
    hidden_seed: int,
) -> None:
    if budget.spent:
        return
    async with staff(settings, hidden_seed, ledger) as (pool, validator):
        budget.start()
        failed = 0

        async def seat() -> None:
            nonlocal failed
            while not budget.spent:
                index = budget.take()
                id = EpisodeId("play", 0, 0, index)
                seed = derive(settings.seed, "solve", order.family, index)
                task = draw_task(settings, order.family, seed, hidden_seed)
                said = _said(ledger, str(id))
                try:
                    episode = Episode(id, task, settings, ledger, pool, validator, run.path)
                    terms = await play(episode, _recalled(agent(task, seed), said))
                except BudgetError:
                    return  # whoever has a job under way may have room for more after it
                except AgentError as error:
                    failed += 1
                    if failed == FAILURES:
                        raise AgentError(f"{failed} times in a row, the last: {error}") from None
                    continue
                failed = 0
                score = f", scores {terms.post:.3f}" if terms.post is not None else ""
                budget.played(f"episode {index + 1}: {terms.outcome}{score}")

        # A few more than the pool has lanes, so that agents write while students train; but what is
        # under way when the time is over is played to its end.
        seats = pool.slots if order.seconds is not None else 2 * pool.slots
        seats = min(seats, order.episodes or seats)
        await asyncio.gather(*(seat() for _ in range(seats)))


def _said(ledger: Ledger, episode: str) -> list[Message]:
    """What the agent has written in an episode that was begun before."""
    rows = ledger.messages(episode)
    return [json.loads(row.content) for row in rows if row.role == "assistant"]


def _recalled(policy: Policy, said: Sequence[Message]) -> Policy:
    """A policy that first repeats what is on record. A script comes to the same by itself."""
    return policy if isinstance(policy, Scripted) or not said else _Recalled(policy, said)


class _Recalled:
    def __init__(self, policy: Policy, said: Sequence[Message]):
        self._policy = policy
        self._said: Iterator[Message] = iter(said)

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        return next(self._said, None) or await self._policy.act(messages, tools)


@dataclass(frozen=True)
class _Best:
    job: str
    student: str
    score: Score
    jobs: int


_OK = """
SELECT job.id AS job, job.student, eval.family, n, mean, low, high
FROM job JOIN eval ON eval.scope = job.id JOIN episode ON episode.id = job.episode
WHERE job.outcome = 'ok' AND episode.done AND episode.outcome = 'ok'
ORDER BY mean DESC, job.rowid
"""


def _best(ledger: Ledger) -> _Best | None:
    """The job whose student does best on the run's hidden items; of equals the first."""
    rows = ledger.query(_OK)
    if not rows:
        return None
    row = dict(rows[0])
    return _Best(row.pop("job"), row["student"], Score(**row), len(rows))


def _hand_over(
    best: _Best,
    order: Order,
    settings: RunSettings,
    run: RunDir,
    ledger: Ledger,
    hidden_seed: int,
) -> Solved:
    job_dir = run.path / "jobs" / best.job
    before, after = _report(best, order, settings, ledger, hidden_seed, job_dir)
    low, high = difference(after, before)
    done = Solved(
        family=order.family,
        student=best.student,
        job=best.job,
        episodes=sum(row.done for row in ledger.episodes()),
        jobs=best.jobs,
        chosen_on=best.score,
        before=before,
        after=after,
        gain=after.mean - before.mean,
        low=low,
        high=high,
        usd=money.spending(ledger, settings.money).total,
        seconds=ledger.seconds(),
        folder=run.path / SOLUTION,
    )
    # One that an earlier process handed over, before there was budget for more.
    shutil.rmtree(done.folder, ignore_errors=True)
    with folders.whole(done.folder) as folder:
        for name in ADAPTER:
            shutil.copyfile(job_dir / jobdir.ADAPTER / name, folder / name)
        shutil.copytree(job_dir / jobdir.FILES, folder / "job")
        (folder / "report.json").write_text(json.dumps(done.as_json(), indent=2) + "\n")
        (folder / "README.md").write_text(_card(done, order, settings), encoding="utf-8")
    return done


def _report(
    best: _Best,
    order: Order,
    settings: RunSettings,
    ledger: Ledger,
    hidden_seed: int,
    job_dir: Path,
) -> tuple[Score, Score]:
    """Scores of the best untrained student and of the trained one, on the same fresh items."""
    family = families.get(order.family)
    seed = derive("report", hidden_seed)
    items = _fresh(family, hidden_items(order.family, hidden_seed, settings.evaluation.items), seed)
    rows = [row for row in ledger.evals("baseline") if row.family == order.family]
    untrained = max(rows, key=lambda row: row.mean).student

    def score(scope: str, student: str, adapter: Path | None) -> Score:
        known = [r for r in ledger.evals(scope) if r.student == student]
        if known:
            return _score(known[0])
        began = time.monotonic()
        found = _evaluate(student, adapter, family, items, settings, seed)
        ledger.record_eval(scope, **found.model_dump(), seconds=time.monotonic() - began)
        return found

    before = score(BEFORE, untrained, None)
    return before, score(f"{AFTER} {best.job}", best.student, job_dir / jobdir.ADAPTER)


def _fresh(family: Family, known: list[Item], seed: int) -> list[Item]:
    """Hidden items of another seed, none of which is among those that were chosen by."""
    seen = {json.dumps([item.prompt, item.world], sort_keys=True) for item in known}
    drawn = family.items("hidden", seed, FRESH_ITEMS)
    return [i for i in drawn if json.dumps([i.prompt, i.world], sort_keys=True) not in seen]


def _evaluate(
    student: str,
    adapter: Path | None,
    family: Family,
    items: list[Item],
    settings: RunSettings,
    seed: int,
) -> Score:
    from metatrainer.engine import Engine
    from metatrainer.students.evaluate import evaluate

    engine = Engine.open(catalogue.verified_folder(student), student)
    loaded = engine.load_adapter(adapter) if adapter else None
    return evaluate(engine, loaded, family, items, settings.evaluation, seed)


def _score(row: EvalRow) -> Score:
    return Score(**{key: getattr(row, key) for key in Score.model_fields})


def _card(done: Solved, order: Order, settings: RunSettings) -> str:
    family = families.get(done.family)
    return cards.render(
        "student.md.j2",
        done=done,
        family=family,
        agent=order.agent,
        sha256=catalogue.get(done.student).sha256,
        evaluation=settings.evaluation,
        versions=versions(),
    )
