"""Makes the episodes that a run plans. Knows where a task's seed and its hidden items come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from metatrainer.agent.task import draw_task
from metatrainer.agent.validator import Validator
from metatrainer.config import RunSettings
from metatrainer.episode import Episode
from metatrainer.errors import LedgerError
from metatrainer.ledger import Ledger
from metatrainer.outer.plan import Planned
from metatrainer.pool.base import Pool


def episode_maker(
    settings: RunSettings, run_dir: Path, ledger: Ledger, pool: Pool, validator: Validator
) -> Callable[[Planned], Episode]:
    """What `loop.train` takes as make_episode. ledger: has the run entered."""
    run = ledger.run()
    if run is None:
        raise LedgerError(f"{ledger.path} has no run; create_run comes before its episodes")

    def make(planned: Planned) -> Episode:
        task = draw_task(settings, planned.family, planned.task_seed, run.hidden_seed)
        return Episode(planned.id, task, settings, ledger, pool, validator, run_dir)

    return make
