"""What every benchmark says about where it ran."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

from metatrainer.experiment import versions


def facts() -> dict[str, Any]:
    """Machine, versions, load and date."""
    return {
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
