"""Jobs that are broken in one way each, and jobs that are not, with what validation must say.

Each is a change to a good job on persona; the reference jobs are those of the other families too.

    python tests/jobs/suite OUT
    metatrainer job validate OUT/persona/*/* --family persona

writes them as folders, OUT/<family>/{broken,good}/<name>, and checks them.
"""

from __future__ import annotations

from pathlib import Path

from suite.broken import BROKEN
from suite.case import Case
from suite.good import GOOD

CASES = [*BROKEN, *GOOD]


def write(folder: Path, cases: list[Case]) -> list[Path]:
    """Write jobs as folders. Returns these, in the order of the cases."""
    folders = []
    for case in cases:
        kind = "broken" if case.code else "good"
        folders.append(folder / case.family / kind / case.name)
        for name, text in case.files.items():
            path = folders[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folders
