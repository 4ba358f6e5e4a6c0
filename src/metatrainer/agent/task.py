"""A task: what one episode is about, drawn from a family in the open.

The hidden items come from the run's hidden seed; they are in the rules for validation and nowhere
else. Knows nothing about workspaces, pools or rewards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from metatrainer import families
from metatrainer.config import RunSettings
from metatrainer.families import Family, Item
from metatrainer.jobs.validate import TaskRules

DEV_EXAMPLES = 2
"""Worked examples that the agent is shown."""


@dataclass(frozen=True)
class Task:
    """One task, the same for the same settings, family and seed."""

    id: str
    family: Family
    split: str
    """train or heldout: whether the agent learns from this family."""
    seed: int
    """Seed of the dev examples and of the jobs that are written for the task."""
    dev: tuple[Item, ...]
    rules: TaskRules

    @property
    def spec_json(self) -> str:
        """What the ledger keeps: all of the task but its hidden items."""
        return json.dumps(
            {
                "family": self.family.name,
                "seed": self.seed,
                "dev": [item.prompt for item in self.dev],
                "students": list(self.rules.students),
                "max_rollouts": self.rules.max_rollouts,
                "max_seconds": self.rules.max_seconds,
            }
        )


def draw_task(settings: RunSettings, family: str, seed: int, hidden_seed: int) -> Task:
    """The task of a seed. Raises ConfigError for an unknown family.

    hidden_seed: the run's, kept in the ledger.
    """
    found = families.get(family)
    dev = tuple(found.items("dev", seed, DEV_EXAMPLES))
    rules = TaskRules(
        family=found,
        students=list(settings.students),
        max_rollouts=settings.limits.max_rollouts,
        max_seconds=settings.limits.max_seconds,
        hidden=hidden_items(family, hidden_seed, settings.evaluation.items),
        dev=list(dev),
    )
    split = "heldout" if family in settings.heldout else "train"
    return Task(f"{family}-{seed}", found, split, seed, dev, rules)


@lru_cache(maxsize=32)
def hidden_items(family: str, hidden_seed: int, n: int) -> list[Item]:
    """The hidden evaluation of a family in one run."""
    return families.get(family).items("hidden", hidden_seed, n)
