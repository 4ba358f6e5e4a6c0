"""Scoring a student on items: the share of exact answers, with its interval.

Sees a base model, an adapter and items; never an environment, a reward function or a job.
"""

from __future__ import annotations

from typing import Any

from metatrainer.config import EvalSettings
from metatrainer.engine import Engine, Lane
from metatrainer.families import Family, Item
from metatrainer.inner.rollout import Limits, Question, roll_out
from metatrainer.students.score import Score

SAMPLES = 3
"""Conversations of a student that are kept to look at."""


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
    return Score.of(engine.name, family.name, right, len(items))


def sample_conversations(
    engine: Engine | Lane, adapter: int | None, family: Family, settings: EvalSettings
) -> list[dict[str, Any]]:
    """A few conversations to look at, each with its messages and whether the reply is right.

    On the dev examples that everybody may see: hidden items are for scores alone.
    """
    items = family.items("dev", 0, SAMPLES)
    limits = Limits(settings.max_turns, settings.max_tokens, settings.temperature)
    questions = [Question(item.prompt, item.world) for item in items]
    rollouts = roll_out(engine, adapter, family, questions, limits, list(range(SAMPLES)))
    return [
        {"correct": family.correct(rollout.reply, item.answer), "messages": rollout.messages}
        for rollout, item in zip(rollouts, items)
    ]
