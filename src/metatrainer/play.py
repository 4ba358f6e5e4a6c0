"""Episodes outside of a run: one to watch, or many to compare agents on the same tasks.

Knows how such episodes are set up and which agents there are: scripts, the settings' model, the
trained agents of runs, and models behind servers. Knows nothing about how anything is shown.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metatrainer import money, rundir
from metatrainer.agent.heard import heard
from metatrainer.agent.policies import SCRIPTS, Message, Policy, Scripted
from metatrainer.agent.task import Task, draw_task
from metatrainer.chat import ChatFormat
from metatrainer.config import AgentSettings, RunSettings, nearest
from metatrainer.engine import Engine, SampleRequest, SamplingParams
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.errors import AgentError, ConfigError, ContextFull
from metatrainer.experiment import enter, staff
from metatrainer.ledger import Ledger
from metatrainer.outer.plan import derive
from metatrainer.reward import Terms
from metatrainer.students import catalogue
from metatrainer.tinker.checkpoints import CheckpointStore

MODEL = "model"
"""The agent that is agent.model of the settings, sampled on the embedded engine."""
AGENTS = (*SCRIPTS, MODEL)
ENDPOINT = "openai:"
"""What the names of agents behind OpenAI-compatible servers begin with: openai:MODEL@URL."""
FAILURES = 0.05
"""A larger share of episodes whose agent failed, and more than one, ends a comparison."""

Agent = Callable[[Task, int], Policy]
"""Makes a policy for one episode from its task and a seed."""


@dataclass(frozen=True)
class Played:
    """One episode of one agent; those of the same family and index had the same task."""

    agent: str
    family: str
    index: int
    terms: Terms | None
    """None if the agent failed: then there is no reward to compare."""
    attempts: int
    student: str | None
    """Base model of the job; None without one."""
    usd: float = 0.0
    """The agent's tokens and the job."""


async def play_one(
    settings: RunSettings,
    family: str,
    agent: Agent,
    seed: int,
    folder: Path,
    hear: Callable[[Message], None],
) -> Terms:
    """Play an episode to its reward. Raises ConfigError for an unknown family.

    folder: gets its ledger and its job. hear: told every message as it is said.
    """
    with Ledger(folder / "ledger.sqlite") as ledger:
        hidden_seed = enter(ledger, folder.name, settings)
        task = draw_task(settings, family, seed, hidden_seed)
        async with staff(settings, hidden_seed, ledger, sandboxes=1) as (pool, validator):
            id = EpisodeId("play", 0, 0, 0)
            episode = Episode(id, task, settings, ledger, pool, validator, folder)
            terms = await play(episode, agent(task, seed), hear)
        for job in ledger.jobs():
            ended = f"{job.outcome} {job.message}".strip()
            hear({"role": "job", "content": f"{job.student}: {ended}, {job.seconds:.1f} s"})
        return terms


async def play_all(
    settings: RunSettings,
    agents: Mapping[str, Agent],
    names: Sequence[str],
    n: int,
    folder: Path,
    on_played: Callable[[Played], None],
) -> list[Played]:
    """Have each agent play the same n tasks of each family, with the same hidden items.

    folder: gets a ledger and the jobs. on_played: told each episode as it ends. An agent may fail
    in a few episodes; raises AgentError beyond that.
    """
    failed = 0
    episodes = n * len(names) * len(agents)
    with Ledger(folder / "ledger.sqlite") as ledger:
        hidden_seed = enter(ledger, folder.name, settings)
        async with staff(settings, hidden_seed, ledger) as (pool, validator):
            # A few more than the pool has lanes, so that agents write while students train.
            seats = asyncio.Semaphore(2 * pool.slots)

            async def try_to_play(agent: str, id: EpisodeId, family: str) -> Terms | None:
                nonlocal failed
                seed = derive(settings.seed, "eval", family, id.index)
                task = draw_task(settings, family, seed, hidden_seed)
                episode = Episode(id, task, settings, ledger, pool, validator, folder)
                try:
                    return await play(episode, agents[agent](task, seed))
                except AgentError as error:
                    failed += 1
                    if failed > max(1, FAILURES * episodes):
                        raise AgentError(f"{failed} episodes failed; the last: {error}") from None
                    return None

            async def one(agent: str, id: EpisodeId, family: str) -> Played:
                async with seats:
                    terms = await try_to_play(agent, id, family)
                row = ledger.finished_episode(str(id))
                student = row.student if row else None
                attempts = len(ledger.attempts(str(id)))
                usd = money.episode_usd(ledger, settings.money, str(id))
                played = Played(agent, family, id.index, terms, attempts, student, usd)
                on_played(played)
                return played

            return await asyncio.gather(
                *(
                    one(agent, EpisodeId("play", number, group, index), family)
                    for index in range(n)
                    for group, family in enumerate(names)
                    for number, agent in enumerate(agents)
                )
            )


def find_agent(name: str, settings: RunSettings) -> Agent:
    """The agent of a name: a script, the settings' model, a run, which is its trained agent, or
    openai:MODEL@URL.

    Raises ConfigError for another name, for a run that has trained none, and for a server that
    cannot be asked.
    """
    if name == MODEL:
        return _sampled(settings.agent, None)
    if name.startswith(ENDPOINT):
        return _asked(name, settings)
    if name in SCRIPTS:
        return lambda task, seed: Scripted(SCRIPTS[name](task, random.Random(seed)))
    try:
        run = rundir.find(name)
    except ConfigError as error:
        hint = nearest(name, list(AGENTS))
        raise ConfigError(f"unknown agent {name!r}; {hint} Or a run: {error}") from None
    store = CheckpointStore(run.path / "checkpoints")
    saved = [path for path in store.paths() if "/sampler_weights/" in path]
    if not saved:
        raise ConfigError(
            f"run {name} has no trained agent yet; go on with it: "
            f"metatrainer train --resume {run.path}"
        )
    return _sampled(run.settings.agent, store.find(saved[-1])[0] / "adapter")


def _asked(name: str, settings: RunSettings) -> Agent:
    """An agent behind a server, which is there and has the model."""
    from metatrainer.agent import endpoint

    money.check_prices(settings.money)
    model = endpoint.Endpoint(
        endpoint.parse(name.removeprefix(ENDPOINT)),
        settings.endpoint,
        settings.agent.temperature,
        priced=money.has_token_prices(settings.money),
    )
    model.check()
    return lambda task, seed: endpoint.Asked(model, seed)


def _sampled(settings: AgentSettings, adapter: Path | None) -> Agent:
    """An agent that samples a model of this machine, untrained or with an adapter."""
    if settings.backend != "embedded":
        raise ConfigError(f"{settings.model} is sampled by a hosted service, not on this machine")
    engine = Engine(catalogue.agent_folder(settings.model))
    loaded = engine.load_adapter(adapter) if adapter else None
    lock = threading.Lock()
    return lambda task, seed: Sampled(settings, engine, loaded, lock, seed)


class Sampled:
    """A policy that samples a model of this machine; several share its engine."""

    def __init__(
        self,
        settings: AgentSettings,
        engine: Engine,
        adapter: int | None,
        lock: threading.Lock,
        seed: int,
    ):
        """lock: of the engine, which serves one thread at a time."""
        self._settings = settings
        self._seed = seed
        self._engine, self._adapter, self._lock = engine, adapter, lock
        self._chat = ChatFormat(engine.tokenizer)

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Sample the next message."""
        return await asyncio.to_thread(self._act, messages, tools)

    def _act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        params = SamplingParams(
            self._settings.max_tokens, self._settings.temperature, stop=self._chat.stop
        )
        prompt = self._chat.prompt(messages, tools)
        context = self._engine.config.max_position_embeddings
        if len(prompt) + self._settings.max_tokens > context:
            raise ContextFull(f"{len(prompt)} tokens and a message do not fit into {context}")
        request = SampleRequest(
            prompt, params, adapter=self._adapter, seed=self._seed + len(messages)
        )
        with self._lock:
            (sample,) = self._engine.sample([request])
        turn = self._chat.parse(sample.tokens)
        calls = [(None, call.name, call.arguments) for call in turn.calls]
        return heard(turn.text, calls, turn.errors, None if turn.clean else len(sample.tokens))
