"""What is wrong with a submission, as data, and as short lines that a small model can act on.

Knows nothing about how faults are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from metatrainer.shown import one_line

SHOWN = 4
"""Findings in one answer to the agent; the first are the ones to mend first."""
MAX_WORDS = 40
MAX_CHARS = 400


@dataclass(frozen=True)
class Finding:
    """One fault of a submission, or something to think about."""

    code: str
    """Kind of fault, such as E-LR; stable, for tests and the ledger. Those that begin with W warn
    and refuse nothing."""
    file: str | None
    line: int | None
    found: str
    """What is there."""
    allowed: str = ""
    """What may be there."""
    fix: str = ""
    """What to do."""

    @property
    def severity(self) -> str:
        """error or warning."""
        return "warning" if self.code.startswith("W-") else "error"

    def render(self) -> str:
        """One line: code, place, what was found, what is allowed, what to do."""
        place = "" if self.file is None else self.file
        if self.file is not None and self.line is not None:
            place += f":{self.line}"
        head = " ".join(part for part in (self.code, place, self.found) if part)
        allowed = f"allowed: {self.allowed}" if self.allowed else ""
        words = "; ".join(part for part in (head, allowed, self.fix) if part).split()
        return one_line(" ".join(words[:MAX_WORDS]), MAX_CHARS)

    def as_dict(self) -> dict[str, Any]:
        """The finding for the ledger; plain JSON."""
        return {"severity": self.severity, **asdict(self)}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Finding:
        """What as_dict made."""
        return cls(**{field.name: kept[field.name] for field in fields(cls)})


def render(findings: Sequence[Finding]) -> str:
    """The first findings, one a line, and how many more there are."""
    lines = [finding.render() for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append(f"and {len(findings) - SHOWN} more")
    return "\n".join(lines)
