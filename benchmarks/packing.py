"""Nano GRPO jobs packed on one engine against the same jobs one after another, on one core.

    python benchmarks/packing.py [--jobs 1,4,16,40,160] [--repeats 3]

A job is 20 steps of 64 rollouts of two-hop persona questions, each with its own seed and learning
rate. Rewards are computed in the process (the sandbox costs the same either way, see nano_job.py).
Packed and single runs are interleaved; of 40 and more jobs one after another, the time is that of
16 times the rest. Quote the medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import _machine

STEPS, BATCH, GROUP, LEVEL = 20, 64, 8, 2
ALONE = 16
"""Jobs that are really run one after another; more are extrapolated."""


class Practice:
    """Tasks and rewards of a job."""

    def __init__(self, family: Any, seed: int):
        self._family = family
        self._items = family.items("train", seed, 256, LEVEL)

    def load(self) -> list[Any]:
        return [
            SimpleNamespace(prompt=i.prompt, system_prompt=None, data={"world": i.world})
            for i in self._items
        ]

    def score(self, batch: list[Any]) -> list[Any]:
        return [
            SimpleNamespace(reward=self._reward(self._items[task], messages[-1]), error=None)
            for task, messages in batch
        ]

    def _reward(self, item: Any, last: dict[str, Any]) -> float:
        said = last["content"] if last["role"] == "assistant" else ""
        return float(self._family.correct(said, item.answer))


def run(engine: Any, family: Any, student: str, seed: int) -> int:
    """One job, start to end. Returns tokens of its rollouts."""
    from metatrainer.inner.grpo import train_job
    from metatrainer.jobs.spec import TrainingSpec

    spec = TrainingSpec(
        model=student,
        learning_rate=(1e-3, 2e-3, 3e-3)[seed % 3],
        max_steps=STEPS,
        batch_size=BATCH,
        group_size=GROUP,
    )
    practice: Any = Practice(family, seed)
    deadline = engine.clock() + 3600
    job = train_job(engine, spec, practice.load(), practice, family, seed, deadline)
    engine.delete_adapter(job.adapter)
    return job.tokens


def packed(engine: Any, family: Any, student: str, jobs: int) -> float:
    """Seconds of all jobs at once."""
    from metatrainer.engine import Packer

    packer = Packer(engine)
    began = time.perf_counter()
    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(lambda seed: run(packer.lane(), family, student, seed), range(jobs)))
    seconds = time.perf_counter() - began
    packer.close()
    return seconds


def alone(engine: Any, family: Any, student: str, jobs: int) -> float:
    """Seconds of all jobs one after another."""
    began = time.perf_counter()
    for seed in range(min(jobs, ALONE)):
        run(engine, family, student, seed)
    return (time.perf_counter() - began) * jobs / min(jobs, ALONE)


def measure(student: str, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    import torch

    from metatrainer import families
    from metatrainer.engine import Engine
    from metatrainer.students import catalogue

    torch.set_num_threads(1)
    family = families.get("persona")
    engine = Engine(catalogue.verified_folder(student))
    run(engine, family, student, 0)  # warm
    rows = []
    for jobs in counts:
        times = [
            (packed(engine, family, student, jobs), alone(engine, family, student, jobs))
            for _ in range(repeats)
        ]
        together, apart = (statistics.median(column) for column in zip(*times))
        rows.append(
            {
                "student": student,
                "jobs": jobs,
                "packed_seconds": round(together, 2),
                "alone_seconds": round(apart, 2),
                "packed_jobs_per_second": round(jobs / together, 3),
                "alone_jobs_per_second": round(jobs / apart, 3),
                "ratio": round(apart / together, 2),
                "ratios": [round(a / p, 2) for p, a in times],
                "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure in a process with the environment of a pool's worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="1,4,16,40")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--student", default="nano-wren")
    options = parser.parse_args()
    _machine.as_worker()
    rows = measure(options.student, [int(n) for n in options.jobs.split(",")], options.repeats)
    result = {"benchmark": "packing", "steps": STEPS, "batch": BATCH, "rows": rows}
    print(json.dumps(result | _machine.facts(), indent=2))


if __name__ == "__main__":
    main()
