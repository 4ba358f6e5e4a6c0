"""What a run of prime-rl left, and what it says while it runs: metrics, adapter, logs.

Reads files that its processes and the job's code wrote, so nothing in them is trusted to be whole.
Knows nothing about processes or servers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from metatrainer.sandbox.host import TaskRow

METRICS = "metrics.jsonl"
BROADCASTS = "broadcasts"
TRACES = "rollouts/step_*/train/all/traces.jsonl"
MAX_TRACES_BYTES = 256 << 20
"""Conversations are read to so many bytes of a step."""
STABLE = "STABLE"
"""Marks a broadcast that is complete."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_ALL = "train/agg/all"
_STEP_KEYS = {
    "reward": f"{_ALL}/agent/reward/mean",
    "reward_low": f"{_ALL}/agent/reward/min",
    "reward_high": f"{_ALL}/agent/reward/max",
    "reward_errors": f"{_ALL}/has_error/mean",
    "unfinished": f"{_ALL}/agent/is_truncated/mean",
    "tokens": f"{_ALL}/num_output_tokens/mean",
    "loss": "loss/mean",
    "entropy": "entropy/all/mean",
    "grad_norm": "optim/grad_norm",
    "seconds": "time/step",
    "all_tokens": "progress/tokens",
    "rollouts": "progress/rollouts",
}
"""Our word for a number of a step, and prime-rl's key; orchestrator and trainer each write some."""
_SOLVED = (f"{_ALL}/agent/solved_all", f"{_ALL}/agent/solved_none")
_EVAL_REWARD = re.compile(r"eval/(.+)/all/agent/reward/mean")
_CLOCK = re.compile(r"(?:^|\s|m)(\d\d):(\d\d):(\d\d)(?:\x1b|\s)")
DAY = 86_400


@dataclass(frozen=True)
class OwnEval:
    """A check that the run made by itself; errors are in it as prime-rl counts them."""

    step: int
    name: str
    reward: float
    unfinished: float | None


@dataclass(frozen=True)
class RunRecord:
    """A run so far."""

    curve: list[dict[str, float]]
    """One row for each step that was begun; numbers that were not written are missing."""
    trained: int
    """Steps that the trainer has finished."""
    evals: list[OwnEval]
    lines: int
    """Lines of metrics: a run that gets on writes more."""
    garbage: int
    """Lines that are no metrics."""
    spoilt: str
    """Which number is not finite, and at which step; empty if all are."""

    @property
    def rollouts(self) -> int:
        """Conversations sampled."""
        return int(sum(row.get("rollouts", 0) for row in self.curve))

    @property
    def tokens(self) -> int:
        """Tokens of them."""
        return int(sum(row.get("all_tokens", 0) for row in self.curve))

    @property
    def without_signal(self) -> bool:
        """The last batch's rewards were all the same, so that it taught nothing."""
        last = next((row for row in reversed(self.curve) if "reward" in row), {})
        return bool(last) and last.get("reward_low") == last.get("reward_high")


def read_run(folder: Path) -> RunRecord:
    """The run in a folder, at any time; a run that has not begun is empty."""
    steps: dict[int, dict[str, float]] = {}
    evals: list[OwnEval] = []
    lines = garbage = trained = 0
    spoilt = ""
    for row in _rows(folder / METRICS):
        lines += 1
        if row is None:
            garbage += 1
            continue
        step = int(row["step"])
        evals += _evals(row, step)
        bad = next((k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)), "")
        spoilt = spoilt or (bad and f"{bad} is {row[bad]} at step {step}")
        # prime-rl leaves out what is not finite; of a trainer's row, that may be the loss itself.
        if "optim/lr" in row and "optim/grad_norm" not in row:
            spoilt = spoilt or f"optim/grad_norm is not finite at step {step}"
        if any(key.startswith("entropy/") for key in row) and "loss/mean" not in row:
            spoilt = spoilt or f"loss/mean is not finite at step {step}"
        if "optim/lr" in row:
            trained = max(trained, step)
        if found := _numbers(row):
            # Both time a step; the orchestrator, which writes first, times it whole.
            steps[step] = found | steps.get(step, {"step": step - 1})
    curve = [steps[step] for step in sorted(steps)]
    return RunRecord(curve, trained, evals, lines, garbage, spoilt)


def adapter_folder(run: Path, step: int) -> Path | None:
    """The adapter after a step, once it is complete."""
    folder = run / BROADCASTS / f"step_{step}"
    there = all((folder / name).is_file() for name in (STABLE, *ADAPTER_FILES))
    return folder if there else None


def trained_tasks(run: Path) -> list[TaskRow]:
    """The tasks that the run says it trained on; each may come more than once."""
    tasks = []
    for path in sorted(run.glob(TRACES)):
        with path.open(encoding="utf-8", errors="replace") as file:
            tasks += [row for line in file.readlines(MAX_TRACES_BYTES) if (row := _task(line))]
    return tasks


def _task(line: str) -> TaskRow | None:
    """The task of one conversation; None where the line is none."""
    try:
        task = json.loads(line)["task"]
        data = dict(task["data"])
        prompt, system = str(data.pop("prompt")), data.pop("system_prompt", None)
        return TaskRow(prompt, None if system is None else str(system), data, str(task["key"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def clock_seconds(log: str) -> float:
    """Seconds from the first to the last time of day in a launcher's log."""
    times = [int(h) * 3600 + int(m) * 60 + int(s) for h, m, s in _CLOCK.findall(log)]
    return float(sum((b - a) % DAY for a, b in pairwise(times))) if times else 0.0


def _rows(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Rows of the metrics, None for each that is none. A line without its end is not there yet."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n")[:-1]:
        try:
            row = json.loads(line)
            whole = isinstance(row, dict) and isinstance(row["step"], int | float)
            yield row if whole and math.isfinite(row["step"]) else None
        except (ValueError, KeyError, RecursionError):
            yield None


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    found = {ours: float(row[key]) for ours, key in _STEP_KEYS.items() if _finite(row.get(key))}
    if all(_finite(row.get(key)) for key in _SOLVED):
        found["dead_groups"] = float(sum(row[key] for key in _SOLVED))
    return found


def _evals(row: Mapping[str, Any], step: int) -> list[OwnEval]:
    return [
        OwnEval(step, match[1], value, row.get(f"eval/{match[1]}/all/agent/is_truncated/mean"))
        for key, value in row.items()
        if (match := _EVAL_REWARD.fullmatch(key)) and _finite(value)
    ]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
