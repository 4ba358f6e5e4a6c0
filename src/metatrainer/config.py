"""One experiment as data: every setting of a run, read from one TOML file.

Knows the names of settings and their bounds; knows nothing about how they are used.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    start: str | None = None
    """What its adapter begins from: a run, or a folder of `metatrainer warmstart`; left out, a new
    adapter. Of the hosted service also a tinker:// path."""
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
    """What the workspace holds at first: a naive working environment, or the instructions alone."""


class EndpointSettings(Settings):
    """Agents behind OpenAI-compatible servers, which are named openai:MODEL@URL."""

    max_tokens: int = Field(4096, ge=16)
    """Tokens of one message at most; agent.max_tokens is for models that are sampled here."""
    request_seconds: float = Field(120.0, gt=0)
    """Until an answer is no longer waited for."""
    retries: int = Field(6, ge=0, le=20)
    """Further tries after a rate limit, a time-out or a fault of the server: when it says
    (Retry-After, up to a minute), else after waits that double, with jitter."""


class OuterSettings(Settings):
    """The outer loop: importance-sampling GRPO on the trainer agent."""

    steps: int = Field(12, ge=1)
    """Updates of the agent."""
    groups: int = Field(4, ge=1)
    """Tasks in a step; episodes of one task form a group."""
    group_size: int = Field(8, ge=2)
    """Episodes of one task: the group whose mean reward is the baseline."""
    learning_rate: float = Field(4e-3, gt=0)
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

    kind: Literal["local", "ray", "runpod"] = "local"
    """local: worker processes on this machine. ray: actors on the nodes of a Ray cluster, which all
    see the run's folder. runpod: a rented pod for each worker."""
    workers: int | None = Field(None, ge=1)
    """Worker processes; left out, one for each GPU, or else for each core. Elsewhere than on this
    machine their number has to be given."""
    address: str | None = None
    """Address of a Ray cluster's head; left out, that of RAY_ADDRESS."""
    packed: int = Field(4, ge=1, le=64)
    """Jobs that one worker runs at a time: those on the same base model share the engine's passes.
    1 gives every job a process of its own."""

    @model_validator(mode="after")
    def _cluster_has_workers(self) -> PoolSettings:
        if self.kind == "ray" and self.workers is None:
            raise ValueError('kind "ray" needs workers: how many of them the cluster\'s nodes take')
        if self.kind == "runpod" and self.workers is None:
            raise ValueError('kind "runpod" needs workers: how many pods are rented')
        return self


class RunpodSettings(Settings):
    """The pods that pool.kind "runpod" rents, one for each worker."""

    gpus: tuple[str, ...] = ()
    """GPU types that will do, by Runpod's ids. Those in stock are tried from the cheapest on."""
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    """Runpod's own data centres, or machines of others."""
    image: str = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
    """Container image; it has to start an sshd that takes the key in PUBLIC_KEY."""
    disk_gb: int = Field(100, ge=1)
    """Disk of a pod."""
    python: str = "python3"
    """The pod's Python that runs metatrainer, whose source is brought along."""
    prepare: str = ""
    """Shell script that is run once on a new pod, in the folder that holds src/ with the source."""
    prepare_seconds: float = Field(1800.0, gt=0)
    """What that may take."""
    boot_seconds: float = Field(900.0, gt=0)
    """From renting a pod until its sshd answers; past it the pod is ended."""
    idle_seconds: float = Field(1200.0, gt=0)
    """A pod that has had no job for so long is ended; the next job rents another."""
    deadman_seconds: float = Field(1200.0, ge=1)
    """A pod that has heard nothing of its controller for so long ends itself."""
    url: str = "https://api.runpod.io/v2"
    """Where the service is."""


class InnerSettings(Settings):
    """How students are trained."""

    trainer: Literal["embedded", "prime-rl"] = "embedded"
    """embedded: the engine that comes along. prime-rl: its programs, on machines with GPUs."""
    rl: tuple[str, ...] = Field(("rl",), min_length=1)
    """prime-rl's `rl`, with what has to stand before it."""
    inference: tuple[str, ...] = Field(("inference",), min_length=1)
    """prime-rl's `inference`, likewise."""
    gpus: Literal[1, 2] = 2
    """GPUs of a slot: 2, of which one trains and one samples, or 1 for both."""
    warm_server: bool = False
    """Keep the inference server from job to job: faster, but a job's code can reach it."""
    start_seconds: float = Field(900.0, gt=0)
    """Until a run's first metrics, and until a server answers."""
    stall_seconds: float = Field(300.0, gt=0)
    """A run whose metrics stand still for so long is ended."""


class MoneySettings(Settings):
    """What things cost and what a run may spend, in US dollars."""

    usd_per_slot_hour: float = Field(0.0, ge=0)
    """Price of one slot for an hour; 0 for a machine that is there anyway. Of pods that are rented,
    the most that one may cost for each of its slots."""
    usd_per_million_prompt_tokens: float | None = Field(None, ge=0)
    """Price of what a hosted agent reads; left out, it is not counted."""
    usd_per_million_sampled_tokens: float | None = Field(None, ge=0)
    """Price of what it writes."""
    usd_per_million_trained_tokens: float | None = Field(None, ge=0)
    """Price of what it is trained on."""
    max_usd: float | None = Field(None, gt=0)
    """What the run may cost in all; past it nothing more begins. Left out, no limit."""
    max_usd_per_hour: float | None = Field(None, gt=0)
    """What all slots together may cost an hour."""
    max_pods: int | None = Field(None, ge=1)
    """Rented pods that may be there at a time."""


class RunSettings(Settings):
    """A whole experiment."""

    preset: Literal["nano", "seed"] = "nano"
    """The scale of the experiment; it names the run's folder."""
    seed: int = 0
    """Seed of everything that is drawn in the open: tasks, sampling, adapters."""
    families: tuple[str, ...] = Field(
        ("persona", "inventory", "ledger", "routes", "calendar"), min_length=1
    )
    """Families that the agent is trained on."""
    heldout: tuple[str, ...] = ("triage",)
    """Families played before and after training, never trained on."""
    students: tuple[str, ...] = Field(("nano-wren", "nano-finch"), min_length=1)
    """Base models that a job may choose."""
    agent: AgentSettings = AgentSettings()
    endpoint: EndpointSettings = EndpointSettings()
    outer: OuterSettings = OuterSettings()
    limits: LimitSettings = LimitSettings()
    evaluation: EvalSettings = EvalSettings()
    reward: RewardConfig = RewardConfig()
    inner: InnerSettings = InnerSettings()
    pool: PoolSettings = PoolSettings()
    runpod: RunpodSettings = RunpodSettings()
    money: MoneySettings = MoneySettings()
    unsafe_without_sandbox: bool = False
    """Run agent-written code even where no sandbox can be had. It can then read and change all that
    this user can: keys, files, hidden items, other jobs, its own score. For a machine that holds
    nothing else; a warning is printed."""

    @model_validator(mode="after")
    def _slots_fit_the_trainer(self) -> RunSettings:
        pool = self.pool
        if self.inner.trainer == "prime-rl" and (pool.packed != 1 or pool.workers is None):
            raise ValueError(
                'inner.trainer "prime-rl" runs one job on a slot and has as many slots as it has '
                "GPUs for: set pool.packed=1 and pool.workers"
            )
        return self

    @model_validator(mode="after")
    def _pods_have_a_kind_and_a_price(self) -> RunSettings:
        if self.pool.kind == "runpod" and not self.runpod.gpus:
            raise ValueError('pool.kind "runpod" needs runpod.gpus: the GPU types that will do')
        if self.pool.kind == "runpod" and not self.money.usd_per_slot_hour:
            raise ValueError(
                'pool.kind "runpod" needs money.usd_per_slot_hour: the most that a slot may cost'
            )
        return self

    @model_validator(mode="after")
    def _heldout_is_apart(self) -> RunSettings:
        if both := set(self.families) & set(self.heldout):
            raise ValueError(f"heldout: {', '.join(sorted(both))} is also in families; remove one")
        return self


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunSettings:
    """Read a run's TOML file. Raises ConfigError with the key and the nearest valid one.

    path: None takes every default. overrides: settings that replace the file's, each as
    "table.key=value".
    """
    data = _read(path) if path else {}
    for text in overrides:
        _override(data, text)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> RunSettings:
    """Validate settings given as a dict. Raises ConfigError."""
    try:
        return RunSettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def check_names(settings: RunSettings, *, pool: bool = True) -> None:
    """See that what a run names exists, that its caps can be kept and its pool can be had.

    pool: False leaves out what needs an account, a key or a cluster.
    Raises ConfigError with key and hint.
    """
    from metatrainer import families, money
    from metatrainer.pool import kinds
    from metatrainer.students import catalogue

    agent = settings.agent
    for key in ("families", "heldout"):
        with _blaming(key):
            for name in getattr(settings, key):
                families.get(name)
    with _blaming("students"):
        for name in settings.students:
            catalogue.get(name)
    if agent.backend == "embedded" and not Path(agent.model, "config.json").is_file():
        with _blaming("agent.model"):
            catalogue.get(agent.model, "agent")
    money.check(settings)
    if pool:
        kinds.check(settings)


def to_toml(settings: RunSettings) -> str:
    """The settings as a TOML file that load_config reads back as the same. None is left out."""
    data = settings.model_dump(mode="json", exclude_none=True)
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    lines = [_toml_line(key, value) for key, value in data.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in table.items())]
    return "\n".join(lines) + "\n"


def nearest(name: str, valid: list[str]) -> str:
    """A hint for a name that is not in `valid`: the nearest one, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Put the setting's key before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError:
        raise ConfigError(f"no config at {path}; {_nearest_file(path)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _nearest_file(path: Path) -> str:
    there = sorted(str(p) for p in {*path.parent.glob("*.toml"), *Path("configs").glob("*.toml")})
    return nearest(str(path), there) if there else "give the path of a .toml file"


def _override(data: dict[str, Any], text: str) -> None:
    """Set one value; what is no TOML value is a string, so that names need no quotes."""
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"cannot set {text!r}; write table.key=value, as in outer.steps=4")
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"cannot set {dotted.strip()!r}: {key!r} is a setting, not a table")
    try:
        data[keys[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        data[keys[-1]] = value.strip()


def _explain(error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        hint = nearest(str(error["loc"][-1]), _keys(error["loc"][:-1]))
        return f"unknown setting {key!r}; {hint}"
    if error["type"] == "literal_error":
        allowed = [word.strip("'") for word in re.split(", | or ", error["ctx"]["expected"])]
        return f"{key}: unknown {error['input']!r}; {nearest(str(error['input']), allowed)}"
    if not key:
        return error["msg"].removeprefix("Value error, ")
    return f"{key}: {error['msg']}, found {error['input']!r}"


def _keys(loc: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = RunSettings
    for part in loc:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    return list(model.model_fields)


def _toml_line(key: str, value: Any) -> str:
    # Numbers, booleans, strings and lists of them are written alike in JSON and TOML.
    return f"{key} = {json.dumps(value)}"
