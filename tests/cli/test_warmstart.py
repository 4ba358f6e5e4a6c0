"""`metatrainer warmstart` through the command line: a folder that train and eval take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from metatrainer.agent.policies import call
from metatrainer.config import RunSettings
from metatrainer.ledger import Ledger
from metatrainer.play import find_agent
from metatrainer.rundir import create, find

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def warmstart(tmp_path: Path) -> Run:
    """warmstart(*arguments), in a working directory with a recorded episode in runs/good."""
    run = create(RunSettings(), tmp_path / "runs" / "good")
    with Ledger(run.ledger) as ledger:
        ledger.create_run("good", "nano", "{}", 0, {})
        ledger.add_task("t", "persona", "train", "{}")
        ledger.open_episode("e", "play", 0, 0, 0, "t")
        for n, message in enumerate([{"role": "user", "content": "Go."}, call("submit_job")]):
            ledger.record_message("e", n, message["role"], json.dumps(message))
        ledger.finish_episode("e", 1, 0, 0, 0.4, "ok", None, None, "s", 1.0)

    def warmstart(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "metatrainer", "warmstart", *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return warmstart


def test_what_it_leaves_is_an_agent(warmstart: Run, tmp_path: Path) -> None:
    done = warmstart("good", "--out", "runs/warm", "--epochs", "2", "--json")
    assert done.returncode == 0, done.stderr
    learned = json.loads(done.stdout)
    assert (learned["episodes"], learned["updates"], learned["left_out"]) == (1, 2, {})
    assert learned["nll_last"] < learned["nll_first"]
    warm = find(str(tmp_path / learned["folder"]))
    assert warm.settings == RunSettings()
    find_agent(str(warm.path), RunSettings())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["god"], ["no run at god", "'good'"]),
        (["good", "--min-reward", "0.9"], ["1 below the reward", "--keep"]),
        (["good", "--epochs", "0"], ["--epochs"]),
        (["good", "--set", "agent.start=nowhere"], ["agent.start"]),
        (["good", "--out", "runs/good"], ["not empty"]),
    ],
)
def test_wrong_arguments_exit_with_2(
    warmstart: Run, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = warmstart("--out", "runs/warm", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "runs" / "warm").exists()
