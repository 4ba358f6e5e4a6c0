"""The page of findings names every code there is, and every code that refuses has a broken job."""

from __future__ import annotations

import re
from pathlib import Path

from suite import broken
from suite.case import Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "findings.md"
CODE = re.compile(r"[EW]-[A-Z0-9]+")
KINDS = ("import", "load", "reward", "timeout", "memory", "output", "crash", "protocol")
"""Of what the sandbox reports; each is a code."""


def codes() -> set[str]:
    """All codes that the source can give."""
    source = "".join(path.read_text() for path in (ROOT / "src/metatrainer").rglob("*.py"))
    return set(re.findall(r'"([EW]-[A-Z0-9]+)"', source)) | {f"E-{kind.upper()}" for kind in KINDS}


def test_the_page_names_all_codes_and_no_others():
    assert set(CODE.findall(PAGE.read_text())) == codes()


def test_every_code_that_refuses_has_a_broken_job():
    cases = [
        case
        for name in dir(broken)
        if name.endswith("CASES")
        for case in getattr(broken, name)
        if isinstance(case, Case)
    ]
    assert {case.code for case in cases} == {code for code in codes() if code.startswith("E-")}
