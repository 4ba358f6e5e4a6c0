"""Shows a language model how a student works: how tools are called, and little skill beyond that.

A model that was never taught to call tools scores nothing, so that reinforcement learning has
nothing to choose from. It is trained, all its weights or an adapter that is then merged, on the
same synthetic conversations as the nano students, of which few are right. Knows nothing about jobs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metatrainer import folders
from metatrainer.chat import ChatFormat
from metatrainer.engine import AdamParams, Engine, TrainRow
from metatrainer.engine.files import save_model
from metatrainer.nano.traces import Skill, Trace, student_traces


@dataclass(frozen=True)
class Priming:
    """How long and how fast."""

    steps: int = 400
    batch: int = 64
    full: bool = False
    """All weights; else an adapter."""
    rank: int = 64
    """Of the adapter."""
    learning_rate: float = 5e-4
    warmup: int = 20
    seed: int = 0


FULL_RATE = 1e-4
"""Learning rate that suits all weights: an adapter's is several times as high."""
SKILLS = {
    "persona": Skill(share=1 / 6, right=0.12, lazy=0.3),
    "inventory": Skill(share=1 / 6, right=0.12, lazy=0.3),
    "ledger": Skill(share=1 / 6, right=0.15, lazy=0.3),
    "routes": Skill(share=1 / 6, right=0.12, lazy=0.3),
    "calendar": Skill(share=1 / 6, right=0.15, lazy=0.3),
    "triage": Skill(share=1 / 6, right=0.12, lazy=0.3),
}
"""Of every family the same, so that which family a student is good at is its own doing."""


def prime(engine: Engine, out: Path, how: Priming) -> Iterator[tuple[int, float]]:
    """Train, and write the new model's folder `out` at the end. Yields (steps done, mean loss of a
    learnt token)."""
    chat = ChatFormat(engine.tokenizer)
    traces = student_traces(SKILLS, how.steps * how.batch, how.seed, chat)
    longest = engine.config.max_position_embeddings
    traces = [trace for trace in traces if len(trace.tokens) <= longest]
    adapter = None
    if how.full:
        engine.train_all()
    else:
        adapter = engine.create_adapter(how.rank, alpha=2 * how.rank, seed=how.seed)
    rng = random.Random(how.seed)
    for step in range(how.steps):
        batch = rng.sample(traces, how.batch)
        rate = how.learning_rate * min(1.0, (step + 1) / how.warmup) * (1 - step / how.steps)
        adam = AdamParams(rate, grad_clip_norm=1.0)
        output, _ = engine.update(_rows(batch), adapter, "cross_entropy", adam)
        yield step + 1, output.loss
    with folders.whole(out) as folder:
        save_model(folder, engine.config, engine.weights(adapter))
        engine.tokenizer.save_pretrained(folder)


def _rows(batch: list[Trace]) -> list[TrainRow]:
    """Each token that is to be learnt weighs the same."""
    weight = 1 / sum(sum(trace.learn) for trace in batch)
    return [
        TrainRow(
            tokens=trace.tokens[:-1],
            targets=trace.tokens[1:],
            weights=[weight if learn else 0.0 for learn in trace.learn[1:]],
        )
        for trace in batch
    ]
