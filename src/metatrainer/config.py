"""One experiment as data: every setting of a run, read from one TOML file.

Knows the names of settings and their bounds; knows nothing about how they are used.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from metatrainer.errors import ConfigError
from metatrainer.reward import RewardConfig


class Settings(BaseModel):
    """A frozen table of settings that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AgentSettings(Settings):
    """The trainer agent: which model writes the jobs, and how it samples."""

    model: str = "nano-agent"
    """A model of the catalogue, a folder, or a name that the hosted service knows."""
    backend: Literal["embedded", "tinker"] = "embedded"
    """Where it is sampled and trained: in this process, or the hosted Tinker service."""
    renderer: str = "nano"
    """tinker-cookbook renderer for its chat format."""
    lora_rank: int = Field(16, ge=1, le=256)
    """Rank of the adapter that the outer loop trains."""
    temperature: float = Field(1.0, gt=0, le=2)
    """Sampling temperature."""
    max_turns: int = Field(10, ge=1)
    """Messages the agent may write in one episode."""
    max_tokens: int = Field(256, ge=16)
    """Tokens of one message at most."""
    scaffold: Literal["starter", "bare"] = "starter"
    """What the workspace holds at first: a naive working job, or nothing but the instructions."""


class OuterSettings(Settings):
    """The outer loop: importance-sampling GRPO on the trainer agent."""

    steps: int = Field(14, ge=1)
    """Updates of the agent."""
    groups: int = Field(2, ge=1)
    """Tasks in a step; episodes of one task form a group."""
    group_size: int = Field(8, ge=2)
    """Episodes of one task: the group whose mean reward is the baseline."""
    learning_rate: float = Field(1e-3, gt=0)
    """Adam's learning rate for the agent's adapter."""
    heldout_episodes: int = Field(16, ge=0)
    """Episodes on each held-out family before and after training; 0 leaves them out."""


class LimitSettings(Settings):
    """What one episode may spend."""

    max_attempts: int = Field(3, ge=1)
    """Submissions for validation in one episode."""
    max_rollouts: int = Field(1280, ge=8)
    """Student rollouts of one job (steps times batch size)."""
    max_seconds: float = Field(30.0, gt=0)
    """Seconds of training of one job; past it the job is stopped."""


class EvalSettings(Settings):
    """The hidden evaluation that the reward rests on."""

    items: int = Field(128, ge=8)
    """Hidden items of a family, fixed for the run, the same before and after."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of the student, before and after alike (0 is greedy)."""
    max_turns: int = Field(6, ge=1)
    """Messages of the student in one item."""
    max_tokens: int = Field(64, ge=1)
    """Tokens of one student message."""


class PoolSettings(Settings):
    """Where jobs run."""

    kind: Literal["local"] = "local"
    """local: worker processes on this machine."""
    slots: int | None = Field(None, ge=1)
    """Jobs at a time; left out, one for each core."""


class RunSettings(Settings):
    """A whole experiment."""

    preset: str = "nano"
    """Name of the preset; `report` prints it."""
    seed: int = 0
    """Seed of everything that is drawn in the open: tasks, sampling, adapters."""
    families: tuple[str, ...] = ("persona", "inventory")
    """Families that the agent is trained on."""
    heldout: tuple[str, ...] = ("triage",)
    """Families played before and after training, never trained on."""
    students: tuple[str, ...] = ("nano-wren", "nano-finch")
    """Base models that a job may choose."""
    agent: AgentSettings = AgentSettings()
    outer: OuterSettings = OuterSettings()
    limits: LimitSettings = LimitSettings()
    evaluation: EvalSettings = EvalSettings()
    reward: RewardConfig = RewardConfig()
    pool: PoolSettings = PoolSettings()

    @model_validator(mode="after")
    def _heldout_is_apart(self) -> RunSettings:
        if both := set(self.families) & set(self.heldout):
            raise ValueError(f"heldout: {', '.join(sorted(both))} is also in families; remove one")
        return self


def load_config(path: Path) -> RunSettings:
    """Read a run's TOML file. Raises ConfigError with the key and the nearest valid one."""
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no config at {path}; the presets are in configs/") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> RunSettings:
    """Validate settings given as a dict. Raises ConfigError."""
    try:
        return RunSettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def nearest(name: str, valid: list[str]) -> str:
    """A hint for a name that is not in `valid`: the nearest one, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"


def _explain(error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        hint = nearest(str(error["loc"][-1]), _keys(error["loc"][:-1]))
        return f"unknown setting {key!r}; {hint}"
    return f"{key}: {error['msg']}" if key else error["msg"]


def _keys(loc: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = RunSettings
    for part in loc:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    return list(model.model_fields)
