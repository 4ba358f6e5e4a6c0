"""Checkpoints as folders under `tinker://<run>/<kind>/<name>` paths.

A folder appears whole or not at all: it is written beside its place and renamed. Knows nothing
about engines; what goes into a folder is the caller's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import httpx
import tinker
from pydantic import BaseModel, ConfigDict
from tinker import types

Kind = Literal["weights", "sampler_weights"]

_KIND_OF_TYPE: dict[str, Kind] = {"training": "weights", "sampler": "sampler_weights"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


_ADOPTED, _ADOPTED_NAME = "run-start", "start"


class RunInfo(BaseModel):
    """What is known about a training run; a copy lies in each of its checkpoints."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    run_id: str
    base_model: str
    lora_rank: int
    user_metadata: dict[str, str] = {}


class CheckpointStore:
    """The checkpoints of all runs under one folder."""

    def __init__(self, root: Path):
        self._root = root

    def open_run(self, base_model: str, lora_rank: int, metadata: dict[str, str]) -> RunInfo:
        """A new run with the next free id."""
        self._root.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in self._root.iterdir())
        while True:
            try:
                (self._root / f"run-{number:04d}").mkdir()
                break
            except FileExistsError:
                number += 1
        info = RunInfo(
            run_id=f"run-{number:04d}",
            base_model=base_model,
            lora_rank=lora_rank,
            user_metadata=metadata,
        )
        (self._root / info.run_id / "run.json").write_text(info.model_dump_json())
        return info

    def save(
        self, info: RunInfo, kind: Kind, name: str, write: Callable[[Path], object], overwrite: bool
    ) -> str:
        """Have `write` fill a folder and put it in place. Returns its tinker:// path."""
        if not _NAME.fullmatch(name):
            raise refusal(
                tinker.BadRequestError,
                f"checkpoint name {name!r}: use letters, digits, '_', '-' and '.', no leading '.'",
            )
        place = self._root / info.run_id / kind / name
        if place.exists() and not overwrite:
            raise refusal(
                tinker.ConflictError,
                f"run {info.run_id} already has {kind}/{name}; choose another name or overwrite",
            )
        staging = place.with_name(f".{name}.{os.getpid()}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write(staging)
        (staging / "run.json").write_text(info.model_dump_json())
        _publish(staging, place)
        return f"tinker://{info.run_id}/{kind}/{name}"

    def adopt(self, other: CheckpointStore, path: str) -> str:
        """Copy the training state of another store's checkpoint here. Returns its path here."""
        folder, info = other.find(path, "weights")
        return self.save(
            info.model_copy(update={"run_id": _ADOPTED}),
            "weights",
            _ADOPTED_NAME,
            lambda staging: shutil.copytree(folder / "state", staging / "state"),
            overwrite=False,
        )

    def adopted(self) -> str | None:
        """The path of what was adopted, if anything was."""
        there = (self._root / _ADOPTED / "weights" / _ADOPTED_NAME / "run.json").is_file()
        return f"tinker://{_ADOPTED}/weights/{_ADOPTED_NAME}" if there else None

    def find(self, path: str, kind: Kind | None = None) -> tuple[Path, RunInfo]:
        """Folder and run of a tinker:// path. kind: the only one that fits the call."""
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        folder = self._root / parsed.training_run_id / parsed.checkpoint_id
        found = _KIND_OF_TYPE.get(parsed.checkpoint_type)
        if found is None or (kind is not None and found != kind):
            raise refusal(
                tinker.BadRequestError,
                f"{path} is not a {kind or 'weights or sampler_weights'} path, which this needs",
            )
        if not all(_NAME.fullmatch(part) for part in (parsed.training_run_id, folder.name)):
            raise refusal(tinker.BadRequestError, f"{path} is not a path of this service")
        if not (folder / "run.json").is_file():
            raise refusal(
                tinker.NotFoundError,
                f"no checkpoint {path}; there are: {', '.join(self.paths()) or 'none'}",
            )
        return folder, RunInfo.model_validate_json((folder / "run.json").read_text())

    def delete(self, path: str) -> None:
        """Remove a checkpoint."""
        folder, _ = self.find(path)
        gone = folder.with_name(f".{folder.name}.{os.getpid()}")
        os.replace(folder, gone)
        shutil.rmtree(gone)

    def paths(self) -> list[str]:
        """All tinker:// paths, runs in order, each run's from old to new."""
        return [path for run in sorted(self._root.glob("run-*")) for path in self._of_run(run)]

    def training_run(self, path: str) -> types.TrainingRun:
        """The SDK's description of the run that a path belongs to."""
        return self.describe_run(self.find(path)[1].run_id)

    def run_ids(self) -> list[str]:
        """Ids of all runs, from old to new."""
        return sorted(run.parent.name for run in self._root.glob("run-*/run.json"))

    def checkpoints(self, run_id: str) -> list[types.Checkpoint]:
        """The SDK's descriptions of a run's checkpoints, from old to new."""
        return [self._describe(path) for path in self._of_run(self._folder(run_id))]

    def describe_run(self, run_id: str) -> types.TrainingRun:
        """The SDK's description of a run."""
        file = self._folder(run_id) / "run.json"
        info = RunInfo.model_validate_json(file.read_text())
        checkpoints = self.checkpoints(run_id)
        began = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        training = [c for c in checkpoints if c.checkpoint_type == "training"]
        sampler = [c for c in checkpoints if c.checkpoint_type == "sampler"]
        return types.TrainingRun(
            training_run_id=info.run_id,
            base_model=info.base_model,
            model_owner="local",
            is_lora=True,
            lora_rank=info.lora_rank,
            last_request_time=max([began, *(c.time for c in checkpoints)]),
            last_checkpoint=training[-1] if training else None,
            last_sampler_checkpoint=sampler[-1] if sampler else None,
            user_metadata=info.user_metadata,
        )

    def _folder(self, run_id: str) -> Path:
        if run_id not in self.run_ids():
            raise refusal(tinker.NotFoundError, f"no training run {run_id}")
        return self._root / run_id

    def _of_run(self, run: Path) -> list[str]:
        folders = [f for kind in _KIND_OF_TYPE.values() for f in (run / kind).glob("[!.]*")]
        folders.sort(key=lambda folder: folder.stat().st_mtime_ns)
        return [f"tinker://{run.name}/{folder.parent.name}/{folder.name}" for folder in folders]

    def _describe(self, path: str) -> types.Checkpoint:
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        folder = self._root / parsed.training_run_id / parsed.checkpoint_id
        return types.Checkpoint(
            checkpoint_id=parsed.checkpoint_id,
            checkpoint_type=parsed.checkpoint_type,
            time=datetime.fromtimestamp(folder.stat().st_mtime, UTC),
            tinker_path=path,
            size_bytes=sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
        )


def refusal(kind: type[tinker.APIStatusError], message: str) -> tinker.APIStatusError:
    """An exception of the SDK as if a server had answered with its status."""
    request = httpx.Request("POST", "tinker://in-process")
    return kind(message, response=httpx.Response(kind.status_code, request=request), body=None)


def _publish(staging: Path, place: Path) -> None:
    for file in staging.rglob("*"):
        if file.is_file():
            _sync(file)
    if place.exists():
        old = place.with_name(f".{place.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(place, old)
        os.replace(staging, place)
        shutil.rmtree(old)
    else:
        os.replace(staging, place)
    _sync(place.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
