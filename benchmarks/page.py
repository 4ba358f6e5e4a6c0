"""How fast the live page opens on a large run: every view, median and 95th percentile.

    python benchmarks/page.py [--scale 1,10] [--repeats 20]

Scale 1 is a run of 54 steps of 40 episodes, each with its messages, attempts, job and curve; 10 is
ten times as many steps. Views are asked for over HTTP in this process, each with another step or
episode every time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _machine

STEPS, GROUPS, SIZE = 54, 5, 8
FILE = "x = 1  # a line of an environment that an agent wrote, as long as they are\n" * 60


def write_ledger(folder: Path, steps: int) -> Path:
    """A run of that many steps."""
    from metatrainer.ledger import Ledger

    rng = random.Random(0)
    config = {
        "heldout": ["triage"],
        "outer": {"steps": steps, "heldout_episodes": 16},
        "pool": {"workers": 4, "packed": 4},
    }
    with Ledger(folder / "ledger.sqlite") as ledger:
        with ledger.transaction():
            ledger.create_run(folder.name, "nano", json.dumps(config), 0, {"metatrainer": "0"})
            for family in ("persona", "inventory", "triage"):
                ledger.add_task(family, family, "train", "{}")
                ledger.record_eval("baseline", "nano-wren", family, 128, 0.25, 0.2, 0.3, 1.0)
        for step in range(steps):
            with ledger.transaction():
                for group in range(GROUPS):
                    for index in range(SIZE):
                        _episode(ledger, rng, step, group, index, steps)
                ledger.finish_step(step, 0.5, "{}", 60.0)
    return folder


def _episode(
    ledger: Any, rng: random.Random, step: int, group: int, index: int, steps: int
) -> None:
    id = f"train-{step:03d}-{group:02d}-{index:02d}"
    family = ("persona", "inventory")[group % 2]
    ledger.open_episode(id, "train", step, group, index, family)
    call = {
        "id": "c",
        "name": "write_file",
        "arguments": {"path": "job.toml", "content": FILE[:300]},
    }
    for n in range(10):
        role = "assistant" if n % 2 else "tool"
        said = {"role": role, "content": FILE[:400], **({"tool_calls": [call]} if n % 2 else {})}
        ledger.record_message(id, n, role, json.dumps(said))
    files = {"job.toml": "lr = 1e-3\n", "environment/__init__.py": FILE}
    verdict = json.dumps({"findings": [], "cheating": False, "parseable": True})
    ledger.record_attempt(id, 1, True, verdict, json.dumps(files), 0.1)
    job = f"{id}-{rng.randrange(1 << 32):08x}"
    ledger.start_job(job, id, 1, "nano-wren", "{}")
    curve = [
        {"step": i, "reward": i / 20, "dead_groups": 0.1, "tokens": 40.0, "seconds": 0.1}
        for i in range(20)
    ]
    began = 1e9 + 60 * step + 5 * index
    result = {"curve": curve, "slot": index, "began": began, "seconds": 3.0}
    ledger.finish_job(job, 1, "ok", "", json.dumps(result), 3.0)
    ledger.record_eval(job, "nano-wren", family, 128, 0.5, 0.4, 0.6, 0.2)
    reward = min(1.0, max(-0.1, rng.gauss(0.1 + 0.5 * step / steps, 0.2)))
    ledger.finish_episode(id, 1.0, reward, 0.8, reward, "ok", 0.5, 0.3, "nano-wren", 20.0)


def measure(run: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of each view."""
    from starlette.testclient import TestClient

    from metatrainer.ledger import Ledger
    from metatrainer.web.app import make_app

    client = TestClient(make_app(run.parent), base_url="http://localhost")
    with Ledger(run / "ledger.sqlite", readonly=True) as ledger:
        jobs = [row[0] for row in ledger.query("SELECT id FROM job ORDER BY rowid")]
    rng = random.Random(1)

    def addresses() -> dict[str, str]:
        job, base = rng.choice(jobs), f"/run/{run.name}"
        return {
            "runs": "/",
            "run": base,
            "step": f"{base}/train/{rng.randrange(steps)}",
            "episode": f"{base}/episode/{job[:-9]}",
            "job": f"{base}/job/{job}",
            "pool": f"{base}/pool",
            "compare": f"/compare?run={run.name}",
            "leaderboard": "/leaderboard",
        }

    times: dict[str, list[float]] = {}
    for n in range(repeats + 2):  # the first two warm templates and the file cache
        for name, address in addresses().items():
            began = time.perf_counter()
            assert client.get(address).status_code == 200
            if n >= 2:
                times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
    return {
        name: {
            "median_ms": round(statistics.median(values), 1),
            "p95_ms": round(statistics.quantiles(values, n=20)[-1], 1),
        }
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="1,10")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rows = {}
    for scale in options.scale.split(","):
        steps = STEPS * int(scale)
        with tempfile.TemporaryDirectory() as folder:
            run = write_ledger(Path(folder) / "run", steps)
            rows[f"{steps} steps of {GROUPS * SIZE} episodes"] = measure(
                run, steps, options.repeats
            )
    print(json.dumps({"benchmark": "page", "views": rows, **_machine.facts()}, indent=2))


if __name__ == "__main__":
    main()
