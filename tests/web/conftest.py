"""A run to look at: a ledger with everything in it, and hostile text wherever there can be any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metatrainer.ledger import Ledger

HOSTILE = (
    "<script>document.title='taken'</script>"
    "<img src=x onerror=\"document.title='taken'\">"
    "\x1b[31mred\x1b[0m \u202egnp.exe \x00 </pre></td> {{ 7 * 7 }} '\"&"
)
"""Planted in every field that an agent, a student or a job can write."""


def write_run(
    folder: Path, steps: int = 3, planned: int = 4, groups: int = 2, size: int = 4
) -> Path:
    """A run whose reward rises, with attempts, messages, a curve and samples of every job."""
    config = {
        "preset": "nano",
        "heldout": ["triage"],
        "outer": {"steps": planned, "heldout_episodes": 2},
        "pool": {"workers": 2, "packed": 1},
    }
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        ledger.create_run(folder.name, "nano", json.dumps(config), 0, {"metatrainer": "0"})
        for family, split in (("persona", "train"), ("triage", "heldout")):
            ledger.add_task(f"{family}-1", family, split, "{}")
            ledger.record_eval("baseline", "nano-wren", family, 128, 0.25, 0.18, 0.33, 1.0)
        for index in range(2):
            _play(ledger, f"heldout_before-000-00-{index:02d}", "triage-1", 0, 0, index, 0.2)
        for step in range(steps):
            add_step(ledger, step, steps, groups, size)
    return folder


def add_step(ledger: Ledger, step: int, steps: int, groups: int = 2, size: int = 4) -> None:
    """One finished step."""
    for group in range(groups):
        for index in range(size):
            id = f"train-{step:03d}-{group:02d}-{index:02d}"
            reward = 0.1 + 0.6 * step / steps + 0.02 * index
            _play(ledger, id, "persona-1", step, group, index, reward)
    ledger.finish_step(step, 0.1 + 0.6 * step / steps, "{}", 30.0)


def _play(
    ledger: Ledger, id: str, task: str, step: int, group: int, index: int, reward: float
) -> None:
    ledger.open_episode(id, id.split("-")[0], step, group, index, task)
    say = {"role": "assistant", "content": HOSTILE, "errors": [HOSTILE]}
    calls = [{"id": "call-0", "name": HOSTILE, "arguments": {"path": HOSTILE, HOSTILE: HOSTILE}}]
    for n, message in enumerate(
        (
            {"role": "user", "content": "write a job"},
            {**say, "tool_calls": calls},
            {"role": "tool", "name": "write_file", "content": HOSTILE},
        )
    ):
        ledger.record_message(id, n, message["role"], json.dumps(message))
    ledger.record_turn(id, 0, json.dumps(say), 100, [1, 2, 3], [-0.1] * 3, 0.1)
    found = {"code": "E-LR", "file": "job.toml", "line": 2, "found": HOSTILE, "allowed": "1e-3",
             "fix": HOSTILE}  # fmt: skip
    files = {"job.toml": "lr = 1\n", f"environment/{HOSTILE}.py": HOSTILE}
    refused = json.dumps({"findings": [found], "cheating": False, "parseable": True})
    ledger.record_attempt(id, 1, False, refused, json.dumps(files), 0.1)
    files = files | {"job.toml": "lr = 2\n"}
    accepted = json.dumps({"findings": [], "cheating": False, "parseable": True})
    ledger.record_attempt(id, 2, True, accepted, json.dumps(files), 0.1)
    job = f"{id}-{index:08x}"
    ledger.start_job(job, id, 1, "nano-wren", json.dumps({"prime_rl": {"model": HOSTILE}}))
    said = [{"role": role, "content": HOSTILE} for role in ("user", "assistant")]
    sample = {"messages": said, "correct": False}
    result = {
        "outcome": "ok",
        "rollouts": 1280,
        "tokens": 5000,
        "train_seconds": 2.0,
        "eval_seconds": 0.2,
        "slot": index % 2,
        "seconds": 2.2,
        "began": 1e9 + 60 * step + 5 * (index // 2),
        "curve": [{"step": i, "reward": 0.1 * i, "dead_groups": 0.5, "seconds": 0.1}
                  for i in range(6)],
        "samples": {"before": [sample], "after": [sample]},
    }  # fmt: skip
    outcome = "ok" if index else "crashed"
    ledger.finish_job(job, 1, outcome, "" if index else HOSTILE, json.dumps(result), 2.2)
    ledger.record_eval(job, "nano-wren", task.split("-")[0], 128, 0.5, 0.4, 0.6, 0.2)
    quality = reward / 2
    ledger.finish_episode(
        id, 0.5, quality, 0.8, reward, outcome, 0.5 if index else None, 0.25, "nano-wren", 12.0
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that goes on, in a folder of runs."""
    return write_run(tmp_path / "nano-try-1")
