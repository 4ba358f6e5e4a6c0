"""How long one nano job takes on one core, its sandbox included: 20 GRPO steps of 64 rollouts.

    python benchmarks/nano_job.py [--seeds 7]

The job is the one that the scripted `reference` agent would write for persona's two-hop questions,
on each student. The sandbox and the student are warm, as they are in a pool's slot; opening the
session, loading the tasks and scoring every rollout count. Prints JSON; quote the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import _machine

STEPS, BATCH, GROUP, LEVEL = 20, 64, 8, 2


def measure(seeds: int) -> dict[str, list[float]]:
    """Seconds of each job, by student."""
    import torch

    from metatrainer import families
    from metatrainer.agent.policies import EXACT_REWARD
    from metatrainer.engine import Engine
    from metatrainer.inner.grpo import train_job
    from metatrainer.jobs.spec import TrainingSpec
    from metatrainer.sandbox.host import Guest
    from metatrainer.students import catalogue

    torch.set_num_threads(1)
    family = families.get("persona")
    files = {"job.toml": "", **family.starter_files()}
    text = files["environment/__init__.py"]
    for old, new in (
        ("LEVELS = [1]", f"LEVELS = [{LEVEL}]"),
        ("TASKS = 64", "TASKS = 256"),
        ("self.data.answer in reply", EXACT_REWARD),
    ):
        text = text.replace(old, new)
    files["environment/__init__.py"] = text
    seconds: dict[str, list[float]] = {}
    with Guest(0) as guest:
        for student in catalogue.shipped():
            engine = Engine(catalogue.verified_folder(student))
            spec = TrainingSpec(
                model=student,
                learning_rate=3e-3,
                max_steps=STEPS,
                batch_size=BATCH,
                group_size=GROUP,
            )
            for seed in range(-1, seeds):  # the first one warms up
                began = time.perf_counter()
                with guest.session(files, "environment", {}, 10.0) as env:
                    deadline = engine.clock() + 120
                    job = train_job(engine, spec, env.load(), env, family, seed % 1000, deadline)
                if seed >= 0:
                    seconds.setdefault(student, []).append(time.perf_counter() - began)
                engine.delete_adapter(job.adapter)
    return seconds


def main() -> None:
    """Measure in a process with the environment of a pool's worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=7)
    options = parser.parse_args()
    _machine.as_worker()
    seconds = measure(options.seeds)
    result = {
        "benchmark": "nano_job",
        "steps": STEPS,
        "batch": BATCH,
        "median_seconds": {s: statistics.median(v) for s, v in seconds.items()},
        "seconds": seconds,
    }
    print(json.dumps(result | _machine.facts(), indent=2))


if __name__ == "__main__":
    main()
