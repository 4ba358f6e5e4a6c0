"""How long a validation takes in a warm sandbox: every job of the suite, good and broken.

    python benchmarks/validate.py [--rounds 3]

What an agent waits for after submit_job, one submission at a time, with hidden items, leaks and the
student's tokenizer. The suite is that of tests/jobs/suite; the finding of each job is compared with
what it must be. Two broken jobs are slow by design: one never ends loading, one has a slow reward.
Prints JSON; quote median and p95.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import _machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "jobs"))

HIDDEN_SEED = 20_250_101
BARS = {"median": 300, "p95": 1000}


async def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds of each validation after a first one that is not counted."""
    from suite import CASES

    from metatrainer.agent.task import draw_task
    from metatrainer.agent.validator import Validator
    from metatrainer.config import RunSettings

    settings = RunSettings()
    rules = {case.family: draw_task(settings, case.family, 0, HIDDEN_SEED).rules for case in CASES}
    validator = Validator(sandboxes=1)
    began = time.perf_counter()
    await validator.start()
    start = time.perf_counter() - began
    await validator.validate(CASES[-1].files, rules["persona"])
    taken: dict[str, list[float]] = {case.name: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            fresh = replace(rules[case.family])  # each task prepares its items anew
            began = time.perf_counter()
            verdict = await validator.validate(case.files, fresh)
            taken[case.name].append(1000 * (time.perf_counter() - began))
            found = verdict.findings[0].code if verdict.findings else ""
            assert found == case.code, (case.name, found)
    await validator.close()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    slowest = sorted(medians, key=lambda name: -medians[name])[:5]
    return {
        "milliseconds": {
            kind: spread([ms for c in CASES if bool(c.code) in kinds for ms in taken[c.name]])
            for kind, kinds in {"all": (0, 1), "good": (0,), "broken": (1,)}.items()
        },
        "bars": BARS,
        "slowest": {name: round(medians[name]) for name in slowest},
        "start of a sandbox, seconds": round(start, 2),
        "jobs": {
            "good": sum(not c.code for c in CASES),
            "broken": sum(bool(c.code) for c in CASES),
        },
        "rounds": rounds,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    percentiles = statistics.quantiles(values, n=100, method="inclusive")
    return {"median": round(statistics.median(values), 1), "p95": round(percentiles[94], 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = asyncio.run(measure(arguments.rounds))
    print(json.dumps(result | _machine.facts(), indent=2))


if __name__ == "__main__":
    main()
