"""A run of two steps that can be killed at any of its points, for test_kill.py.

The loop, ledger, episodes, attempts, job folders, money and checkpoints are real. The agent is a
tiny random model, whose words are taken for choices of a job; jobs are scored by what was chosen.
Every durable write and every call that changes the agent is a point, before and after it.

python kill_run.py MODEL_DIR: reads a line of JSON for each process to start, {run_dir, resume,
die_at}, and answers with how it ended. Processes are forked, so that none imports anything anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from lab import TomlValidator
from standin import TOOL

from metatrainer.agent.policies import Choice, call
from metatrainer.agent.task import draw_task
from metatrainer.config import RunSettings, parse_config
from metatrainer.engine import Engine
from metatrainer.episode import Episode, Reply
from metatrainer.experiment import enter
from metatrainer.jobs.spec import JOB_FILE, JobSpec, parse_job_toml
from metatrainer.ledger import Ledger
from metatrainer.outer import loop
from metatrainer.outer.plan import Planned
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.students.score import Score
from metatrainer.tinker import checkpoints

HIDDEN_SEED = 7
SECONDS = 10.0
"""What each job holds its slot for: at a dollar a second, ten dollars."""
GOOD_RATES = ("1e-4", "1e-3", "3e-3", "1e-2")


def settings_for(model: Path) -> RunSettings:
    return parse_config(
        {
            "seed": 5,
            "families": ["persona", "inventory"],
            "heldout": ["triage"],
            "agent": {"model": str(model), "lora_rank": 4, "max_tokens": 16, "max_turns": 4},
            "outer": {
                "steps": 2,
                "groups": 2,
                "group_size": 3,
                "learning_rate": 0.02,
                "heldout_episodes": 2,
            },
            "evaluation": {"items": 8},
            "money": {"usd_per_slot_hour": 3600.0},
            "pool": {"workers": 1, "packed": 1},
        }
    )


class Points:
    """Counts points, and kills this process at one of them."""

    def __init__(self, die_at: int | None):
        self._left = die_at

    def point(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str) -> None:
        """Make a function or method two points."""
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = inner(*args, **kwargs)
            self.point()
            return result

        setattr(owner, name, outer)


class WatchedLedger(Ledger):
    """Every transaction is two points: before and after it is on disk."""

    points = Points(None)

    @contextmanager
    def transaction(self):
        with super().transaction():
            yield
            if self._depth == 1:
                self.points.point()
        if self._depth == 0:
            self.points.point()


class InstantPool:
    """Claims, trains and ends a job as a worker does, at once; a kill in between loses it."""

    slots = 1

    def __init__(self, points: Points):
        self._points = points

    def holds(self, job_id: str, attempt: int) -> bool:
        return False

    async def run(self, order: JobOrder) -> JobResult:
        if done := jobdir.read_result(order.job_dir, order.job_id):
            return done
        assert jobdir.claim(order), "nobody may run an attempt twice"
        self._points.point()
        spec = parse_job_toml(jobdir.read_files(order.job_dir)[JOB_FILE])
        assert isinstance(spec, JobSpec)
        rate = GOOD_RATES.index(f"{spec.prime_rl.learning_rate:.0e}".replace("e-0", "e-"))
        mean = (2 + rate + order.seed % 3) / 8
        post = Score.of(order.student, order.family, round(8 * mean), 8)
        result = JobResult(
            job_id=order.job_id, attempt=order.attempt, outcome="ok", post=post, seconds=SECONDS
        )
        jobdir.write_result(order.job_dir, result)
        return result

    async def baselines(self, family: str) -> list[Score]:
        return [Score.of("nano-wren", family, 2, 8), Score.of("nano-finch", family, 1, 8)]


class Translated:
    """A real episode in which whatever the agent says is a choice of a job.

    Its first word may be a job that is refused; then it has to write another.
    """

    tools = [TOOL]  # noqa: RUF012 (a constant)

    def __init__(self, episode: Episode, seed: int):
        self.id = episode.id
        self._episode, self._seed, self._turn = episode, seed, 0

    def initial_messages(self) -> list[dict[str, Any]]:
        self._episode.initial_messages()
        return [{"role": "user", "content": f"Task {self._seed}: say a word."}]

    async def respond(self, message: Mapping[str, Any]) -> Reply:
        value = sum(message["content"].encode())
        rate = "10.0" if self._turn == 0 and value % 4 == 0 else GOOD_RATES[value % 3]
        write = Choice("nano-wren", rate, batch_size=32, group_size=8, max_steps=5).write()
        said = write if self._turn % 2 == 0 else call("submit_job")
        self._turn += 1
        reply = await self._episode.respond(said)
        answer = {"role": "tool", "tool_call_id": "0", "name": "say", "content": "go on"}
        return Reply([answer], reply.done)

    async def outcome(self) -> Any:
        return await self._episode.outcome()


def run(model: Path, run_dir: Path, resume: bool, die_at: int | None) -> None:
    """Play the run, or what is left of it, up to a point."""
    torch.set_num_threads(1)
    settings = settings_for(model)
    points = WatchedLedger.points = Points(die_at)
    points.around(jobdir, "create")
    points.around(jobdir, "write_durably")
    points.around(checkpoints, "_publish")
    for name in ("save_state", "save_adapter", "forward_backward", "optim_step"):
        points.around(Engine, name)
    loop._engine = lambda folder: OPENED[str(folder)]
    with WatchedLedger(run_dir / "ledger.sqlite") as ledger:
        config = settings.model_dump_json()
        ledger.create_run(run_dir.name, "nano", config, settings.seed, {}, HIDDEN_SEED)
        enter(ledger, run_dir.name, settings)
        pool = InstantPool(points)

        def make(planned: Planned) -> Translated:
            task = draw_task(settings, planned.family, planned.task_seed, HIDDEN_SEED)
            episode = Episode(planned.id, task, settings, ledger, pool, TomlValidator(), run_dir)  # type: ignore[arg-type]
            return Translated(episode, planned.task_seed)

        asyncio.run(loop.train(settings, run_dir, ledger, pool, make, resume=resume))


def _in_a_fork(model: Path, wanted: dict[str, Any]) -> int:
    """Exit code of a process of its own; minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(model, Path(wanted["run_dir"]), wanted["resume"], wanted["die_at"])
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


OPENED: dict[str, Engine] = {}
"""Engines by folder: every process begins with one as it is when it is opened."""

if __name__ == "__main__":
    import tinker_cookbook.rl.rollouts
    import tinker_cookbook.rl.train  # noqa: F401 (here, so that no process has to)

    import metatrainer.outer.env
    import metatrainer.tinker.client  # noqa: F401

    torch.set_num_threads(1)
    OPENED[sys.argv[1]] = Engine(Path(sys.argv[1]))
    assert OPENED[sys.argv[1]].tokenizer
    for line in sys.stdin:
        print(_in_a_fork(Path(sys.argv[1]), json.loads(line)), flush=True)
