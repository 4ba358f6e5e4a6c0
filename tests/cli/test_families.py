"""The families commands: real processes, real packages of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(*arguments): metatrainer families in a working directory of its own.

    Packages that were put into site/ there are installed for it.
    """
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path / "site")])

    def families(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "metatrainer", "families", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            input=lines,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return families


@pytest.fixture
def parts(run: Run, tmp_path: Path) -> Path:
    """A new family of one's own, installed by pip."""
    made = run("new", "parts", "--into", "mine")
    assert made.returncode == 0 and "pip install -e mine" in made.stdout
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    flags = ["--no-index", "--quiet", "--target", str(tmp_path / "site")]
    subprocess.run([*install, *flags, str(tmp_path / "mine")], check=True)
    return tmp_path / "mine"


def plant(tmp_path: Path, module: str, *entries: str, name: str = "planted") -> None:
    """Install a package of one module the way installers leave it."""
    info = tmp_path / "site" / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = ["[metatrainer.families]", *entries]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "site" / f"{name}.py").write_text(module)


def test_families_are_listed_and_shown(run: Run) -> None:
    listed = run().stdout
    assert all(name in listed for name in ("persona", "inventory", "triage"))
    shown = run("show", "persona").stdout
    assert "lookup(" in shown and "\nuser " in shown and "assistant  lookup(" in shown
    assert run("show", "persona", "--markdown").stdout.startswith("# persona: ")


def test_a_new_family_is_found_and_passes_every_check_as_it_stands(run: Run, parts: Path) -> None:
    assert "parts " in run().stdout
    done = run("check", "parts", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True), done.stderr
    checks = {
        check["name"]: check for check in json.loads(done.stdout)["families"]["parts"]["checks"]
    }
    assert checks["solver"]["mean"] == 1.0
    trained = next(name for name in checks if name.startswith("trained "))
    for score in ("guess", "constant", "no tools", "best untrained", trained):
        assert checks[score]["low"] <= checks[score]["mean"] <= checks[score]["high"]
        assert checks[score]["n"] >= 256
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=parts,
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{parts.parent / 'site'}"},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout


def test_an_own_family_is_worked_with_as_any_other(run: Run, parts: Path, tmp_path: Path) -> None:
    played = run("play", "parts", lines="answer nobody\nquit\n")
    assert (played.returncode, "0 of 1 right" in played.stdout) == (0, True)
    job = [sys.executable, "-m", "metatrainer", "job"]
    env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path / 'site'}"}
    for command in (["new", "parts"], ["validate", "parts-job", "--family", "parts"]):
        done = subprocess.run([*job, *command], cwd=tmp_path, env=env, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_check_shows_a_table_and_how_far_it_is(run: Run) -> None:
    done = run("check", "inventory", "--no-train")
    assert done.returncode == 0, done.stderr
    for word in ("solver", "guess", "no tools", "untrained nano-finch, level 2", "best untrained"):
        assert word in done.stdout
    assert "trained nano-finch " not in done.stdout.replace("untrained", "")
    assert "%  inventory: " in done.stderr and "left" in done.stderr


BAD = """
from dataclasses import replace
from metatrainer.families import persona
NO_TOOLS = replace(persona.FAMILY, name="bare", tools=())

def _by_hash(rng, level, names):
    drawn = persona.FAMILY.sample(rng, level, sorted(names, key=hash))
    return drawn

UNSTABLE = replace(persona.FAMILY, name="unstable", sample=_by_hash)
"""


def test_a_bad_family_is_refused_with_the_reason(run: Run, tmp_path: Path) -> None:
    plant(tmp_path, BAD, "bare = planted:NO_TOOLS", "unstable = planted:UNSTABLE")
    done = run("check", "bare", "--no-train", "--json")
    assert done.returncode == 1 and "refused: bare: tools: no tools" in done.stderr
    assert json.loads(done.stdout)["ok"] is False
    done = run("check", "unstable", "--no-train")
    assert done.returncode == 1 and "another process draws other items" in done.stderr
    assert "untrained" not in done.stdout, "a family that is not sound is not measured"


@pytest.mark.parametrize(
    ("module", "entry", "words"),
    [
        ("import nowhere_at_all", "mine = planted:FAMILY", ["mine", "nowhere_at_all"]),
        ("FAMILY = 3", "mine = planted:FAMILY", ["planted:FAMILY", "int", "not a family"]),
        (BAD, "mine = planted:NO_TOOLS", ["'bare'", "'mine'"]),
        (BAD, "persona = planted:NO_TOOLS", ["two families", "'persona'", "rename"]),
    ],
)
def test_a_package_that_brings_no_family_is_named(
    run: Run, tmp_path: Path, module: str, entry: str, words: list[str]
) -> None:
    plant(tmp_path, module, entry)
    done = run("show", "mine")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_two_packages_with_one_family_are_named(run: Run, tmp_path: Path) -> None:
    plant(tmp_path, BAD, "bare = one:NO_TOOLS", name="one")
    plant(tmp_path, BAD, "bare = two:NO_TOOLS", name="two")
    done = run("show", "bare")
    assert done.returncode == 2 and "one:NO_TOOLS" in done.stderr and "two:NO_TOOLS" in done.stderr
    assert run("show", "persona").returncode == 0, "other families can still be had"


@pytest.mark.parametrize("ending", ["quit\n", "", "answer x\n\nexit\n"])
def test_play_ends_cleanly(run: Run, ending: str) -> None:
    done = run("play", "persona", lines="lookup X boss\nfly\n" + ending)
    assert (done.returncode, done.stderr) == (0, "")
    assert "error: unknown X" in done.stdout and "no tool 'fly'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check"], ["--all"]),
        (["check", "persona", "--all"], ["--all"]),
        (["check", "persna"], ["'persona'"]),
        (["show", "persna"], ["'persona'"]),
        (["play", "persna"], ["'persona'"]),
        (["play", "persona", "--level", "9"], ["levels 1 to 3, not 9"]),
        (["new", "persona"], ["there is a family"]),
        (["new", "My-Family"], ["small letters"]),
        (["new", "mine", "--into", "full"], ["full", "new or empty"]),
        (["persona"], ["persona"]),
    ],
)
def test_wrong_arguments_exit_with_2_and_leave_nothing(
    run: Run, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    for word in words:
        assert word in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
