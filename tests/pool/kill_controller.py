"""A controller for test_kill.py: real episodes, ledger, job folders and worker processes.

Validation says yes and jobs only wait a moment, so that a second holds many moments to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metatrainer.agent.policies import Choice, Scripted, call
from metatrainer.agent.task import draw_task
from metatrainer.config import parse_config
from metatrainer.episode import Episode, EpisodeId, play
from metatrainer.jobs.spec import JOB_FILE, JobSpec, parse_job_toml
from metatrainer.jobs.validate import Verdict
from metatrainer.ledger import Ledger
from metatrainer.pool.local import LocalPool
from metatrainer.pool.runpod import RunpodPool

HIDDEN_SEED = 7


class Yes:
    """A validator that finds nothing wrong."""

    async def validate(self, files: Mapping[str, str], rules: Any) -> Verdict:
        spec = parse_job_toml(files[JOB_FILE])
        assert isinstance(spec, JobSpec)
        return Verdict(ok=True, spec=spec, findings=[], seconds=0.0, cheating=False, parseable=True)


async def main(folder: Path, episodes: int, price: float, url: str | None = None) -> None:
    """url: of a service that rents pods; without one the pool is here."""
    where = {"kind": "runpod"} if url else {}
    settings = parse_config(
        {
            "pool": {"workers": 2, "packed": 2, **where},
            "money": {"usd_per_slot_hour": price},
            "runpod": {"url": url, "gpus": ["NVIDIA A40"], "python": sys.executable} if url else {},
        }
    )
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.create_run("run", "nano", settings.model_dump_json(), 0, {}, HIDDEN_SEED)
        pool: LocalPool | RunpodPool
        if url:
            body = "pool_bodies:BriefOnPod"
            pool = RunpodPool(settings, HIDDEN_SEED, ledger, body=body, poll_seconds=0.05)
        else:
            pool = LocalPool(settings, HIDDEN_SEED, body="pool_bodies:Brief")
        if url:
            print("starting", flush=True)
        await pool.start()
        print("started", flush=True)

        async def one(index: int) -> None:
            task = draw_task(settings, "persona", index, HIDDEN_SEED)
            id = EpisodeId("train", 0, 0, index)
            write = Choice("nano-wren", "1e-5", batch_size=32, group_size=8, max_steps=5).write()
            episode = Episode(id, task, settings, ledger, pool, Yes(), folder)  # type: ignore[arg-type]
            await play(episode, Scripted(message for message in (write, call("submit_job"))))

        try:
            await asyncio.gather(*(one(index) for index in range(episodes)))
        finally:
            await pool.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]))
