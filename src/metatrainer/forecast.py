"""What a run will do and what it may cost, from its settings alone: nothing is asked or begun.

Every estimate is a range with a sentence on what it rests on. Pure but for the templates that it
reads; knows nothing about accounts or how it is shown.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from metatrainer import by_hand, families
from metatrainer.agent import instructions, tools
from metatrainer.agent.policies import GOOD
from metatrainer.agent.scaffold import job_toml
from metatrainer.agent.task import draw_task
from metatrainer.config import RunSettings
from metatrainer.jobs.compile import Target
from metatrainer.jobs.spec import JobSpec, parse_job_toml
from metatrainer.outer import plan
from metatrainer.pool.base import grace_of, longest_seconds, slots_of
from metatrainer.pool.pods import PREFIX, pod_body
from metatrainer.pool.runpod_api import Address
from metatrainer.pool.ssh import Keys, Ssh
from metatrainer.students import catalogue

JOBS_SHARE = (0.5, 1.0)
"""Share of episodes that come to a job: an agent that learns to be valid, and one that is."""
POD_SECONDS = (174.0, 401.0)
"""A job on prime-rl with a pod of its own, by the pod bills of the original experiment: 0.13 to
0.30 dollars a job at 2.69 an hour."""
BUSY = (0.6, 0.9)
"""Share of pods' time that goes into jobs: the original experiment's, and this pool's simulated."""
SHORT_TURNS, SHORT_TOKENS = 4, 250
"""The shortest useful episode: look, read, write, submit."""
CHARS_PER_TOKEN = 3.5


@dataclass(frozen=True)
class Range:
    """From about, to about."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float | None = None) -> Range:
        return Range(self.low * low, self.high * (low if high is None else high))


NOTHING = Range(0.0, 0.0)


@dataclass(frozen=True)
class Command:
    """Something that a run starts on a machine, or asks a service for."""

    what: str
    command: str
    body: str = ""
    """What is sent, or the config that is written for it."""


@dataclass(frozen=True)
class Forecast:
    """The plan of a run."""

    agent: dict[str, Any]
    students: list[dict[str, Any]]
    pool: dict[str, Any]
    episodes: dict[str, int]
    jobs: Range
    job_seconds: Range
    hours: Range
    """Of the pool at work; the agent's own time comes on top."""
    tokens: dict[str, Range]
    """Of the agent, where a hosted service counts them."""
    usd: dict[str, Range]
    caps: dict[str, float]
    commands: list[Command]
    rests_on: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast(settings: RunSettings) -> Forecast:
    """The plan of a run with these settings. Raises ConfigError for what they name wrongly."""
    episodes = _episodes(settings)
    total = sum(episodes.values())
    jobs = Range(*(math.floor(total * share) for share in JOBS_SHARE))
    seconds, why = _job_seconds(settings)
    tokens = _tokens(settings, total, episodes["train"]) if _hosted(settings) else {}
    hours = jobs.times(1 / slots_of(settings.pool)).times(seconds.low, seconds.high).times(1 / 3600)
    usd, notes = _usd(settings, jobs, seconds, tokens)
    shares = f"{JOBS_SHARE[0]:.0%} to {JOBS_SHARE[1]:.0%}"
    return Forecast(
        agent=settings.agent.model_dump(),
        students=[_student(name) for name in settings.students],
        pool=_pool(settings),
        episodes=episodes,
        jobs=jobs,
        job_seconds=seconds,
        hours=hours,
        tokens=tokens,
        usd=usd,
        caps={
            key: value
            for key in ("max_usd", "max_usd_per_hour", "max_pods")
            if (value := getattr(settings.money, key)) is not None
        },
        commands=_commands(settings),
        rests_on=[f"jobs: {shares} of the episodes end in one", why, *notes],
    )


def _episodes(settings: RunSettings) -> dict[str, int]:
    heldout = len(plan.heldout(settings, "heldout_before"))
    return {"heldout_before": heldout, "train": len(plan.training(settings)), "after": heldout}


def _hosted(settings: RunSettings) -> bool:
    return settings.agent.backend == "tinker"


def _student(name: str) -> dict[str, Any]:
    model = catalogue.get(name)
    return {"name": name, "parameters": model.parameters, "from": model.hub or str(model.folder)}


def _pool(settings: RunSettings) -> dict[str, Any]:
    known: dict[str, Any] = {"kind": settings.pool.kind, "slots": slots_of(settings.pool)}
    known["job_at_most_seconds"] = longest_seconds(settings, grace_of(settings))
    if settings.pool.kind == "ray":
        known["address"] = settings.pool.address or "RAY_ADDRESS"
    if settings.pool.kind == "runpod":
        rented = settings.runpod
        known |= {"gpus": list(rented.gpus), "image": rented.image, "cloud": rented.cloud}
    return known


def _job_seconds(settings: RunSettings) -> tuple[Range, str]:
    if settings.inner.trainer == "prime-rl":
        low, high = POD_SECONDS
        return Range(low, high), (
            f"seconds of a job: {low:g} to {high:g}, by the pod bills of the original experiment"
        )
    most = settings.limits.max_seconds
    return Range(most / 20, most), (
        "seconds of a job: from a twentieth of limits.max_seconds, as small jobs of small models"
        " take, to all of it"
    )


def _tokens(settings: RunSettings, episodes: int, trained: int) -> dict[str, Range]:
    """Tokens by their price: of all episodes what is read and written, of training's what is
    trained on, which is an episode as one sequence."""
    agent = settings.agent
    task = draw_task(settings, settings.families[0], 0, 0)
    text = instructions.render(task, settings) + json.dumps(tools.schemas())
    first = len(text) / CHARS_PER_TOKEN
    turns = (min(SHORT_TURNS, agent.max_turns), agent.max_turns)
    each = (min(SHORT_TOKENS, agent.max_tokens), agent.max_tokens)
    # Before each message stands all that was said before it; an answer is as long as a short one.
    read = [
        sum(first + turn * (written + SHORT_TOKENS) for turn in range(n))
        for n, written in zip(turns, each)
    ]
    ends = [first + n * (written + SHORT_TOKENS) for n, written in zip(turns, each)]
    return {
        "prompt": Range(*read).times(episodes),
        "sampled": Range(turns[0] * each[0], turns[1] * each[1]).times(episodes),
        "trained": Range(*ends).times(trained),
    }


def _usd(
    settings: RunSettings, jobs: Range, seconds: Range, tokens: dict[str, Range]
) -> tuple[dict[str, Range], list[str]]:
    money = settings.money
    usd = {"slots": jobs.times(seconds.low, seconds.high).times(money.usd_per_slot_hour / 3600)}
    notes = []
    if settings.pool.kind == "runpod":
        low, high = BUSY
        usd["slots"] = usd["slots"].times(1 / high, 1 / low)
        notes.append(
            f"pods: at money.usd_per_slot_hour, {low:.0%} to {high:.0%} of their time in jobs"
        )
    for kind, amount in tokens.items():
        price = getattr(money, f"usd_per_million_{kind}_tokens")
        if price is None:
            notes.append(f"no price is set for {kind} tokens: they are counted as free")
        usd[f"{kind} tokens"] = amount.times((price or 0.0) / 1e6)
    if tokens:
        notes.append(
            f"tokens: from {SHORT_TURNS} short messages an episode to agent.max_turns of"
            " agent.max_tokens, which no agent that works comes near"
        )
    usd["total"] = sum(usd.values(), NOTHING)
    return usd, notes


def _commands(settings: RunSettings) -> list[Command]:
    """What one pod and one job would be given, the reference job's for the first student."""
    commands = []
    if settings.pool.kind == "runpod":
        gpu, name = settings.runpod.gpus[0], f"{PREFIX}<run>-slot-00"
        body = json.dumps(pod_body(settings, name, gpu, "<the run's public key>"), indent=2)
        commands.append(Command("rent a pod", f"POST {settings.runpod.url}/pods", body))
        ssh = Ssh(f"{name}.<id>", Address(host="<host>", port=22), Keys(Path("<run>", "ssh")))
        shown = shlex.join(ssh.command("<script>"))
        commands.append(Command("a script on it", shown, settings.runpod.prepare))
    if settings.inner.trainer == "prime-rl":
        commands += _of_prime_rl(settings)
    return commands


def _of_prime_rl(settings: RunSettings) -> list[Command]:
    student = settings.students[0]
    spec = parse_job_toml(
        job_toml(
            student,
            GOOD.learning_rate,
            batch_size=GOOD.batch_size,
            group_size=GOOD.group_size,
            max_steps=GOOD.max_steps,
        )
    )
    assert isinstance(spec, JobSpec)  # the reference job's own numbers
    model = catalogue.get(student)
    target = Target(
        model=model.hub or str(model.folder),
        job_dir=f"{by_hand.HERE}/packages",
        config_path=f"{by_hand.HERE}/rl.toml",
        output_dir=f"{by_hand.HERE}/outputs",
        gpus=settings.inner.gpus,
        serve=not settings.inner.warm_server,
        evaluation=settings.evaluation,
    )
    return [
        Command(
            start.what,
            " ".join([*_assigned(start.environment), shlex.join(start.command)]),
            start.text,
        )
        for start in by_hand.starts(settings, spec, families.get(settings.families[0]), target)
    ]


def _assigned(environment: dict[str, str]) -> list[str]:
    return [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
