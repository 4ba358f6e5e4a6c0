"""What a run says while it goes on: the events, as a protocol that anything may listen to.

Knows nothing about terminals (metatrainer.console draws) or about who emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from metatrainer.reward import Terms


@dataclass(frozen=True)
class MeanTerms:
    """The reward's terms, each averaged over the episodes of a step."""

    validation: float
    quality: float
    speed: float

    @staticmethod
    def of(terms: Sequence[Terms]) -> MeanTerms:
        n = max(1, len(terms))
        return MeanTerms(
            validation=sum(t.validation for t in terms) / n,
            quality=sum(t.quality for t in terms) / n,
            speed=sum(t.speed for t in terms) / n,
        )


class Progress(Protocol):
    """Events of a run, in the order in which they come.

    run_started, then for each phase: phase, its episodes and (in training) its steps. message may
    come at any time.
    """

    def run_started(self, steps: int, episodes: int) -> None:
        """A run begins or goes on: outer steps and episodes that are still to be done, in all."""

    def phase(self, name: str, episodes: int = 0) -> None:
        """A part of the run begins ("baselines", "held-out before", "training", ...).

        episodes: how many it will play; 0 where it plays none or cannot know.
        """

    def episode_finished(self, id: str, terms: Terms) -> None:
        """One episode has its reward."""

    def step_finished(self, step: int, mean: float, terms: MeanTerms, seconds: float) -> None:
        """One outer update is done. mean: mean total reward of its episodes."""

    def message(self, text: str) -> None:
        """One line that a person should read."""


class Silent:
    """Listens to everything and says nothing."""

    def run_started(self, steps: int, episodes: int) -> None:
        pass

    def phase(self, name: str, episodes: int = 0) -> None:
        pass

    def episode_finished(self, id: str, terms: Terms) -> None:
        pass

    def step_finished(self, step: int, mean: float, terms: MeanTerms, seconds: float) -> None:
        pass

    def message(self, text: str) -> None:
        pass
