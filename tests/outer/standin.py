"""A run of the outer loop on cheap stand-in episodes, also as a program that can be killed.

python standin.py RUN_DIR MODEL_DIR [--resume] [--kill-after-turns N] [--kill-in-save NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from metatrainer.config import RunSettings, parse_config
from metatrainer.engine import Engine
from metatrainer.episode import Reply
from metatrainer.ledger import Ledger
from metatrainer.outer import loop
from metatrainer.outer.plan import Planned
from metatrainer.progress import Progress
from metatrainer.reward import Terms
from metatrainer.students.score import Score

TURNS = 2
TOOL = {
    "name": "say",
    "description": "Say a word",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}


def settings_for(model: Path, **outer: object) -> RunSettings:
    """A run of a few seconds."""
    return parse_config(
        {
            "seed": 7,
            "families": ["one", "two"],
            "heldout": ["three"],
            "agent": {"model": str(model), "lora_rank": 4, "max_tokens": 24},
            "outer": {
                "steps": 3,
                "groups": 2,
                "group_size": 3,
                "learning_rate": 0.02,
                "heldout_episodes": 2,
                **outer,
            },
        }
    )


class StandIn:
    """Two turns; the reward is the share of characters below "`" in what the agent wrote."""

    def __init__(self, planned: Planned, ledger: Ledger):
        self.id = planned.id
        self._ledger = ledger
        self._heard: list[str] = []
        self._seed = planned.task_seed
        task = f"{planned.family}-{planned.task_seed}"
        ledger.add_task(task, planned.family, "train", "{}")
        ledger.open_episode(
            str(self.id), self.id.phase, self.id.step, self.id.group, self.id.index, task
        )

    tools = [TOOL]  # noqa: RUF012 (a constant)

    def initial_messages(self):
        return [{"role": "user", "content": f"Task {self._seed}: say a word."}]

    async def respond(self, message):
        self._heard.append(message["content"])
        answer = {"role": "tool", "tool_call_id": "0", "name": "say", "content": "go on"}
        hint = {"role": "user", "content": "; ".join(message["errors"])}
        return Reply([answer, hint], len(self._heard) == TURNS)

    def context_full(self) -> None:
        self.full = True

    async def outcome(self) -> Terms:
        text = "".join(self._heard)
        total = sum(c < "`" for c in text) / max(1, len(text))
        terms = Terms(total, 0.0, 0.0, total, "ok")
        self._ledger.finish_episode(
            str(self.id), total, 0.0, 0.0, total, "ok", None, None, None, 0.0
        )
        return terms


class Baselines:
    """The part of a pool that the loop itself asks: notes for which families it was asked."""

    slots = 1
    asked: ClassVar[list[str]] = []

    def holds(self, job_id: str, attempt: int) -> bool:
        return False

    async def baselines(self, family: str) -> list[Score]:
        self.asked.append(family)
        return [Score(student="s", family=family, n=8, mean=0.5, low=0.2, high=0.8)]


class Counted(Ledger):
    """Notes every sample that got onto the disk, and may kill the process right after one."""

    kill_after: int | None = None

    def __init__(self, path: Path):
        self._new: list[str] = []
        super().__init__(path)

    def record_turn(self, episode, turn, *rest):
        self._new.append(f"{episode} {turn}\n")
        return super().record_turn(episode, turn, *rest)

    @contextmanager
    def transaction(self):
        with super().transaction():
            yield
        if self._depth == 0 and self._new:
            with (self.path.parent / "paid.log").open("a") as log:
                log.writelines(self._new)
            if self.kill_after is not None:
                self.kill_after -= len(self._new)
                if self.kill_after <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            self._new = []


def run(
    run_dir: Path,
    settings: RunSettings,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    make: Callable[[Planned, Ledger], object] = StandIn,
    kill_after: int | None = None,
) -> None:
    """Play the run, or what is left of it."""
    torch.set_num_threads(1)
    with Counted(run_dir / "ledger.db") as ledger:
        ledger.kill_after = kill_after
        ledger.create_run("r", "test", settings.model_dump_json(), settings.seed, {})
        asyncio.run(
            loop.train(
                settings,
                run_dir,
                ledger,
                Baselines(),
                lambda planned: make(planned, ledger),
                resume=resume,
                progress=progress,
            )
        )


def _die_while_saving(name: str) -> None:
    save = Engine.save_state

    def half(self, adapter, folder):
        if folder.parent.name == f".{name}.{os.getpid()}":
            folder.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, adapter, folder)

    Engine.save_state = half


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-after-turns", type=int)
    parser.add_argument("--kill-in-save")
    given = parser.parse_args()
    if given.kill_in_save:
        _die_while_saving(given.kill_in_save)
    run(
        given.run_dir,
        settings_for(given.model),
        resume=given.resume,
        kill_after=given.kill_after_turns,
    )
