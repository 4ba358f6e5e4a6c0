"""Which episodes a run consists of: pure functions of its settings, so that a resumed run has the
same ones. Knows nothing about how they are played.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from metatrainer.config import RunSettings
from metatrainer.episode import EpisodeId

HeldOut = Literal["heldout_before", "heldout_after"]


@dataclass(frozen=True)
class Planned:
    """An episode that a run is going to play."""

    id: EpisodeId
    family: str
    task_seed: int


def training_step(settings: RunSettings, step: int) -> list[list[Planned]]:
    """The groups of one outer step. A group shares its task; families take turns over groups."""
    outer = settings.outer
    groups = []
    for group in range(outer.groups):
        family = settings.families[(step * outer.groups + group) % len(settings.families)]
        task_seed = derive(settings.seed, "train", step, group)
        ids = [EpisodeId("train", step, group, i) for i in range(outer.group_size)]
        groups.append([Planned(id, family, task_seed) for id in ids])
    return groups


def training(settings: RunSettings) -> list[Planned]:
    """The episodes of all outer steps."""
    steps = (training_step(settings, step) for step in range(settings.outer.steps))
    return [planned for groups in steps for group in groups for planned in group]


def heldout(settings: RunSettings, phase: HeldOut) -> list[Planned]:
    """The held-out episodes before or after training: each a task of its own, the same in both."""
    return [
        Planned(EpisodeId(phase, 0, group, i), family, derive(settings.seed, "heldout", family, i))
        for group, family in enumerate(settings.heldout)
        for i in range(settings.outer.heldout_episodes)
    ]


def whole_run(settings: RunSettings) -> list[Planned]:
    """Every episode, in the order of play."""
    return [
        *heldout(settings, "heldout_before"),
        *training(settings),
        *heldout(settings, "heldout_after"),
    ]


def derive(*parts: object) -> int:
    """A seed from anything that has a text, the same in every process: 31 bits, as SDKs take."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
