"""The guide to a family of one's own: its commands are run as they stand, beside what it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "own-family.md"
TRAINS = ("families check cover\n", "job run", "episode", "metatrainer train")
"""Commands that train, for minutes together."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return [line + "\n" for block in blocks for line in block.splitlines()]


def follow(folder: Path, lines: list[str]) -> str:
    """Run commands one after the other; the first that fails is an error. Returns their output."""
    shutil.copytree(ROOT / "docs" / "guides", folder / "docs" / "guides")
    shutil.copytree(ROOT / "configs", folder / "configs")
    # pip puts the package where only this test sees it, and asks no index.
    shell = f"""
        metatrainer() {{ {sys.executable} -m metatrainer "$@"; }}
        pytest() {{ {sys.executable} -m pytest -q "$@"; }}
        pip() {{ {sys.executable} -m pip "$1" --no-deps --no-build-isolation --no-index --quiet \\
            --target site "${{@: -1}}"; }}
        set -ex
    """
    path = f"{os.environ['PYTHONPATH']}:{folder / 'site'}"
    done = subprocess.run(
        ["bash", "-c", shell + "".join(lines)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "110"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_what_does_not_train_works_as_it_stands(tmp_path):
    lines = [line for line in commands() if not any(word in line for word in TRAINS)]
    assert len(lines) >= 10
    output = follow(tmp_path, lines)
    assert "22 passed" in output, "twenty examples and two tests"
    assert "error: unknown Nobody" in output and "0 of 1 right" in output
    assert "ok: nano-wren" in output


@pytest.mark.slow
def test_every_command_works_as_it_stands(tmp_path):
    output = follow(tmp_path, commands())
    assert "wanted +0.20" in output and "outcome ok" in output
    assert list((tmp_path / "runs").glob("*/report.md"))


def test_the_code_that_is_shown_is_the_code_that_is_run():
    shown = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert shown and all(
        part in (GUIDE.parent / "cover" / "family.py").read_text() for part in shown
    )


def test_every_file_that_is_linked_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", GUIDE.read_text())
    assert links and all((GUIDE.parent / link).exists() for link in links)
