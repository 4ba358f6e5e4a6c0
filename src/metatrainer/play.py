"""One episode on its own, to watch: any family, played by a script or by the settings' model.

Knows how such an episode is set up; knows nothing about how its messages are shown.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metatrainer.agent.policies import SCRIPTS, Message, Policy, Scripted
from metatrainer.agent.task import Task, draw_task
from metatrainer.agent.validator import Validator
from metatrainer.chat import ChatFormat
from metatrainer.config import AgentSettings, RunSettings, nearest
from metatrainer.engine import Engine, SampleRequest, SamplingParams
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.errors import ConfigError
from metatrainer.experiment import enter, running
from metatrainer.ledger import Ledger
from metatrainer.pool.local import LocalPool
from metatrainer.reward import Terms
from metatrainer.students import catalogue

MODEL = "model"
"""The agent that is agent.model of the settings, sampled on the embedded engine."""
AGENTS = (*SCRIPTS, MODEL)


async def play_one(
    settings: RunSettings,
    family: str,
    agent: str,
    seed: int,
    folder: Path,
    hear: Callable[[Message], None],
) -> Terms:
    """Play an episode to its reward. Raises ConfigError for an unknown family or agent.

    folder: gets its ledger and its job. hear: told every message as it is said.
    """
    with Ledger(folder / "ledger.sqlite") as ledger:
        hidden_seed = enter(ledger, folder.name, settings)
        task = draw_task(settings, family, seed, hidden_seed)
        policy = make_policy(agent, task, settings.agent, seed)
        pool, validator = (
            LocalPool(settings, hidden_seed),
            Validator(1, settings.unsafe_without_sandbox),
        )
        async with running(pool), running(validator):
            id = EpisodeId("play", 0, 0, 0)
            episode = Episode(id, task, settings, ledger, pool, validator, folder)
            terms = await play(episode, policy, hear)
        for job in ledger.jobs():
            ended = f"{job.outcome} {job.message}".strip()
            hear({"role": "job", "content": f"{job.student}: {ended}, {job.seconds:.1f} s"})
        return terms


def make_policy(agent: str, task: Task, settings: AgentSettings, seed: int) -> Policy:
    """The agent of a name: one of the scripts, or the settings' model. Raises ConfigError."""
    if agent == MODEL:
        return Sampled(settings, seed)
    if agent not in SCRIPTS:
        raise ConfigError(f"unknown agent {agent!r}; {nearest(agent, list(AGENTS))}")
    return Scripted(SCRIPTS[agent](task, random.Random(seed)))


class Sampled:
    """A policy that samples a model of this machine, untrained."""

    def __init__(self, settings: AgentSettings, seed: int):
        self._settings = settings
        self._seed = seed
        self._engine = Engine(catalogue.agent_folder(settings.model))
        self._chat = ChatFormat(self._engine.tokenizer)

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Sample the next message."""
        return await asyncio.to_thread(self._act, messages, tools)

    def _act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        params = SamplingParams(
            self._settings.max_tokens, self._settings.temperature, stop=self._chat.stop
        )
        prompt = self._chat.prompt(messages, tools)
        request = SampleRequest(prompt, params, seed=self._seed + len(messages))
        turn = self._chat.parse(self._engine.sample([request])[0].tokens)
        return {
            "role": "assistant",
            "content": turn.text,
            "tool_calls": [
                {"id": f"call-{n}", "name": call.name, "arguments": call.arguments}
                for n, call in enumerate(turn.calls)
            ],
            "errors": list(turn.errors),
        }
