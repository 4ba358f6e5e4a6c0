"""`metatrainer eval` through the command line: real agents, jobs and hidden items."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from metatrainer.config import RunSettings
from metatrainer.engine import Engine
from metatrainer.ledger import Ledger
from metatrainer.rundir import create, find
from metatrainer.students import catalogue
from metatrainer.tinker.checkpoints import CheckpointStore

Eval = Callable[..., subprocess.CompletedProcess[str]]
FEW = ("--families", "persona,triage", "--n", "2", "--set", "evaluation.items=8")


@pytest.fixture
def evaluate(tmp_path: Path) -> Eval:
    """evaluate(*arguments): run metatrainer eval in a working directory of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "metatrainer", "eval", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


def save_agent(run: Path) -> None:
    """A run whose trained agent is the untrained one with an adapter that changes nothing."""
    create(RunSettings(), run)
    engine = Engine(catalogue.agent_folder("nano-agent"))
    adapter = engine.create_adapter(4)
    store = CheckpointStore(run / "checkpoints")
    info = store.open_run("nano-agent", 4, {})
    path = store.save(
        info,
        "sampler_weights",
        "000001",
        lambda folder: engine.save_adapter(adapter, folder / "adapter"),
        overwrite=False,
    )
    (run / "logs").mkdir()
    (run / "logs" / "checkpoints.jsonl").write_text(json.dumps({"sampler_path": path}) + "\n")


def test_agents_play_the_same_tasks(evaluate: Eval, tmp_path: Path) -> None:
    save_agent(tmp_path / "runs" / "mine")
    done = evaluate("--agent", "model", "--agent", "mine", "--agent", "broken", *FEW, "--json")
    assert done.returncode == 0, done.stderr
    board = json.loads(done.stdout)
    assert {(row["part"], row["agent"]) for row in board["rows"]} == {
        (part, agent) for part in ("trained", "held out") for agent in ("model", "mine", "broken")
    }
    assert all(row["reward"]["n"] == 2 for row in board["rows"])
    assert all(row["quality"]["mean"] == 0 for row in board["rows"] if row["agent"] == "broken")
    same = [d for d in board["differences"] if {d["first"], d["second"]} == {"model", "mine"}]
    # Speed is measured, all else is the same conversation and the same job.
    assert len(same) == 2 and all(d["quality"]["mean"] == 0 for d in same)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_scripts_are_ranked_in_markdown(evaluate: Eval, tmp_path: Path) -> None:
    done = evaluate("--agent", "broken", "--agent", "reference", *FEW, "--keep", "kept")
    assert done.returncode == 0, done.stderr
    with Ledger(find(str(tmp_path / "kept")).ledger, readonly=True) as ledger:
        assert len(ledger.episodes("play")) == 8
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| trained | reference |"), "the better one first"
    assert any(line.startswith("| held out | reference - broken |") for line in lines)
    assert "left" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--agent"]),
        (["--agent", "referense"], ["'referense'", "'reference'"]),
        (["--agent", "empty"], ["no trained agent", "--resume"]),
        (["--agent", "random", "--agent", "random"], ["twice"]),
        (["--agent", "random", "--families", "persna"], ["'persona'"]),
        (["--agent", "random", "--n", "1"], ["--n"]),
        (["--agent", "openai:m@http://localhost:1/v1", "--keep", "kept"], ["set OPENAI_API_KEY"]),
        (["--agent", "random", "--keep", "runs/empty"], ["runs/empty is not empty"]),
    ],
)
def test_wrong_arguments_exit_with_2(
    evaluate: Eval, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    create(RunSettings(), tmp_path / "runs" / "empty")
    done = evaluate(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "kept").exists()
    for word in words:
        assert word in done.stderr
