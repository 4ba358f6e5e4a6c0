"""What benchmarks share: where they say they ran, and the environment of a worker."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from metatrainer.experiment import versions
from metatrainer.pool.process import worker_environment

_INSIDE = "METATRAINER_BENCHMARK_INSIDE"


def as_worker() -> None:
    """Go on only with the environment of a pool's worker: start the program anew in one, and end
    with it."""
    if _INSIDE not in os.environ:
        environment = {**worker_environment(), "PATH": os.environ["PATH"], _INSIDE: "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


def facts() -> dict[str, Any]:
    """Machine, versions, load and date."""
    return {
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "kernel": platform.release(),
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
