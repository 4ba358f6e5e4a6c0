"""A whole run of the outer loop: held-out episodes, training, the same held-out episodes again.

Kill it anywhere; the next call with resume=True goes on where it was. Training state is in
tinker-cookbook's checkpoints (one after every step), everything that was sampled is in the ledger.
tinker-cookbook, which takes seconds to import, is imported when a run starts.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer import checkpoints, plan
from metatrainer.outer.service import describe, opened
from metatrainer.outer.start import bring
from metatrainer.pool.base import Pool
from metatrainer.progress import Progress, Silent

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
    with log_to(logs / "train.log"), opened(settings, run_dir) as service:
        stage, recorder = await _prepare(settings, service, ledger, make_episode, progress, over)
        start = bring(settings, run_dir)
        run = _Run(settings, logs, ledger, RecordingService(service, recorder), stage, start)
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
    start: str | None
    """The checkpoint that training begins from; None for a new adapter."""

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
            load_checkpoint_path=self.start,
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
        if self.start:
            trainer = await self.service.create_training_client_from_state_async(self.start)
            return await trainer.save_weights_and_get_sampling_client_async()
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
    """Ask the service for the agent's model, and set up stage and record."""
    from metatrainer.outer.env import Stage
    from metatrainer.outer.replay import Recorder

    model = await describe(service, settings.agent)
    stage = Stage(
        renderer=model.renderer,
        max_tokens=settings.agent.max_tokens,
        context=model.context,
        make=make_episode,
        progress=progress,
        over=over,
    )
    return stage, Recorder(ledger, settings.seed, model.tokenizer.decode)


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
