"""Runs one job on prime-rl and says how it ended, by its progress rather than by its being alive.

Knows processes, metrics and adapters; knows nothing about scores, pools or hidden items.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from metatrainer.engine.files import load_config
from metatrainer.engine.lora import PEFT_PREFIX, Adapter
from metatrainer.errors import JobError
from metatrainer.inner.kept import Kept, said
from metatrainer.inner.prime_rl_run import (
    ADAPTER_FILES,
    METRICS,
    RunRecord,
    adapter_folder,
    read_run,
)
from metatrainer.inner.prime_rl_server import BAD_ADAPTER
from metatrainer.jobs.compile import Compiled, Target
from metatrainer.pool.base import STOPPED

POLL_SECONDS = 0.2
MAX_ADAPTER_BYTES = 2 << 30
MAX_METRICS_BYTES = 64 << 20
MAX_SAID = 400
"""Characters of a message that names what is in a file."""
GARBAGE_LINES = 10
"""So many lines of metrics that are none, and no step beside them, are no run."""

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory", re.I)
_EMPTY = re.compile(r"\b(empty|zero|no)\b[^\n]{0,40}\b(batch|batches|advantages?)\b", re.I)
_NAN = re.compile(r"\b(loss|grad\w*|logprobs?)\b[^\n]{0,40}\b(nan|inf)\b", re.I)
_KILLED = 137


@dataclass(frozen=True)
class Waits:
    """How long a run is waited for, in seconds."""

    start: float
    """Until its first line of metrics."""
    stall: float
    """From one line of metrics to the next."""
    total: float
    """From the first line to the end."""


@dataclass(frozen=True)
class Trained:
    """A run that ended well."""

    record: RunRecord
    seconds: float
    """From its start to its end."""


def train(
    command: Sequence[str],
    compiled: Compiled,
    target: Target,
    folder: Path,
    waits: Waits,
    adapter: Path,
    stop: threading.Event,
) -> Trained:
    """Run a compiled job in `folder` and put its adapter into `adapter`.

    command: the `rl` executable. stop: set, the run is ended and JobError(STOPPED) raised.
    Raises JobError with how it ended otherwise: no_start, stalled, timeout, crashed, out_of_memory,
    diverged, empty_batches, garbage, no_adapter, bad_adapter.
    """
    began = time.monotonic()
    config = Path(target.config_path)
    config.write_text(compiled.text, encoding="utf-8")
    run, log = Path(target.output_dir) / target.run_name, folder / "rl.log"
    kept = Kept([*command, "@", str(config)], compiled.environment, folder, log)
    try:
        record, status = _watch(kept, run, waits, stop)
    except JobError as error:
        raise _explained(error, run, log) from None
    finally:
        kept.end()
    if status:
        raise _explained(JobError("crashed", f"rl ended with status {status}"), run, log, status)
    if record.spoilt:
        raise JobError("diverged", record.spoilt)
    if not record.curve:
        what = "metrics that cannot be read" if record.garbage else "no metrics"
        raise JobError(
            "garbage" if record.garbage else "crashed", f"rl ended well, but left {what}"
        )
    steps = compiled.config["max_steps"]
    found = adapter_folder(run, steps)
    if found is None:
        raise JobError("no_adapter", f"rl ended well, but left no adapter of step {steps}")
    take_adapter(found, adapter, Path(target.model), compiled.config["trainer"]["model"]["lora"])
    return Trained(record, time.monotonic() - began)


def take_adapter(found: Path, adapter: Path, base: Path, lora: Mapping[str, Any]) -> None:
    """Write the adapter in `found` anew, from its tensors alone: what else lies there is left.

    base: folder of the student. lora: rank and alpha that were asked for. Raises JobError:
    BAD_ADAPTER for what is not an adapter of this model and rank, whole and in its very shape,
    diverged for one whose numbers are not finite.
    """
    weights = found / ADAPTER_FILES[1]
    if weights.is_symlink():
        raise JobError(BAD_ADAPTER, "the adapter is a link")
    if weights.stat().st_size > MAX_ADAPTER_BYTES:
        raise JobError(BAD_ADAPTER, f"the adapter is larger than {MAX_ADAPTER_BYTES} bytes")
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise JobError(BAD_ADAPTER, f"the adapter cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise JobError("diverged", f"{name[:200]} of the adapter is not finite")
    # prime-rl names a tensor as the model does, PEFT with a prefix.
    named = {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): t for name, t in tensors.items()}
    rank, alpha = lora["rank"], lora["alpha"]
    try:
        taken = Adapter.of_tensors(load_config(base), named, rank, alpha)
    except ValueError as error:
        said = f"it is not an adapter of {base.name} of rank {rank}: {error}"
        raise JobError(BAD_ADAPTER, said[:MAX_SAID]) from None
    taken.save_peft(adapter, base.name)


def _watch(
    kept: Kept, run: Path, waits: Waits, stop: threading.Event
) -> tuple[RunRecord, int | None]:
    """Wait for the end of a run that gets on. Raises JobError where it does not."""
    began = moved = time.monotonic()
    first: float | None = None
    lines = size = 0
    record = read_run(run)
    while (status := kept.status()) is None:
        if stop.wait(POLL_SECONDS):
            raise JobError(STOPPED, "it was told to stop")
        now, path = time.monotonic(), run / METRICS
        grown = path.stat().st_size if path.exists() else 0
        if grown > MAX_METRICS_BYTES:
            raise JobError("garbage", f"its metrics are larger than {MAX_METRICS_BYTES} bytes")
        if grown != size:
            size, record = grown, read_run(run)
        if record.spoilt:
            raise JobError("diverged", record.spoilt)
        if record.garbage >= GARBAGE_LINES and not record.curve:
            raise JobError("garbage", "its metrics cannot be read")
        good = record.lines - record.garbage
        if good > lines:
            lines, moved = good, now
            first = first or now
        if first is None and now - began > waits.start:
            raise JobError("no_start", f"no step was begun in {waits.start:g} s")
        if first and now - first > waits.total:
            done = f"{record.trained} steps were done"
            raise JobError("timeout", f"out of time after {waits.total:g} s; {done}")
        if first and now - moved > waits.stall:
            where = f"after step {record.trained}"
            if record.without_signal:
                why = "the last batch's rewards were all the same"
                raise JobError("empty_batches", f"nothing moved for {waits.stall:g} s; {why}")
            raise JobError("stalled", f"nothing moved for {waits.stall:g} s {where}")
    return read_run(run), status


def _explained(error: JobError, run: Path, log: Path, status: int = 0) -> JobError:
    """The error with what the logs say, under the name that they give it."""
    if error.outcome in (STOPPED, "timeout", "diverged", "garbage", "empty_batches"):
        return error
    end = said(log)
    told = "\n".join([end, *(said(path) for path in sorted((run / "logs").glob("latest/*.log")))])
    if _OUT_OF_MEMORY.search(told) or status == _KILLED:
        return JobError("out_of_memory", f"{error.message}: {end}")
    if _NAN.search(told):
        return JobError("diverged", f"{error.message}: {end}")
    if _EMPTY.search(told):
        return JobError("empty_batches", f"{error.message}: {end}")
    return JobError(error.outcome, f"{error.message}: {end}" if end else error.message)
