"""The suite of broken and of good jobs, through the command that checks folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from suite import BROKEN, CASES, GOOD, write

from metatrainer.jobs.findings import Finding

PERSONA = [case for case in CASES if case.family == "persona"]
"""The reference jobs of other families are checked in test_validate.py."""


def validate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metatrainer", "job", "validate", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each job by its name."""
    written = write(tmp_path_factory.mktemp("suite"), CASES)
    return {case.name: folder for case, folder in zip(CASES, written)}


@pytest.fixture(scope="module")
def told(folders: dict[str, Path]) -> dict:
    """What the command says of all jobs on persona, as JSON."""
    done = validate(*(str(folders[c.name]) for c in PERSONA), "--family", "persona", "--json")
    assert done.returncode == 1 and done.stderr == ""
    return json.loads(done.stdout)


def test_the_suite_has_enough_of_both_each_of_its_own() -> None:
    assert len(BROKEN) >= 60 and len(GOOD) >= 15
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({json.dumps(case.files) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken(case, told: dict, folders: dict[str, Path]) -> None:
    (verdict,) = [v for v in told["jobs"] if v["folder"] == str(folders[case.name])]
    assert not verdict["ok"]
    findings = [Finding.from_dict(finding) for finding in verdict["findings"]]
    assert (findings[0].code, findings[0].file, findings[0].line) == (
        case.code,
        case.at,
        case.number,
    ), findings[0].render()
    assert {f.code for f in findings} == {case.code}
    assert all(len(finding.render().split()) <= 40 for finding in findings)
    assert verdict["cheating"] is (case.code == "E-LEAK")


def test_good_ones_have_no_finding(told: dict, folders: dict[str, Path]) -> None:
    good = {str(folders[case.name]) for case in GOOD if case.family == "persona"}
    verdicts = [v for v in told["jobs"] if v["folder"] in good]
    assert len(verdicts) == len(good)
    assert [(v["folder"], v["findings"]) for v in verdicts if not v["ok"] or v["findings"]] == []
    assert (told["valid"], told["refused"]) == (len(good), len(BROKEN))


def test_a_line_each_and_a_summary(folders: dict[str, Path]) -> None:
    names = ["own-data", "not-async", "several-rewards"]
    several = [str(folders[name]) for name in names]
    done = validate(*several, "--family", "persona")
    assert (done.returncode, done.stderr) == (1, "")
    *lines, summary = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", several[0]],
        ["refused", several[1]],
        ["ok", several[2]],
    ]
    assert " E-ASYNC environment/__init__.py:" in lines[1]
    assert summary == "3 jobs: 2 valid, 1 refused"
    good = validate(*several[::2], "--family", "persona")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "2 jobs: 2 valid, 0 refused")
