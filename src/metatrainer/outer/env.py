"""Episodes as tinker-cookbook environments, and a run's steps as its data set.

The reward of an episode is the total of its terms, given with its last message. Knows nothing
about how an episode is answered or scored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import tinker
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl import types

from metatrainer.config import RunSettings
from metatrainer.episode import EpisodeId, Reply
from metatrainer.errors import ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer import handled
from metatrainer.outer.conversation import Conversation
from metatrainer.outer.plan import Planned, training_step
from metatrainer.outer.replay import now_playing
from metatrainer.progress import MeanTerms, Progress
from metatrainer.report.alerts import alerts_after
from metatrainer.reward import Terms


class Played(Protocol):
    """What an environment needs of an episode."""

    id: EpisodeId

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    def initial_messages(self) -> list[dict[str, Any]]: ...

    async def respond(self, message: Mapping[str, Any]) -> Reply: ...

    def context_full(self) -> None: ...

    async def outcome(self) -> Terms: ...


EpisodeMaker = Callable[[Planned], Played]


@dataclass(frozen=True)
class Stage:
    """What all episodes of a run share."""

    renderer: Renderer
    max_tokens: int
    """Tokens of one message."""
    context: int | None
    """Tokens that the model takes; None where the service does not say."""
    make: EpisodeMaker
    progress: Progress
    over: frozenset[str] = frozenset()
    """Ids of the episodes that were over before; when they are replayed it is no news."""


class EpisodeEnv(types.Env):
    """One episode. Malformed and cut-off messages are answered like any other; the episode ends
    when it says so, or when no further message fits into the model's context."""

    def __init__(self, planned: Planned, stage: Stage):
        self._planned = planned
        self._stage = stage
        self._stop = stage.renderer.get_stop_sequences()
        self.terms: Terms | None = None
        """Set when the episode is over."""

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int] | list[str]]:
        """The conversation so far. Begins the recording, in the task that will sample."""
        self._episode = self._stage.make(self._planned)
        now_playing(str(self._planned.id))
        messages = self._episode.initial_messages()
        self._talk = Conversation(self._stage.renderer, messages, self._episode.tools)
        if not self._fits():
            raise ConfigError(
                f"the instructions are {self._talk.prompt.length} tokens and a message may be "
                f"{self._stage.max_tokens}, but the model takes {self._stage.context} in all; "
                "lower agent.max_tokens or choose another agent.model"
            )
        return self._talk.prompt, self._stop

    async def step(
        self, action: list[int], *, extra: types.ActionExtra | None = None
    ) -> types.StepResult:
        """Answer a sampled message."""
        reply = await self._episode.respond(self._talk.hear(action))
        overflow = False
        if not reply.done:
            self._talk.answer(reply.messages)
            overflow = not self._fits()
        if reply.done or overflow:
            return await self._end(overflow)
        return types.StepResult(0.0, False, self._talk.prompt, self._stop)

    async def _end(self, overflow: bool) -> types.StepResult:
        if overflow:
            self._episode.context_full()
        self.terms = await self._episode.outcome()
        if (id := str(self._planned.id)) not in self._stage.over:
            self._stage.progress.episode_finished(id, self.terms)
        lost = handled.errored(self.terms.outcome)
        metrics = {
            "validation": self.terms.validation,
            "quality": self.terms.quality,
            "speed": self.terms.speed,
            "context_overflow": float(overflow),
            "errored": float(lost),
        }
        nothing = tinker.ModelInput.empty()
        # The reward of one that errored comes from its group.
        own = 0.0 if lost else self.terms.total
        return types.StepResult(own, True, nothing, self._stop, metrics)

    def _fits(self) -> bool:
        context = self._stage.context
        return context is None or self._talk.prompt.length + self._stage.max_tokens <= context


class EpisodeGroup(types.EnvGroupBuilder):
    """The episodes of one task."""

    def __init__(
        self,
        planned: Sequence[Planned],
        stage: Stage,
        finished: Callable[[list[Terms]], None],
    ):
        """finished: told the terms of the group when all of its episodes are over."""
        self._planned = planned
        self._stage = stage
        self._finished = finished

    async def make_envs(self) -> Sequence[types.Env]:
        return [EpisodeEnv(planned, self._stage) for planned in self._planned]

    async def compute_group_rewards(
        self, trajectory_group: list[types.Trajectory], env_group: Sequence[types.Env]
    ) -> list[tuple[float, types.Metrics]]:
        """Nothing on top of the episodes' own rewards, but for those that errored."""
        terms = [env.terms for env in env_group]
        self._finished(terms)
        return [
            (reward if handled.errored(own.outcome) else 0.0, {})
            for own, reward in zip(terms, handled.rewards(terms))
        ]

    def logging_tags(self) -> list[str]:
        return [self._planned[0].family]


class Curriculum(types.RLDataset):
    """The training steps of a run, each entered in the ledger once its episodes are over."""

    def __init__(self, settings: RunSettings, stage: Stage, ledger: Ledger):
        self._settings = settings
        self._stage = stage
        self._ledger = ledger

    def __len__(self) -> int:
        return self._settings.outer.steps

    def get_batch(self, index: int) -> Sequence[types.EnvGroupBuilder]:
        """The groups of a step."""
        groups = training_step(self._settings, index)
        count = _Count(index, len(groups), self._ledger, self._stage.progress)
        return [EpisodeGroup(group, self._stage, count.add) for group in groups]

    async def __call__(self) -> tuple[Curriculum, None]:
        """The data set as its own builder."""
        return self, None

    def __deepcopy__(self, memo: dict) -> Curriculum:
        """Itself: tinker-cookbook copies its configuration, of which this is a part, to log it."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """What tinker-cookbook's log keeps of it."""
        return self._settings.model_dump(mode="json")


class _Count:
    """Waits for all groups of a step."""

    def __init__(self, step: int, groups: int, ledger: Ledger, progress: Progress):
        self._step = step
        self._missing = groups
        self._ledger = ledger
        self._progress = progress
        self._terms: list[Terms] = []
        self._began = time.monotonic()

    def add(self, terms: list[Terms]) -> None:
        self._terms += terms
        self._missing -= 1
        if self._missing == 0:
            self._finish()

    def _finish(self) -> None:
        seconds = time.monotonic() - self._began
        counted = [t for t in self._terms if not handled.errored(t.outcome)]
        mean = sum(t.total for t in counted) / max(1, len(counted))
        terms = MeanTerms.of(counted)
        outcomes = [t.outcome for t in self._terms]
        alerts = alerts_after(self._ledger, self._step)
        by_policy = handled.of_step(self._ledger, self._step)
        metrics = {
            **asdict(terms),
            "outcomes": {word: outcomes.count(word) for word in sorted(set(outcomes))},
            "handled": asdict(by_policy),
            "alerts": {alert.kind: alert.text for alert in alerts},
        }
        if self._ledger.finish_step(self._step, mean, json.dumps(metrics), seconds):
            self._progress.step_finished(self._step, mean, terms, seconds)
            if told := str(by_policy):
                self._progress.message(f"step {self._step}: {told}")
            for alert in alerts:
                self._progress.message(f"alert at step {alert.step}: {alert.kind}, {alert.text}")
