"""GRPO of one student on one job's environment, on the embedded engine.

The environment (agent-written code) is only asked for its tasks and for rewards of finished
conversations; it lives in a sandbox. The update is prime-rl's: advantage = reward minus group mean,
not divided by the deviation, importance-weighted policy gradient on the sampled tokens themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from metatrainer.engine import AdamParams, Engine, Lane, TrainRow
from metatrainer.errors import EnvError, JobError
from metatrainer.families import Family
from metatrainer.inner.rollout import Limits, Question, Rollout, roll_out
from metatrainer.jobs.spec import TrainingSpec
from metatrainer.sandbox.host import EnvSession, TaskRow

MAX_TURNS = 6
_CLIP = 1.0


@dataclass(frozen=True)
class TrainedJob:
    """What training leaves: an adapter in the engine and the curve of how it got there."""

    adapter: int
    curve: list[dict[str, float]]
    rollouts: int
    tokens: int


class OnStep(Protocol):
    """Called after each step with that step's row of the curve."""

    def __call__(self, row: dict[str, float]) -> None: ...


def train_job(
    engine: Engine | Lane,
    spec: TrainingSpec,
    tasks: Sequence[TaskRow],
    env: EnvSession,
    family: Family,
    seed: int,
    deadline: float,
    on_step: OnStep = lambda row: None,
) -> TrainedJob:
    """Train a fresh adapter for spec.max_steps steps.

    tasks: what `env` has loaded, after it was checked; env scores their conversations.
    deadline: engine.clock() past which no further step starts.
    Raises EnvError where the environment fails, JobError("timeout") past the deadline and
    JobError("diverged") where the loss or a weight is no longer finite.
    """
    questions = [question(task) for task in tasks]
    adapter = engine.create_adapter(spec.lora_rank, alpha=2 * spec.lora_rank, seed=seed)
    order = _endless(len(tasks), seed)
    curve: list[dict[str, float]] = []
    tokens = 0
    try:
        for step in range(spec.max_steps):
            if engine.clock() > deadline:
                done = f"stopped at step {step} of {spec.max_steps}"
                raise JobError("timeout", f"{done}: out of time")
            started = engine.clock()
            chosen = _whole_groups(order, spec)
            seeds = [(seed * 100_003 + step) * 10_007 + i for i in range(len(chosen))]
            limits = Limits(MAX_TURNS, spec.max_tokens, spec.temperature)
            asked = [questions[t] for t in chosen]
            rollouts = roll_out(engine, adapter, family, asked, limits, seeds)
            scored = env.score([(t, r.messages) for t, r in zip(chosen, rollouts)])
            rewards = [s.reward for s in scored]
            if all(reward is None for reward in rewards):
                raise EnvError("reward", f"every reward failed: {scored[0].error}")
            advantages = group_advantages(rewards, spec.group_size)
            loss = _update(engine, adapter, rollouts, advantages, spec)
            if not math.isfinite(loss):
                raise JobError("diverged", f"the loss is {loss} at step {step}")
            tokens += sum(len(r.tokens) for r in rollouts)
            seconds = engine.clock() - started
            curve.append(_row(step, rollouts, rewards, advantages, spec.group_size, seconds))
            on_step(curve[-1])
    except BaseException:
        engine.delete_adapter(adapter)
        raise
    return TrainedJob(adapter, curve, spec.max_steps * spec.batch_size, tokens)


def question(task: TaskRow) -> Question:
    """What a rollout of a task starts from."""
    return Question(task.prompt, task.data["world"], task.system_prompt or "")


def _whole_groups(order: Iterator[int], spec: TrainingSpec) -> list[int]:
    """Task numbers of one step's rollouts, group by group."""
    groups = [next(order) for _ in range(spec.batch_size // spec.group_size)]
    return [task for task in groups for _ in range(spec.group_size)]


def group_advantages(rewards: list[float | None], group_size: int) -> list[float]:
    """Reward minus the mean of its group. A rollout without a reward counts nowhere."""
    advantages: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        known = [r for r in group if r is not None]
        mean = sum(known) / len(known) if known else 0.0
        advantages += [0.0 if r is None else r - mean for r in group]
    return advantages


def train_row(rollout: Rollout, advantage: float) -> TrainRow:
    """A rollout as a training sequence: the advantage stands where the student sampled."""
    whole = rollout.prompt + rollout.tokens
    blank = [0.0] * (len(rollout.prompt) - 1)
    return TrainRow(
        tokens=whole[:-1],
        targets=whole[1:],
        old_logprobs=blank + rollout.logprobs,
        advantages=blank + [advantage if s else 0.0 for s in rollout.sampled],
    )


def _update(
    engine: Engine | Lane,
    adapter: int,
    rollouts: list[Rollout],
    advantages: list[float],
    spec: TrainingSpec,
) -> float:
    """One step on all rollouts that carry a signal; none, no step. Returns the loss a token."""
    used = [
        (r, a)
        for r, a in zip(rollouts, advantages)
        if a != 0 and len(r.prompt) + len(r.tokens) <= spec.seq_len
    ]
    count = sum(sum(r.sampled) for r, _ in used)
    if not count:
        return 0.0
    rows = [train_row(rollout, advantage / count) for rollout, advantage in used]
    adam = AdamParams(spec.learning_rate, grad_clip_norm=_CLIP)
    output, stepped = engine.update(rows, adapter, "importance_sampling", adam)
    norm = stepped["grad_norm"]
    return output.loss if math.isfinite(norm) else norm


def _row(
    step: int,
    rollouts: list[Rollout],
    rewards: list[float | None],
    advantages: list[float],
    group_size: int,
    seconds: float,
) -> dict[str, float]:
    known = [r for r in rewards if r is not None]
    groups = [advantages[i : i + group_size] for i in range(0, len(advantages), group_size)]
    return {
        "step": step,
        "reward": sum(known) / len(known),
        "reward_errors": len(rewards) - len(known),
        "dead_groups": sum(not any(group) for group in groups) / len(groups),
        "unfinished": sum(not r.finished for r in rollouts) / len(rollouts),
        "tokens": sum(sum(r.sampled) for r in rollouts) / len(rollouts),
        "seconds": seconds,
    }


def _endless(n: int, seed: int) -> Iterator[int]:
    """All numbers below n in random order, again and again."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(n), n)
