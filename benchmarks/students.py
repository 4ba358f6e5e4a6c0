"""Students on every family: untrained at each level, and trained with the reference job.

    python benchmarks/students.py --students nano-wren,nano-finch --rates 3e-3
    python benchmarks/students.py --students smollm2,smollm2-tools --rates 1e-4,1e-3 --packed 12

Jobs of one student run side by side on one worker, each in the sandbox that a run would use. Scores
are of 256 hidden items with 95 % intervals; one seed. The best of several rates is a choice made on
these same items: it flatters by about the half of an interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import _machine

ITEMS, SEED = 256, 0


def untrained(settings: Any, student: str) -> list[dict[str, Any]]:
    """Scores of the base model at each level of each family."""
    from metatrainer import families
    from metatrainer.engine import Engine
    from metatrainer.students import catalogue
    from metatrainer.students.evaluate import evaluate

    engine = Engine.open(catalogue.verified_folder(student), student)
    print(f"{student} on {engine.device}", file=sys.stderr, flush=True)
    rows = []
    for name in (*settings.families, *settings.heldout):
        family = families.get(name)
        for level in family.levels:
            items = family.items("hidden", SEED, ITEMS, level)
            score = evaluate(engine, None, family, items, settings.evaluation, SEED)
            rows.append(
                {**score.model_dump(), "level": level, "evaluated": level == family.eval_level}
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def reference_job(settings: Any, name: str, student: str, rate: str, steps: int) -> dict[str, str]:
    """The reference job's files, with another learning rate and number of steps."""
    from metatrainer.agent.scaffold import job_toml
    from metatrainer.agent.task import draw_task
    from metatrainer.families import measure

    files = measure.reference_job(draw_task(settings, name, SEED, SEED), student, settings)
    text = job_toml(student, rate, batch_size=64, group_size=8, max_steps=steps)
    # Other tokenizers than the nano students' need about twice the tokens.
    files["job.toml"] = text.replace("[environment]", "seq_len = 1024\n[environment]")
    return files


async def trained(
    settings: Any, student: str, rates: list[str], steps: int
) -> list[dict[str, Any]]:
    """Results of the reference jobs, all at once on one pool."""
    from metatrainer.pool import jobdir
    from metatrainer.pool.base import JobOrder
    from metatrainer.pool.kinds import make_pool

    pool = make_pool(settings, SEED)
    with tempfile.TemporaryDirectory(prefix="metatrainer-") as folder:
        await pool.start()
        try:
            waiting = []
            for name in (*settings.families, *settings.heldout):
                for rate in rates:
                    id = f"{student}-{name}-{rate}"
                    order = JobOrder(
                        job_id=id,
                        family=name,
                        job_dir=Path(folder) / id,
                        student=student,
                        seed=SEED,
                    )
                    jobdir.create(order, reference_job(settings, name, student, rate, steps))
                    waiting.append(_row(name, rate, pool.run(order)))
            return list(await asyncio.gather(*waiting))
        finally:
            await pool.close()


async def _row(name: str, rate: str, running: Any) -> dict[str, Any]:
    result = await running
    row = {
        "family": name,
        "learning_rate": rate,
        "outcome": result.outcome,
        "message": result.message,
        "after": result.post.model_dump() if result.post else None,
        "rewards": [round(step["reward"], 3) for step in result.curve],
        "train_seconds": round(result.train_seconds, 1),
        "tokens": result.tokens,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--students", default="nano-wren,nano-finch")
    parser.add_argument("--rates", default="3e-3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--packed", type=int, default=6, help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, for each job")
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--unsafe", action="store_true", help="without a sandbox")
    options = parser.parse_args()
    _machine.as_worker()
    from metatrainer.config import parse_config

    rows = []
    for student in options.students.split(","):
        data = {
            "students": [student],
            "evaluation": {"items": ITEMS},
            "limits": {"max_seconds": options.seconds},
            "pool": {"workers": 1, "packed": options.packed},
            "unsafe_without_sandbox": options.unsafe,
        }
        settings = parse_config(data)
        row: dict[str, Any] = {"student": student, "untrained": untrained(settings, student)}
        if not options.no_train:
            rates = options.rates.split(",")
            row["trained"] = asyncio.run(trained(settings, student, rates, options.steps))
        rows.append(row)
    result = {"benchmark": "students", "items": ITEMS, "steps": options.steps, "rows": rows}
    print(json.dumps(result | _machine.facts(), indent=1))


if __name__ == "__main__":
    main()
