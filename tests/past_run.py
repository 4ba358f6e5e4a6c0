"""A ledger of a run that never took place, with numbers that are easy to check."""

from __future__ import annotations

import json
import random
from pathlib import Path

from metatrainer.ledger import Ledger


def write_run(folder: Path, steps: int, planned: int, heldout: int = 4) -> Path:
    """A run folder whose reward rises with the steps; heldout: episodes before and after."""
    rng = random.Random(7)
    with Ledger(folder / "ledger.sqlite") as ledger:
        config = json.dumps({"outer": {"steps": planned}})
        ledger.create_run(folder.name, "nano", config, 0, {"metatrainer": "0"})
        for family, split in (("persona", "train"), ("inventory", "train"), ("triage", "hidden")):
            ledger.add_task(family, family, split, "{}")
            ledger.record_eval("baseline", "wren", family, 128, 0.25, 0.18, 0.33, 1.0)
            ledger.record_eval("baseline", "finch", family, 128, 0.30, 0.23, 0.38, 1.0)
        for index in range(heldout):
            _play(ledger, "heldout_before", 0, index, "triage", 0.2, rng)
        for step in range(steps):
            for index in range(16):
                task = "persona" if index < 8 else "inventory"
                _play(ledger, "train", step, index, task, (step + 1) / (planned + 1), rng)
            episodes = [e for e in ledger.episodes("train") if e.step == step]
            mean = sum(e.total or 0.0 for e in episodes) / len(episodes)
            ledger.finish_step(step, mean, "{}", 30.0)
        if steps == planned:
            for index in range(heldout):
                _play(ledger, "heldout_after", steps, index, "triage", 0.8, rng)
    return folder


def _play(
    ledger: Ledger, phase: str, step: int, index: int, task: str, skill: float, rng: random.Random
) -> None:
    """One episode: with probability `skill` a job that teaches, else nothing, a crash or harm."""
    episode = f"{phase}-{step:03d}-{index:02d}"
    ledger.open_episode(episode, phase, step, index // 8, index, task)
    luck = rng.random()
    if luck > skill and luck > 0.6:
        ledger.finish_episode(episode, 0, 0, 0, -0.1, "no_submission", None, None, None, 1.0)
        return
    student = "wren" if luck < skill else "finch"
    ledger.start_job(f"job-{episode}", episode, 1, student, "{}")
    if luck > skill and luck > 0.45:
        ledger.finish_job(f"job-{episode}", 1, "crashed", "loss is nan", "{}", 2.0)
        ledger.finish_episode(episode, 0.5, 0, 0, 0.175, "crashed", None, 0.3, student, 3.0)
        return
    post = min(1.0, max(0.0, 0.25 + 0.5 * (luck < skill) * rng.random() + rng.gauss(0, 0.03)))
    quality = 0.25 * post + 0.75 * (post - 0.3)
    ledger.finish_job(f"job-{episode}", 1, "ok", "", "{}", 2.0)
    total = 0.35 + 0.6 * quality + 0.05 * 0.8
    ledger.finish_episode(episode, 1, quality, 0.8, total, "ok", post, 0.3, student, 3.0)
