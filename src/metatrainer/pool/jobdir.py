"""The folder of one job: what is written where, and in which order, so that a kill loses nothing.

    files/         the submission, as validated
    order.json     the order; its presence says that files/ is complete
    attempt-<n>/   the once-only gate of each try: whoever makes the folder may run
    adapter/       the trained adapter
    trained.json   how the training went; its presence says that adapter/ is complete
    result.json    how the job ended; its presence says that the job is over

Knows nothing about processes or the ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from metatrainer.errors import PoolError
from metatrainer.pool.base import JobOrder, JobResult

FILES = "files"
ORDER = "order.json"
TRAINED = "trained.json"
RESULT = "result.json"
ADAPTER = "adapter"


def create(order: JobOrder, files: Mapping[str, str]) -> None:
    """Write a job's folder. A folder that is complete already is left as it is."""
    if (order.job_dir / ORDER).exists():
        return
    for path, text in files.items():
        target = order.job_dir / FILES / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    write_durably(order.job_dir / ORDER, order.model_dump_json())


def read_files(job_dir: Path) -> dict[str, str]:
    """The submission in a job's folder."""
    root = job_dir / FILES
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def claim(order: JobOrder) -> bool:
    """Take the right to run this attempt; False if somebody has it."""
    try:
        _gate(order.job_dir, order.attempt).mkdir()
    except FileExistsError:
        return False
    return True


def claimed(job_dir: Path, attempt: int) -> bool:
    """Whether a worker has begun this attempt."""
    return _gate(job_dir, attempt).exists()


def claimed_at(job_dir: Path, attempt: int) -> float:
    """When an attempt that is claimed was begun, in Unix time."""
    return _gate(job_dir, attempt).stat().st_ctime


def write_result(job_dir: Path, result: JobResult) -> None:
    """Record how a job ended."""
    write_durably(job_dir / RESULT, result.model_dump_json())


def read_result(job_dir: Path, job_id: str) -> JobResult | None:
    """How the job ended, or None if it has not."""
    return _read(job_dir / RESULT, job_id)


def write_trained(job_dir: Path, result: JobResult) -> None:
    """Record that the adapter is there: from now on only its score is missing."""
    write_durably(job_dir / TRAINED, result.model_dump_json())


def read_trained(job_dir: Path, job_id: str) -> JobResult | None:
    """How the training went, if an attempt got that far."""
    return _read(job_dir / TRAINED, job_id)


def trained_once(order: JobOrder, train: Callable[[], JobResult]) -> JobResult:
    """How the training of a job went: as an earlier attempt recorded it, else as `train` says."""
    trained = read_trained(order.job_dir, order.job_id)
    if trained is None:
        trained = train()
        write_trained(order.job_dir, trained)
    return trained


def _read(path: Path, job_id: str) -> JobResult | None:
    try:
        result = JobResult.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return result if result.job_id == job_id else None


def _gate(job_dir: Path, attempt: int) -> Path:
    return job_dir / f"attempt-{attempt}"


def write_durably(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, even after a power loss.

    Raises PoolError where there is no room for it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise PoolError(
            f"cannot write {path}: {error.strerror}; mend that and resume the run"
        ) from None
