"""`metatrainer status`, of runs that never took place and whose numbers are easy to check."""

from __future__ import annotations

import json

import pytest
from past_run import write_run
from typer.testing import CliRunner

from metatrainer.cli.app import app
from metatrainer.errors import ConfigError


def run(*arguments: str) -> str:
    return CliRunner().invoke(app, ["status", *arguments], catch_exceptions=False).output


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs in runs/, the second of them newer."""
    monkeypatch.chdir(tmp_path)
    for name, steps in (("first", 4), ("second", 2)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_run(tmp_path / "runs" / name, steps, planned=4)
        (tmp_path / "runs" / name / "config.toml").write_text("")
    return tmp_path / "runs"


def test_how_far_the_newest_run_is(runs):
    said = run()
    assert said.startswith("second: running, step 2 of 4, ") and "about 1 min 0 s left" in said
    found = json.loads(run("--json"))
    head, last = found["head"], found["last"]
    assert (head["steps"], head["steps_planned"], head["episodes"]) == (2, 4, 36)
    assert head["left"] == 60.0  # two steps of 30 seconds
    assert last["reward"]["n"] == 16 and last["reward"]["low"] < last["reward"]["mean"]
    assert sum(found["outcomes"].values()) == 36


def test_one_of_several_by_its_name(runs):
    assert run("first").startswith("first: ") and "step 4 of 4" in run("first")
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        run("firsd")


def test_before_there_is_any(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no runs in runs/; begin one"):
        run()
