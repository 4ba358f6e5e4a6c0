"""From a family to a student: real jobs through the command line, budgets on a stand-in pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lab import WRITE, RecordingPool, TomlValidator

from metatrainer import rundir, solve
from metatrainer.agent.policies import Message, call
from metatrainer.cli.app import main
from metatrainer.config import RunSettings, parse_config
from metatrainer.engine import Engine
from metatrainer.errors import AgentError, ConfigError, MetatrainerError
from metatrainer.families import scaffold
from metatrainer.jobs.spec import JOB_FILE
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.rundir import RunDir
from metatrainer.solve import SOLUTION, Order, Solved
from metatrainer.students import catalogue

QUICK = ("evaluation.items=16", "limits.max_seconds=20", "pool.workers=1", "pool.packed=2")


class Command:
    """A `metatrainer solve` under way in a folder."""

    def __init__(self, folder: Path, *arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "metatrainer", "solve", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill_after_an_episode(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            if ": ok, scores" in line:
                break
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def end(self) -> tuple[int, str, str]:
        out, err = self._process.communicate(timeout=200)
        return self._process.returncode, out, err


def test_a_family_of_ones_own_is_solved_though_it_is_killed(tmp_path: Path) -> None:
    """Straight from its folder; what is done stays done, and a larger budget goes on from there."""
    scaffold.new("mine", tmp_path / "mine-family")
    sets = [word for setting in QUICK for word in ("--set", setting)]
    begun = Command(tmp_path, "./mine-family", "--episodes", "2", "--run-dir", "r", *sets)
    begun.kill_after_an_episode()
    ledger = Ledger(tmp_path / "r" / "ledger.sqlite", readonly=True)
    jobs = {job.id: job for job in ledger.jobs() if job.done}
    assert jobs

    code, out, err = Command(tmp_path, "--resume", "r", "--json").end()
    assert code == 0, err
    done = json.loads(out)
    after = {job.id: job for job in ledger.jobs()}
    assert jobs.items() <= after.items() and len(after) == done["jobs"] == 2
    assert done["chosen_on"]["mean"] == max(e.post or 0.0 for e in ledger.episodes())
    assert done["after"]["n"] > 450 and done["after"]["n"] == done["before"]["n"]
    assert done["gain"] == pytest.approx(done["after"]["mean"] - done["before"]["mean"])
    assert done["low"] < done["gain"] < done["high"]

    folder = tmp_path / "r" / SOLUTION
    job = tmp_path / "r" / "jobs" / done["job"]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / name).read_bytes() == (job / "adapter" / name).read_bytes()
    assert (folder / "job" / JOB_FILE).read_text() == jobdir.read_files(job)[JOB_FILE]
    assert f"{done['after']['mean']:.3f}" in (folder / "README.md").read_text()
    assert json.loads((folder / "report.json").read_text()) == done
    engine = Engine(catalogue.verified_folder(done["student"]))
    assert engine.load_adapter(folder) is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["name a family"]),
        (["persna", "--episodes", "2"], ["'persona'"]),
        ([".", "--episodes", "2"], ["no package with one family"]),
        (["persona"], ["--episodes", "--seconds", "--max-usd"]),
        (["persona", "--episodes", "0"], ["budget of 0"]),
        (["persona", "--seconds", "0"], ["budget of 0"]),
        (["persona", "--max-usd", "0"], ["budget of 0"]),
        (["persona", "--max-usd", "1"], ["usd_per_slot_hour"]),
        (["persona", "--episodes", "2", "--agent", "referense"], ["'reference'"]),
        (["persona", "--episodes", "2", "--set", 'students=["wren"]'], ["students"]),
        (["--resume", "runs/none"], ["no run at"]),
        (["--resume", "other"], ["not begun by metatrainer solve"]),
        (["--resume", "other", "--max-usd", "3"], ["config.toml"]),
    ],
)
def test_wrong_arguments_exit_with_2_and_make_no_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    rundir.create(RunSettings(), tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["metatrainer", "solve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    for word in words:
        assert word in err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


# -- budgets and choices, on a pool that trains nothing ----------------------------------------


class Pool(RecordingPool):
    """Answers with the scores it was given, in order, and an adapter that changes nothing."""

    def __init__(self, adapter: Path, means: Sequence[float]):
        super().__init__()
        self._adapter, self._means = adapter, list(means)

    async def run(self, order: JobOrder) -> JobResult:
        self.mean = self._means[len(self.orders) % len(self._means)]
        result = await super().run(order)
        target = order.job_dir / jobdir.ADAPTER
        target.mkdir(exist_ok=True)
        for path in self._adapter.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        return result.model_copy(update={"seconds": 10.0})


class Wordy:
    """An agent that is not a script: it looks at the conversation, and counts what it is asked."""

    asked = 0

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        Wordy.asked += 1
        return WRITE if len(messages) == 1 else call("submit_job")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = Engine(catalogue.verified_folder("nano-wren"))
    folder = tmp_path_factory.mktemp("adapter")
    engine.save_adapter(engine.create_adapter(4), folder)
    return folder


Try = Callable[..., Solved]


@pytest.fixture
def attempt(tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """attempt(means=, usd=, **order): solve on the stand-in pool; called again, it goes on."""
    monkeypatch.setattr(solve, "FRESH_ITEMS", 16)

    def run(
        means: Sequence[float] = (0.5,),
        usd: float | None = None,
        agent: Wordy | None = None,
        **order: Any,
    ) -> Solved:
        pool = Pool(adapter, means)
        attempt.pool = pool  # type: ignore[attr-defined]

        @asynccontextmanager
        async def staff(*_: object):
            yield pool, TomlValidator()

        monkeypatch.setattr(solve, "staff", staff)
        money = {"usd_per_slot_hour": 360.0} | ({"max_usd": usd} if usd else {})
        settings = parse_config(
            {
                "families": ["persona"],
                "heldout": [],
                "money": money,
                "pool": {"workers": 1, "packed": 1},
                "evaluation": {"items": 16},
            }
        )
        made = RunDir(tmp_path / "run")
        asked = Order(family="persona", agent="wordy", **order)
        policy = agent or Wordy()
        return solve.solve(asked, settings, made, lambda task, seed: policy, lambda *_: None)

    return run


def test_the_best_by_the_runs_items_is_reported_on_others(attempt: Try, tmp_path: Path) -> None:
    done = attempt(means=(0.5, 0.9, 0.7), episodes=3)
    assert done.chosen_on.mean == 0.9 and done.job.startswith("play-000-00-01")
    assert (done.episodes, done.jobs) == (3, 3)
    # Untrained and trained with an adapter that changes nothing: the same on the same items.
    assert done.after.mean == done.before.mean != 0.9
    assert done.low < 0 < done.high
    assert "no improvement is shown" in (tmp_path / "run" / SOLUTION / "README.md").read_text()


def test_episodes_are_counted_over_all_sittings(attempt: Try, tmp_path: Path) -> None:
    assert attempt(episodes=2).episodes == 2
    assert attempt(episodes=2).episodes == 2
    done = attempt(means=(0.6,), episodes=5)
    assert (done.episodes, done.chosen_on.mean) == (5, 0.6)
    with Ledger(tmp_path / "run" / "ledger.sqlite", readonly=True) as ledger:
        assert len(ledger.jobs()) == 5


def test_what_an_agent_wrote_before_a_kill_is_not_asked_of_it_again(
    attempt: Try, tmp_path: Path
) -> None:
    attempt(episodes=1)
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger, ledger.transaction():
        first = [row.content for row in ledger.messages("play-000-00-00")]
        ledger.open_episode("play-000-00-01", "play", 0, 0, 1, ledger.tasks()[0].id)
        for n, content in enumerate(first[:-1]):
            ledger.record_message("play-000-00-01", n, json.loads(content)["role"], content)
    Wordy.asked = 0
    assert attempt(episodes=2).episodes == 2
    assert Wordy.asked == 0, "both messages are on record"


def test_the_money_is_never_overspent(attempt: Try) -> None:
    """A job costs a dollar and may cost 15: the next one has to fit."""
    done = attempt(usd=20.0)
    assert done.usd == pytest.approx(done.jobs) and 20 - 15 <= done.usd <= 20


class Failing(Wordy):
    """An agent whose server is away."""

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        raise AgentError("no answer")


def test_an_agent_that_fails_ends_it_and_its_episodes_are_left_for_later(attempt: Try) -> None:
    with pytest.raises(AgentError, match="3 times in a row, the last: no answer"):
        attempt(agent=Failing(), episodes=4)
    assert attempt(episodes=4).jobs == 4


def test_no_episode_begins_after_the_time(attempt: Try) -> None:
    assert attempt(episodes=1).episodes == 1
    assert attempt(seconds=1e-3).episodes == 1
    # Time goes on while episodes are played, or this would never end.
    assert attempt(seconds=attempt(episodes=1).seconds + 0.2).episodes > 1


def test_without_a_trained_student_nothing_is_handed_over(attempt: Try, tmp_path: Path) -> None:
    with pytest.raises(MetatrainerError, match="none of 0 episodes"):
        attempt(seconds=1e-12)
    assert not (tmp_path / "run" / SOLUTION).exists()


def test_a_budget_has_to_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing says when to end"):
        solve.check(Order(family="persona", agent="reference"), RunSettings())
