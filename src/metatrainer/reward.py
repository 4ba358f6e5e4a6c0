"""The reward of an episode: three terms and their weighted sum. Pure functions of numbers.

Knows nothing about jobs, students or the ledger. The rules are the original experiment's:
total = 0.35 validation + 0.60 quality + 0.05 speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


class RewardConfig(BaseModel):
    """Weights of the reward. The agent's instructions are rendered from the same values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    validation: float = 0.35
    """Weight of the validation term."""
    quality: float = 0.60
    """Weight of the quality term."""
    speed: float = 0.05
    """Weight of the speed term."""
    uplift: float = 0.75
    """Share of (post - best_pre) in quality."""
    absolute: float = 0.25
    """Share of the post score itself in quality."""
    attempt_decay: float = Field(0.5, ge=0, le=1)
    """Factor on validation for each attempt after the first."""
    no_submission: float = -0.1
    """Reward of an episode without any submission that could be parsed."""
    quality_floor: float | None = None
    """Lowest quality of a job that finished. None is the original's rule, under which a student
    made worse scores below a crash; 0 removes that incentive."""


@dataclass(frozen=True)
class Terms:
    """The terms of one episode's reward and what they came from."""

    validation: float
    quality: float
    speed: float
    total: float
    outcome: str
    post: float | None = None
    best_pre: float | None = None


def validation_term(accepted_attempt: int | None, config: RewardConfig) -> float:
    """1.0 for a first-try valid submission (attempt 1), decaying with each further one.

    accepted_attempt: number of the attempt that was valid, from 1; None if none was.
    """
    if accepted_attempt is None:
        return 0.0
    return config.attempt_decay ** (accepted_attempt - 1)


def quality_term(post: float, best_pre: float, config: RewardConfig) -> float:
    """0.25 post + 0.75 (post - best_pre), scores in [0, 1].

    best_pre: best score of any untrained student on the same items.
    """
    quality = config.absolute * post + config.uplift * (post - best_pre)
    return quality if config.quality_floor is None else max(quality, config.quality_floor)


def speed_term(seconds: float, limit: float) -> float:
    """Share of the time limit left unused, in [0, 1]; paid only if the job succeeded."""
    return min(1.0, max(0.0, 1.0 - seconds / limit))


def terms(
    config: RewardConfig,
    *,
    parseable: bool,
    accepted_attempt: int | None,
    outcome: str,
    post: float | None = None,
    best_pre: float | None = None,
    seconds: float = 0.0,
    limit: float = 1.0,
    cheated: bool = False,
) -> Terms:
    """All terms of one episode.

    parseable: the episode had at least one submission that could be parsed.
    outcome: "ok" if the job finished and was scored, else the word for why not.
    cheated: a leak, a model swap or tampering was found: no quality and no validation.
    """
    if not parseable:
        return Terms(0.0, 0.0, 0.0, config.no_submission, outcome)
    if cheated:
        return Terms(0.0, 0.0, 0.0, 0.0, outcome, post, best_pre)
    validation = validation_term(accepted_attempt, config)
    quality = speed = 0.0
    if outcome == "ok" and post is not None and best_pre is not None:
        quality = quality_term(post, best_pre, config)
        speed = speed_term(seconds, limit)
    total = config.validation * validation + config.quality * quality + config.speed * speed
    return Terms(validation, quality, speed, total, outcome, post, best_pre)
