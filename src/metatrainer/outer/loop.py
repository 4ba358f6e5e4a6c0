"""A whole run of the outer loop: held-out episodes, training, the same held-out episodes again.

Kill it anywhere; the next call with resume=True goes on where it was. Training state is in
tinker-cookbook's checkpoints (one after every step), everything that was sampled is in the ledger.
tinker-cookbook, which takes seconds to import, is imported when a run starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatrainer.config import RunSettings
from metatrainer.errors import AgentError, ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer import checkpoints, plan
from metatrainer.pool.base import Pool
from metatrainer.progress import Progress, Silent
from metatrainer.shown import one_line

if TYPE_CHECKING:
    from metatrainer.outer.env import EpisodeMaker, Stage
    from metatrainer.outer.replay import Recorder


async def train(
    settings: RunSettings,
    run_dir: Path,
    ledger: Ledger,
    pool: Pool,
    make_episode: EpisodeMaker,
    *,
    resume: bool,
    progress: Progress | None = None,
) -> None:
    """Train the agent as the settings say.

    run_dir: gets checkpoints/ and logs/. ledger: has the run entered. pool: is started.
    make_episode: what is planned -> the episode, in practice `episode_maker`.
    resume: go on with what is in run_dir; False refuses to if there is anything.
    Raises ConfigError for settings that cannot work here.
    """
    from metatrainer.outer.replay import RecordingService
    from metatrainer.tinker.seam import log_to

    progress = progress or Silent()
    logs = run_dir / "logs"
    if not resume and checkpoints.exist(logs):
        raise ConfigError(f"{run_dir} holds a run; resume it, or give another folder")
    logs.mkdir(parents=True, exist_ok=True)
    checkpoints.mend(logs)
    over = frozenset(row.id for row in ledger.episodes() if row.done)
    left = [planned for planned in plan.whole_run(settings) if str(planned.id) not in over]
    progress.run_started(settings.outer.steps - len(ledger.steps()), len(left))
    with log_to(logs / "train.log"), _opened(settings, run_dir) as service:
        stage, recorder = await _prepare(settings, service, ledger, make_episode, progress, over)
        run = _Run(settings, logs, ledger, RecordingService(service, recorder), stage)
        await _baselines(settings, ledger, pool, progress)
        await run.heldout("heldout_before")
        await run.training()
        await run.heldout("heldout_after")


@dataclass(frozen=True)
class _Run:
    """What the parts of a run share."""

    settings: RunSettings
    logs: Path
    ledger: Ledger
    service: Any
    stage: Stage

    async def heldout(self, phase: plan.HeldOut) -> None:
        """Play what is left of the held-out episodes, with the untrained agent or the trained."""
        from tinker_cookbook.completers import TinkerTokenCompleter
        from tinker_cookbook.rl.rollouts import do_single_rollout

        from metatrainer.outer.env import EpisodeEnv

        left = self._left(plan.heldout(self.settings, phase))
        self.stage.progress.phase(_TITLES[phase], len(left))
        if not left:
            return
        agent = self.settings.agent
        sampler = await self._sampler(trained=phase == "heldout_after")
        policy = TinkerTokenCompleter(sampler, agent.max_tokens, agent.temperature)
        envs = [EpisodeEnv(planned, self.stage) for planned in left]
        await asyncio.gather(*(do_single_rollout(policy, env) for env in envs))

    async def training(self) -> None:
        """Run, or go on with, tinker-cookbook's loop."""
        from tinker_cookbook.rl import train as cookbook

        from metatrainer.outer.env import Curriculum
        from metatrainer.tinker.seam import serve

        outer, agent = self.settings.outer, self.settings.agent
        self.stage.progress.phase("training", len(self._left(plan.training(self.settings))))
        last = checkpoints.last(self.logs, "state_path")
        if last and last["batch"] >= outer.steps:
            return
        config = cookbook.Config(
            learning_rate=outer.learning_rate,
            dataset_builder=Curriculum(self.settings, self.stage, self.ledger),
            model_name=agent.model,
            recipe_name="metatrainer",
            max_tokens=agent.max_tokens,
            log_path=str(self.logs),
            lora_rank=agent.lora_rank,
            temperature=agent.temperature,
            renderer_name=agent.renderer,
            # A step that is played again, from the record, must meet the weights it was sampled on.
            save_every=1,
            eval_every=0,
            remove_constant_reward_groups=True,
            # What an agent does wrong is answered; any other error stops the run, to be resumed.
            rollout_error_tolerance=False,
            num_groups_to_log=0,
            rollout_json_export=False,
        )
        with serve(self.service):
            await cookbook.main(config)

    async def _sampler(self, trained: bool) -> Any:
        last = checkpoints.last(self.logs, "sampler_path") if trained else None
        if last:
            return await self.service.create_sampling_client_async(model_path=last["sampler_path"])
        model = self.settings.agent.model
        return await self.service.create_sampling_client_async(base_model=model)

    def _left(self, planned: list[plan.Planned]) -> list[plan.Planned]:
        return [p for p in planned if str(p.id) not in self.stage.over]


_TITLES = {"heldout_before": "held-out before", "heldout_after": "held-out after"}


async def _prepare(
    settings: RunSettings,
    service: Any,
    ledger: Ledger,
    make_episode: EpisodeMaker,
    progress: Progress,
    over: frozenset[str],
) -> tuple[Stage, Recorder]:
    """Ask the service for the model's tokenizer and context, and set up stage and record."""
    from tinker_cookbook import tokenizer_utils

    from metatrainer.outer import renderer
    from metatrainer.outer.env import Stage
    from metatrainer.outer.replay import Recorder

    agent = settings.agent
    sampler = await service.create_sampling_client_async(base_model=agent.model)
    tokenizer = await asyncio.to_thread(sampler.get_tokenizer)
    if agent.backend == "embedded":
        tokenizer_utils.register_tokenizer(agent.model, lambda: tokenizer)
    stage = Stage(
        renderer=renderer.get(agent.renderer, tokenizer),
        max_tokens=agent.max_tokens,
        context=await _context(service, agent.model),
        make=make_episode,
        progress=progress,
        over=over,
    )
    return stage, Recorder(ledger, settings.seed, tokenizer.decode)


async def _baselines(settings: RunSettings, ledger: Ledger, pool: Pool, progress: Progress) -> None:
    """Measure the untrained students, once in a run, before the first episode needs it."""
    progress.phase("baselines")
    known = {row.family for row in ledger.evals("baseline")}
    for family in (*settings.families, *settings.heldout):
        if family in known:
            continue
        began = time.monotonic()
        scores = await pool.baselines(family)
        seconds = (time.monotonic() - began) / max(1, len(scores))
        with ledger.transaction():
            for s in scores:
                ledger.record_eval(
                    "baseline", s.student, s.family, s.n, s.mean, s.low, s.high, seconds
                )


async def _context(service: Any, model: str) -> int | None:
    capabilities = await service.get_server_capabilities_async()
    lengths = [m.max_context_length for m in capabilities.supported_models if m.model_name == model]
    return lengths[0] if lengths else None


@contextmanager
def _opened(settings: RunSettings, run_dir: Path) -> Iterator[Any]:
    """The Tinker service that the settings name."""
    if settings.agent.backend == "tinker":
        yield from _hosted()
        return
    from metatrainer.students import catalogue
    from metatrainer.tinker.client import ServiceClient

    folder = catalogue.agent_folder(settings.agent.model)
    service = ServiceClient(run_dir / "checkpoints", lambda _: _engine(folder), settings.seed)
    try:
        yield service
    finally:
        service.close()


def _hosted() -> Iterator[Any]:
    import tinker

    from metatrainer.outer import preflight

    try:
        yield preflight.hosted()
    except tinker.TinkerError as error:
        raise AgentError(f"the Tinker service failed: {one_line(str(error), 300)}") from error


def _engine(folder: Path) -> Any:
    from metatrainer.engine import Engine

    return Engine(folder)
