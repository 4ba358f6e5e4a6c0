"""What a run has cost and what it may cost: prices times what the ledger holds, and hard caps.

A cap is asked before anything is begun: what is under way counts at the most it can cost. Knows
nothing about who sells slots or tokens. All amounts are US dollars.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from metatrainer.config import MoneySettings, RunSettings
from metatrainer.errors import BudgetError, ConfigError
from metatrainer.ledger import Ledger, PodRow
from metatrainer.pool.base import longest_seconds, slots_of

_HOUR = 3600.0
_MILLION = 1e6
_TOKEN_PRICES = (
    "usd_per_million_prompt_tokens",
    "usd_per_million_sampled_tokens",
    "usd_per_million_trained_tokens",
)


@dataclass(frozen=True)
class Spending:
    """What a run has cost so far."""

    jobs: float = 0.0
    """Slots' time of all attempts at jobs."""
    lost: float = 0.0
    """The part of it that went into attempts that were lost."""
    baselines: float = 0.0
    """Slots' time for the untrained students."""
    pods: float = 0.0
    """Rented pods' time, whether jobs ran on them or not; the two above are parts of it."""
    tokens: float = 0.0
    """The agent's tokens: prompts, samples and training."""
    jobs_paid: int = 0
    """Jobs behind the first number, however many attempts each took."""
    per_step: dict[int, float] = field(default_factory=dict)
    """Jobs and tokens of each training step."""

    @property
    def total(self) -> float:
        # A pod is paid for while it boots and waits, too.
        return max(self.jobs + self.baselines, self.pods) + self.tokens

    @property
    def per_job(self) -> float | None:
        """Mean cost of a job, lost attempts included; None before there is one."""
        return self.jobs / self.jobs_paid if self.jobs_paid else None


def slot_usd(money: MoneySettings, seconds: float) -> float:
    """Price of holding one slot for some seconds."""
    return money.usd_per_slot_hour * seconds / _HOUR


def check(settings: RunSettings) -> None:
    """See before anything begins that caps can be kept. Raises ConfigError."""
    money = settings.money
    rate = slots_of(settings.pool) * money.usd_per_slot_hour
    if money.max_usd_per_hour is not None and rate > money.max_usd_per_hour:
        raise ConfigError(
            f"money.max_usd_per_hour is {money.max_usd_per_hour:g}, and {slots_of(settings.pool)}"
            f" slots cost {rate:g} an hour; take fewer workers or raise the cap"
        )
    if money.max_pods is not None and (settings.pool.workers or 1) > money.max_pods:
        raise ConfigError(
            f"money.max_pods is {money.max_pods} and pool.workers {settings.pool.workers}; take"
            " fewer workers or raise the cap"
        )
    if settings.agent.backend == "tinker":
        check_prices(money, _TOKEN_PRICES)


def check_prices(money: MoneySettings, prices: Sequence[str] = _TOKEN_PRICES[:2]) -> None:
    """See that a cap can be kept where a hosted agent plays. Raises ConfigError.

    prices: those that it needs; left out, of an agent that is not trained.
    """
    unknown = [name for name in prices if getattr(money, name) is None]
    if money.max_usd is not None and unknown:
        raise ConfigError(
            f"money.{unknown[0]} is not set: without the price of the hosted agent's tokens"
            " money.max_usd cannot be kept; set it, or leave money.max_usd out"
        )


def admit_job(ledger: Ledger, settings: RunSettings) -> None:
    """Ask whether one more job may start. Raises BudgetError."""
    _admit(ledger, settings, slot_usd(settings.money, longest_seconds(settings)))


def admit_episode(ledger: Ledger, settings: RunSettings) -> None:
    """Ask whether one more episode may be played. Raises BudgetError."""
    _admit(ledger, settings, 0.0)


def admit_pod(
    ledger: Ledger, settings: RunSettings, there: Sequence[float], usd_per_hour: float
) -> None:
    """Ask whether one more pod may be rented. Raises BudgetError.

    there: what the run's pods that are there already cost an hour.
    """
    money = settings.money
    rate = sum(there) + usd_per_hour
    if money.max_pods is not None and len(there) >= money.max_pods:
        raise BudgetError(f"money.max_pods is {money.max_pods}, and so many pods are there already")
    if money.max_usd_per_hour is not None and rate > money.max_usd_per_hour:
        raise BudgetError(
            f"money.max_usd_per_hour is {money.max_usd_per_hour:g}: with one more pod at"
            f" {usd_per_hour:g} all pods cost {rate:g} an hour"
        )
    seconds = settings.runpod.boot_seconds + longest_seconds(settings)
    _admit(ledger, settings, usd_per_hour * seconds / _HOUR)


def pod_usd(pod: PodRow, now: float) -> float:
    """What a pod has cost until it ended, or until now (Unix time)."""
    seconds = (now if pod.ended is None else pod.ended) - pod.began
    return pod.usd_per_hour * max(0.0, seconds) / _HOUR


def spending(ledger: Ledger, money: MoneySettings) -> Spending:
    """Add up a run."""
    with ledger.transaction():
        jobs = ledger.query(_JOBS)
        tokens = ledger.query(_TOKENS)
        (evals,) = ledger.query(_BASELINES)
        pods = ledger.pods()
    per_step: dict[int, float] = {}
    total = lost = tokens_usd = 0.0
    for row in jobs:
        total, lost = total + row["usd"], lost + row["lost"]
        if row["phase"] == "train":
            per_step[row["step"]] = per_step.get(row["step"], 0.0) + row["usd"]
    for row in tokens:
        usd = _token_usd(money, row["prompt"], row["sampled"], row["trained"])
        tokens_usd += usd
        if row["phase"] == "train":
            per_step[row["step"]] = per_step.get(row["step"], 0.0) + usd
    return Spending(
        jobs=total,
        lost=lost,
        baselines=slot_usd(money, evals["seconds"]),
        pods=sum(pod_usd(pod, time.time()) for pod in pods),
        tokens=tokens_usd,
        jobs_paid=sum(row["jobs"] for row in jobs),
        per_step=dict(sorted(per_step.items())),
    )


def episode_usd(ledger: Ledger, money: MoneySettings, episode: str) -> float:
    """What one episode has cost so far: the agent's tokens and its jobs."""
    (jobs,) = ledger.query(_JOBS_OF_EPISODE, episode)
    (used,) = ledger.query(_TOKENS_OF_EPISODE, episode)
    tokens = _token_usd(money, used["prompt"], used["sampled"], used["trained"])
    return float(jobs["usd"]) + tokens


def has_token_prices(money: MoneySettings) -> bool:
    """Whether what a hosted agent reads or writes has a price."""
    return any(getattr(money, name) for name in _TOKEN_PRICES[:2])


def _admit(ledger: Ledger, settings: RunSettings, usd: float) -> None:
    cap = settings.money.max_usd
    if cap is None:
        return
    spent = spending(ledger, settings.money).total
    under_way = len(ledger.open_jobs()) * slot_usd(settings.money, longest_seconds(settings))
    if spent + under_way + usd > cap or spent >= cap:
        raise BudgetError(
            f"money.max_usd is {cap:.2f}: {spent:.2f} is spent, jobs under way may cost"
            f" {under_way:.2f}, the next one {usd:.2f}. Nothing more was begun; raise it in the"
            " run's config.toml and resume the run"
        )


def _token_usd(money: MoneySettings, prompt: int, sampled: int, trained: int) -> float:
    prices = [getattr(money, name) or 0.0 for name in _TOKEN_PRICES]
    return sum(p * n for p, n in zip(prices, (prompt, sampled, trained))) / _MILLION


_JOBS = """
SELECT phase, step, sum(usd) AS usd, sum(CASE WHEN job.outcome = 'lost' THEN usd ELSE 0 END)
    AS lost, count(DISTINCT job.id) AS jobs
FROM job JOIN episode ON episode.id = job.episode WHERE job.done GROUP BY phase, step
"""
_JOBS_OF_EPISODE = "SELECT coalesce(sum(usd), 0.0) AS usd FROM job WHERE done AND episode = ?"
# An episode is trained on as one sequence: its last prompt and what was sampled on it. An agent
# behind a server plays and is not trained; what it used stands in its messages.
_USED = """
SELECT phase, step, episode, prompt_tokens AS prompt, length(tokens) / 4 AS sampled,
    CASE WHEN phase = 'train' AND turn = (SELECT max(turn) FROM turn t
        WHERE t.episode = turn.episode) THEN prompt_tokens + length(tokens) / 4 ELSE 0 END
    AS trained
FROM turn JOIN episode ON episode.id = turn.episode
UNION ALL
SELECT phase, step, episode, content ->> '$.usage.prompt_tokens',
    content ->> '$.usage.sampled_tokens', 0
FROM episode JOIN message ON message.episode = episode.id
WHERE phase = 'play' AND role = 'assistant'
"""
_SUMS = """coalesce(sum(prompt), 0) AS prompt, coalesce(sum(sampled), 0) AS sampled,
    coalesce(sum(trained), 0) AS trained"""
_TOKENS = f"SELECT phase, step, {_SUMS} FROM ({_USED}) GROUP BY phase, step"
_TOKENS_OF_EPISODE = f"SELECT {_SUMS} FROM ({_USED}) WHERE episode = ?"
_BASELINES = "SELECT coalesce(sum(seconds), 0.0) AS seconds FROM eval WHERE scope = 'baseline'"
