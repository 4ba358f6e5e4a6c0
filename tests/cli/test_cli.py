"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from metatrainer.config import RunSettings
from metatrainer.ledger import Ledger
from metatrainer.rundir import RunDir, create

ROOT = Path(__file__).parents[2]
NANO = str(ROOT / "configs" / "nano.toml")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """cli(*arguments): run metatrainer in an empty working directory."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "metatrainer", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    """A run of two steps in the working directory's runs/."""
    run = create(RunSettings(), tmp_path / "runs" / "nano-old")
    with Ledger(run.ledger) as ledger:
        ledger.create_run(run.name, "nano", RunSettings().model_dump_json(), 0, {})
        ledger.add_task("p", "persona", "train", "{}")
        for step in range(2):
            episode = f"e{step}"
            ledger.open_episode(episode, "train", step, 0, 0, "p")
            ledger.finish_episode(episode, 1, 0, 0, 0.25 + step / 2, "ok", 0.5, 0.4, "wren", 1)
            ledger.finish_step(step, 0.25 + step / 2, "{}", 1.0)
    return run


def test_help_teaches_by_example_and_loads_nothing_heavy(cli: Cli) -> None:
    done = cli("--help")
    assert done.returncode == 0
    for word in (
        "train",
        "report",
        "episode",
        "families",
        "job",
        "nano",
        "metatrainer train configs/",
    ):
        assert word in done.stdout
    assert "metatrainer train --resume" in cli("train", "--help").stdout
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, metatrainer.cli; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "transformers", "tinker", "verifiers", "matplotlib", "numpy", "pydantic"}
    assert not heavy & set(loaded.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nano.toml"], ["nano.toml", ".toml file"]),
        (["train", NANO, "--set", "outer.step=3"], ["outer.step", "'steps'"]),
        (["train", NANO, "--set", "preset=nanno"], ["preset", "'nano'"]),
        (["train", NANO, "--set", 'families=["persna"]'], ["families", "'persona'"]),
        (["train", NANO, "--set", 'heldout=["triag"]'], ["heldout", "'triage'"]),
        (["train"], ["--resume"]),
        (["train", NANO, "--resume", "x"], ["--resume"]),
        (["train", "--resume", "nano-odl"], ["nano-odl", "'nano-old'"]),
        (["train", "--resume", "nano-old", "--set", "seed=1"], ["--set"]),
        (["report", "nano-odl"], ["nano-odl", "'nano-old'"]),
        (["families", "show", "persna"], ["'persna'", "'persona'"]),
        (["episode", "triag"], ["'triag'", "'triage'"]),
        (["fly"], ["fly"]),
    ],
)
def test_a_wrong_name_exits_with_2_and_leaves_nothing_behind(
    cli: Cli, finished: RunDir, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["nano-old"]


def test_report_prints_the_ledgers_numbers(cli: Cli, finished: RunDir) -> None:
    printed = cli("report", "runs/nano-old", "--json")
    report = json.loads(printed.stdout)
    assert printed.returncode == 0
    assert report["reward"] == {"per_step": [0.25, 0.75], "first3": 0.5, "last3": 0.5}
    assert (report["run"], report["preset"], report["episodes"]) == ("nano-old", "nano", 2)
    assert json.loads(cli("report", "nano-old", "--json").stdout) == report
    table = cli("report", "nano-old").stdout
    assert f"2 of {RunSettings().outer.steps} steps" in table and "0.500" in table
    assert cli("report", "nano-old", "--markdown").stdout.startswith("# nano-old\n")


def test_report_writes_a_figure_and_csv(cli: Cli, finished: RunDir, tmp_path: Path) -> None:
    done = cli("report", "nano-old", "--figure", "out/curve.svg", "--csv", "tables")
    assert done.returncode == 0 and "wrote out/curve.svg" in done.stderr
    assert (tmp_path / "out" / "curve.svg").read_text().startswith("<?xml")
    rows = list(csv.DictReader((tmp_path / "tables" / "episodes.csv").open(newline="")))
    assert [float(row["total"]) for row in rows] == [0.25, 0.75]


def test_report_on_a_run_that_has_not_started_says_so(cli: Cli, tmp_path: Path) -> None:
    create(RunSettings(), tmp_path / "runs" / "new")
    done = cli("report", "new")
    assert done.returncode == 1 and "no ledger" in done.stderr


def test_an_episode_is_played_and_printed(cli: Cli, tmp_path: Path) -> None:
    few = ["--set", "evaluation.items=8", "--set", "pool.workers=1"]
    done = cli("episode", "persona", "--agent", "reference", *few)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert (
        said.index("get_baseline_scores") < said.index("-> submit_job") < said.rindex("\nreward ")
    )
    assert "\njob\n" in said and "validation 1.000" in said and "outcome ok" in said
    assert not list(tmp_path.iterdir()), "an episode leaves nothing behind"


def test_without_a_sandbox_nothing_begins(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for arguments in (("train", NANO), ("episode",)):
        done = cli(*arguments, PATH=str(tmp_path / "bin"))
        assert done.returncode == 2
        assert "only runs in a sandbox" in done.stderr and "install" in done.stderr
    assert not (tmp_path / "runs").exists()
