"""Episodes outside of a run: one to watch, or many to compare agents on the same tasks.

Knows how such episodes are set up and which agents there are: scripts, the settings' model, the
trained agents of runs, and models behind servers. Knows nothing about how anything is shown.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metatrainer import money, rundir
from metatrainer.agent.policies import SCRIPTS, Message, Policy, Scripted
from metatrainer.agent.task import Task, draw_task
from metatrainer.config import RunSettings, nearest
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.errors import AgentError, ConfigError
from metatrainer.experiment import enter, staff
from metatrainer.ledger import Ledger
from metatrainer.outer import checkpoints
from metatrainer.outer.plan import derive
from metatrainer.reward import Terms

MODEL = "model"
"""The agent that is agent.model of the settings, sampled untrained."""
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
        return _sampled(settings, Path(), None)
    if name.startswith(ENDPOINT):
        return _asked(name, settings)
    if name in SCRIPTS:
        return lambda task, seed: Scripted(SCRIPTS[name](task, random.Random(seed)))
    try:
        run = rundir.find(name)
    except ConfigError as error:
        hint = nearest(name, list(AGENTS))
        raise ConfigError(f"unknown agent {name!r}; {hint} Or a run: {error}") from None
    last = checkpoints.last(run.path / "logs", "sampler_path")
    if last is None:
        raise ConfigError(
            f"run {name} has no trained agent yet; go on with it: "
            f"metatrainer train --resume {run.path}"
        )
    return _sampled(run.settings, run.path, last["sampler_path"])


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


def _sampled(settings: RunSettings, folder: Path, path: str | None) -> Agent:
    """An agent on its service, without an adapter or with a checkpoint of a run's folder."""
    from metatrainer.outer import policy, preflight, service

    async def opened() -> tuple[service.Model, Any]:
        base = None if path else settings.agent.model
        sampler = await client.create_sampling_client_async(model_path=path, base_model=base)
        return await service.describe(client, settings.agent), sampler

    if settings.agent.backend == "tinker":
        money.check_prices(settings.money)
    preflight.check(settings)
    client = service.connect(settings, folder)
    model, sampler = asyncio.run(opened())

    def make(task: Task, seed: int) -> Policy:
        return policy.Sampled(model, sampler, settings.agent, seed)

    if hasattr(client, "close"):
        weakref.finalize(make, client.close).atexit = False
    return make
