"""Scoring a student on items: the share of exact answers, with its interval.

Sees a base model, an adapter and items; never an environment, a reward function or a job.
"""

from __future__ import annotations

from metatrainer.config import EvalSettings
from metatrainer.engine import Engine, Lane
from metatrainer.families import Family, Item
from metatrainer.inner.rollout import Limits, Question, roll_out
from metatrainer.students.score import Score, wilson


def evaluate(
    engine: Engine | Lane,
    adapter: int | None,
    family: Family,
    items: list[Item],
    settings: EvalSettings,
    seed: int,
) -> Score:
    """Score the base model (adapter None) or an adapter; same seed and items, comparable scores."""
    rollouts = roll_out(
        engine,
        adapter,
        family,
        [Question(item.prompt, item.world) for item in items],
        Limits(settings.max_turns, settings.max_tokens, settings.temperature),
        [seed * 1_000_003 + i for i in range(len(items))],
    )
    right = sum(
        family.correct(rollout.reply, item.answer)
        for rollout, item in zip(rollouts, items, strict=True)
    )
    low, high = wilson(right, len(items))
    return Score(
        student=engine.name,
        family=family.name,
        n=len(items),
        mean=right / len(items),
        low=low,
        high=high,
    )
