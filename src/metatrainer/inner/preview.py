"""A job's environment tried on its untrained student: what it would have to learn from.

A group whose rewards are all alike teaches nothing; where most are, training stands still. Knows
rollouts and rewards, as inner/grpo.py does; trains nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from metatrainer.engine import Engine, Lane
from metatrainer.errors import EnvError
from metatrainer.families import Family
from metatrainer.inner.grpo import MAX_TURNS, group_advantages, question
from metatrainer.inner.rollout import Limits, roll_out
from metatrainer.jobs.findings import Finding
from metatrainer.jobs.spec import JOB_FILE, TrainingSpec
from metatrainer.sandbox.host import EnvSession, TaskRow

FEW = 0.25
"""With a smaller share of groups that teach, most of a job's rollouts are for nothing."""
_SHARE_OF_SAMPLING = 0.4
"""Of a step's time, on a CPU as on a GPU; the rest is the update."""


@dataclass(frozen=True)
class Preview:
    """What the untrained student makes of a job's tasks."""

    rollouts: int
    groups: int
    reward: float
    """Mean reward."""
    all_right: int
    """Groups whose rewards are all the highest that was seen."""
    all_wrong: int
    """Groups whose rewards are all the lowest."""
    alike: int
    """Groups whose rewards are all alike, those two kinds included."""
    unfinished: float
    """Share of conversations that were cut off."""
    longest: int
    """Tokens of the longest conversation."""
    seconds: float
    """What the rollouts and their rewards took."""
    messages: list[list[dict[str, Any]]]
    """A conversation of each group."""

    def seconds_of(self, rollouts: int) -> float:
        """About what training on so many rollouts takes, at the pace of these."""
        return self.seconds / self.rollouts * rollouts / _SHARE_OF_SAMPLING

    def warnings(self, spec: TrainingSpec, package: str, max_seconds: float) -> list[Finding]:
        """No signal, conversations that are too long, too little time."""
        found = []
        if self.groups - self.alike < FEW * self.groups:
            said = (
                f"{self.alike} of {self.groups} groups have equal rewards "
                f"({self.all_right} all right, {self.all_wrong} all wrong)"
            )
            easy = self.all_right > self.all_wrong
            fix = "take harder levels" if easy else "take easier levels, or reward parts"
            found.append(Finding("W-SIGNAL", package, None, said, "", fix))
        if self.longest > spec.seq_len:
            said = f"a conversation had {self.longest} tokens"
            allowed = f"seq_len = {spec.seq_len}; longer ones are left out"
            found.append(Finding("W-SEQ", JOB_FILE, None, said, allowed, "raise seq_len"))
        needed = self.seconds_of(spec.max_steps * spec.batch_size)
        if needed > max_seconds:
            said = f"training would take about {needed:.0f} s"
            fix = "fewer steps or rollouts"
            allowed = f"{max_seconds:.0f} s"
            found.append(Finding("W-TIME", JOB_FILE, None, said, allowed, fix))
        return found


def preview(
    engine: Engine | Lane,
    spec: TrainingSpec,
    tasks: Sequence[TaskRow],
    env: EnvSession,
    family: Family,
    rollouts: int,
    seed: int = 0,
) -> Preview:
    """Roll out as training would, with the base model, on as many whole groups as fit.

    Raises EnvError where the environment fails, JobError("context") for a prompt without room.
    """
    groups = max(1, rollouts // spec.group_size)
    rng = random.Random(seed)
    chosen = [t for t in rng.choices(range(len(tasks)), k=groups) for _ in range(spec.group_size)]
    limits = Limits(MAX_TURNS, spec.max_tokens, spec.temperature)
    asked = [question(tasks[task]) for task in chosen]
    roll_out(engine, None, family, asked[:1], limits, [0])  # what only the first one takes
    began = engine.clock()
    done = roll_out(engine, None, family, asked, limits, list(range(len(chosen))))
    scored = env.score([(task, r.messages) for task, r in zip(chosen, done)])
    seconds = engine.clock() - began
    known = [s.reward for s in scored if s.reward is not None]
    if not known:
        raise EnvError("reward", f"every reward failed: {scored[0].error}")
    starts = range(0, len(chosen), spec.group_size)
    rewards = [[s.reward for s in scored[at : at + spec.group_size]] for at in starts]
    flat = [set(group) for group in rewards if not any(group_advantages(group, len(group)))]
    return Preview(
        rollouts=len(chosen),
        groups=groups,
        reward=fmean(known),
        all_right=sum(values == {max(known)} for values in flat) if min(known) < max(known) else 0,
        all_wrong=sum(values == {min(known)} for values in flat),
        alike=len(flat),
        unfinished=sum(not r.finished for r in done) / len(done),
        longest=max(len(r.prompt) + len(r.tokens) for r in done),
        seconds=seconds,
        messages=[done[start].messages for start in starts],
    )
