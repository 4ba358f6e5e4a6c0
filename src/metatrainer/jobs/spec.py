"""The settings of a job as the agent writes them in job.toml, with their bounds.

Knows the names and limits of settings; knows nothing about tasks, students or environments.
prime-rl takes the same names; what it would accept and waste a run on is refused here.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from metatrainer.config import nearest
from metatrainer.jobs.findings import Finding

JOB_FILE = "job.toml"

Version = Literal[1]
VERSIONS: tuple[int, ...] = get_args(Version)
"""Forms of job.toml that are understood, the newest last."""


class Table(BaseModel):
    """A table of job.toml: frozen, no unknown keys, no conversion of types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class TrainingSpec(Table):
    """The [prime_rl] table: GRPO on one student."""

    model: str
    """Student to train: a name of the catalogue."""
    learning_rate: float = Field(ge=1e-6, le=1e-1)
    """Adam's learning rate for the adapter."""
    batch_size: int = Field(64, ge=2, le=1024)
    """Rollouts of one step; a multiple of group_size."""
    group_size: int = Field(8, ge=2, le=64)
    """Rollouts of one task; their mean reward is the baseline, so one alone has no signal."""
    max_steps: int = Field(20, ge=1, le=1000)
    """Updates of the student."""
    max_tokens: int = Field(64, ge=1, le=4096)
    """Tokens of one message of the student."""
    seq_len: int = Field(512, ge=16, le=32768)
    """Tokens of one conversation; longer ones are cut off."""
    lora_rank: int = Field(16, ge=1, le=64)
    """Rank of the student's adapter."""
    temperature: float = Field(1.0, gt=0, le=2)
    """Sampling temperature of the rollouts."""


class EnvironmentSpec(Table):
    """The [environment] table: the package that brings tasks and rewards."""

    module: str = Field("environment", pattern=r"^[a-z][a-z0-9_]{0,39}$")
    """Name of the package's folder."""
    args: dict[str, Any] = {}
    """Settings of the taskset, where it declares any."""


class JobSpec(Table):
    """A whole job.toml."""

    version: Version = 1
    """Form of the file. It comes before the tables."""
    prime_rl: TrainingSpec
    """What to train, and how."""
    environment: EnvironmentSpec = EnvironmentSpec()
    """What to train on."""

    @property
    def rollouts(self) -> int:
        """Conversations that the job samples."""
        return self.prime_rl.max_steps * self.prime_rl.batch_size


TABLES: dict[str, type[Table]] = {"prime_rl": TrainingSpec, "environment": EnvironmentSpec}
CODES = {
    "model": "E-MODEL",
    "learning_rate": "E-LR",
    "batch_size": "E-BATCH",
    "group_size": "E-GROUP",
    "max_steps": "E-STEPS",
    "max_tokens": "E-TOKENS",
    "seq_len": "E-SEQ",
    "lora_rank": "E-RANK",
    "temperature": "E-TEMP",
    "module": "E-MODULE",
    "args": "E-ARGS",
}


def parse_job_toml(text: str) -> JobSpec | list[Finding]:
    """A job's settings, or everything that is wrong with them."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        at = re.search(r"line (\d+)", str(error))
        line = int(at[1]) if at else None
        return [Finding("E-TOML", JOB_FILE, line, f"not TOML: {error}", fix="write key = value")]
    if finding := _other_version(data, text):
        return [finding]
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        return [_explain(cast(dict[str, Any], e), text) for e in error.errors()]
    return _across(spec, text) or spec


def line_of(text: str, key: str) -> int | None:
    """Line on which a key is set, for the place of a finding."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*(\[\s*)?{re.escape(key)}\s*(=|\])", line):
            return number
    return None


def _other_version(data: dict[str, Any], text: str) -> Finding | None:
    """A file of another form; what else is in it cannot be judged."""
    version = data.get("version", 1)
    if type(version) is int and version in VERSIONS:
        return None
    known = ", ".join(map(str, VERSIONS))
    found, fix = f"version = {str(version)[:40]}", f"write version = {VERSIONS[-1]}"
    return Finding("E-VERSION", JOB_FILE, line_of(text, "version"), found, known, fix)


def _across(spec: JobSpec, text: str) -> list[Finding]:
    """Rules that hold between settings."""
    s = spec.prime_rl
    findings = []
    if s.batch_size % s.group_size:
        multiple = max(1, round(s.batch_size / s.group_size)) * s.group_size
        findings.append(
            Finding(
                "E-BATCH",
                JOB_FILE,
                line_of(text, "batch_size"),
                f"batch_size = {s.batch_size}",
                f"multiples of group_size = {s.group_size}",
                f"use {multiple}",
            )
        )
    if s.max_tokens > s.seq_len:
        findings.append(
            Finding(
                "E-TOKENS",
                JOB_FILE,
                line_of(text, "max_tokens"),
                f"max_tokens = {s.max_tokens}",
                f"at most seq_len = {s.seq_len}",
            )
        )
    return findings


def _explain(error: dict[str, Any], text: str) -> Finding:
    loc = [str(part) for part in error["loc"]]
    key, line = loc[-1], line_of(text, loc[-1])
    if error["type"] == "extra_forbidden":
        valid = list(_table(loc[:-1]).model_fields)
        return Finding("E-KEY", JOB_FILE, line, f"unknown key {key!r}", "", nearest(key, valid))
    if error["type"] == "missing":
        what = f"[{key}]" if len(loc) == 1 else key
        fix = f"add the table {what}" if len(loc) == 1 else f"add it to [{loc[0]}]"
        return Finding("E-MISSING", JOB_FILE, None, f"{what} is missing", "", fix)
    code = CODES.get(loc[1], "E-TYPE") if len(loc) > 1 else "E-TYPE"
    found = f"{key} = {str(error['input'])[:40]}"
    return Finding(code, JOB_FILE, line, found, _allowed(loc))


def _table(loc: list[str]) -> type[BaseModel]:
    return TABLES.get(loc[0], JobSpec) if loc else JobSpec


def _allowed(loc: list[str]) -> str:
    field = _table(loc).model_fields.get(loc[-1])
    return "a table" if field is None else allowed(field)


def allowed(field: FieldInfo) -> str:
    """What a key may be, in words, from its declaration."""
    kind = {int: "a whole number", float: "a number", str: "a text"}.get(
        cast(type, field.annotation), "a table"
    )
    bounds = {
        name: getattr(part, name)
        for part in field.metadata
        for name in ("ge", "gt", "le", "pattern")
        if getattr(part, name, None) is not None
    }
    if "pattern" in bounds:
        return "lower-case letters, digits and _"
    if "gt" in bounds:
        return f"{kind} above {bounds['gt']:g} up to {bounds['le']:g}"
    return f"{kind} from {bounds['ge']:g} to {bounds['le']:g}" if bounds else kind
