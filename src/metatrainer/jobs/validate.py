"""Whether a submission may train: every check, cheapest first, with what to do about each fault.

Runs submitted code only in the sandbox it is given. Hidden items stay in this process. Knows
nothing about training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from metatrainer.config import nearest
from metatrainer.errors import EnvError
from metatrainer.families import Family, Item
from metatrainer.jobs.findings import Finding
from metatrainer.jobs.leaks import Leaks
from metatrainer.jobs.lengths import Estimate, measure
from metatrainer.jobs.probes import Probe, probes
from metatrainer.jobs.source import check_source
from metatrainer.jobs.spec import JOB_FILE, JobSpec, line_of, parse_job_toml
from metatrainer.jobs.tasks import check_tasks
from metatrainer.sandbox.host import EnvSession, Guest, Scored, TaskRow, check_files

PROBED = 8
"""Tasks on which the rewards are probed."""
MAX_REWARD = 2.0
"""Largest size of a reward. Advantages are not divided by their spread, so a reward's scale acts
on the student like the learning rate."""
MIN_BONUS = 0.01
"""A smaller reward that every reply gets is not worth a word."""
CALL_SECONDS = 5.0
"""Time of one call into the environment: import and load, or the probes."""


@dataclass(frozen=True)
class TaskRules:
    """What one task allows, and the items that a job must not train on."""

    family: Family
    students: Sequence[str]
    max_rollouts: int
    max_seconds: float
    hidden: Sequence[Item]
    dev: Sequence[Item]

    @cached_property
    def leaks(self) -> Leaks:
        """The items, prepared once for all submissions to the task."""
        return Leaks(self.hidden, self.dev)


@dataclass(frozen=True)
class Verdict:
    """The result of one validation."""

    ok: bool
    spec: JobSpec | None
    findings: list[Finding]
    seconds: float
    estimate: Estimate | None = None
    """What the job would take, if it may run."""
    cheating: bool = False
    """The submission trains on items that it must not: no reward for anything."""
    parseable: bool = True
    """job.toml was there and was TOML."""

    @property
    def errors(self) -> list[Finding]:
        """What it was refused for."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """What does not refuse it."""
        return [finding for finding in self.findings if finding.severity == "warning"]


class Refused(Exception):
    """A check found faults that make the later checks pointless."""

    def __init__(self, findings: list[Finding]):
        super().__init__()
        self.findings = findings


def validate(files: dict[str, str], task: TaskRules, guest: Guest) -> Verdict:
    """Check a submission. Never raises on a bad one: the findings say what is wrong."""
    start = time.monotonic()
    spec: JobSpec | None = None
    estimate: Estimate | None = None
    try:
        spec = _check_text(files, task)
        findings, estimate = _check_running(files, spec, task, guest)
        ok = True
    except Refused as refused:
        findings, ok = refused.findings, False
    codes = {finding.code for finding in findings}
    return Verdict(
        ok=ok,
        spec=spec,
        findings=findings,
        seconds=time.monotonic() - start,
        estimate=estimate,
        cheating="E-LEAK" in codes,
        parseable=not any(f.code in ("E-TOML", "E-FILE") and f.file == JOB_FILE for f in findings),
    )


def _check_text(files: dict[str, str], task: TaskRules) -> JobSpec:
    """Everything that needs no code to run."""
    if JOB_FILE not in files:
        raise Refused([Finding("E-FILE", JOB_FILE, None, "is missing", "", "write job.toml")])
    try:
        check_files(files)
    except EnvError as error:
        raise Refused([Finding("E-FILE", None, None, error.message)]) from None
    spec = parse_job_toml(files[JOB_FILE])
    if isinstance(spec, list):
        raise Refused(spec)
    package = f"{spec.environment.module}/__init__.py"
    findings = _check_rules(spec, task, files[JOB_FILE])
    if package not in files:
        findings.append(Finding("E-FILE", package, None, "is missing", "", f"write {package}"))
    findings += check_source(files)
    if findings:
        raise Refused(findings)
    if leak := task.leaks.in_files(files):
        raise Refused([leak])
    return spec


def _check_rules(spec: JobSpec, task: TaskRules, text: str) -> list[Finding]:
    """What this task asks of the settings."""
    findings = []
    model = spec.prime_rl.model
    if model not in task.students:
        at = line_of(text, "model")
        students, hint = ", ".join(task.students), nearest(model, list(task.students))
        hint = "" if hint.startswith("valid") else hint
        findings.append(Finding("E-MODEL", JOB_FILE, at, f"model = {model[:40]}", students, hint))
    if spec.rollouts > task.max_rollouts:
        s = spec.prime_rl
        findings.append(
            Finding(
                "E-BUDGET",
                JOB_FILE,
                line_of(text, "max_steps"),
                f"max_steps * batch_size = {s.max_steps} * {s.batch_size} = {spec.rollouts}",
                f"at most {task.max_rollouts} rollouts",
                f"max_steps = {max(1, task.max_rollouts // s.batch_size)}",
            )
        )
    return findings


def _check_running(
    files: dict[str, str], spec: JobSpec, task: TaskRules, guest: Guest
) -> tuple[list[Finding], Estimate | None]:
    """Import, load and probe the environment in the sandbox. Returns warnings and an estimate."""
    environment = spec.environment
    package = f"{environment.module}/__init__.py"
    try:
        with guest.session(files, environment.module, environment.args, CALL_SECONDS) as session:
            rows = session.load()
            if fault := check_tasks(rows, task.family, package) or task.leaks.in_tasks(rows):
                raise Refused([fault])
            asked = _probe(task, rows)
            lengths = measure(spec, task.family, rows, asked)
            if lengths and (fault := lengths.fault(spec, package)):
                raise Refused([fault])
            warnings = _check_rewards(session, asked, spec, task, package)
            if lengths is None:
                return warnings, None
            return [*lengths.warnings(spec), *warnings], lengths.estimate(spec)
    except EnvError as error:
        raise Refused([_from_error(error, package)]) from None


def _from_error(error: EnvError, package: str) -> Finding:
    fixes = {
        "import": "make the package import",
        "load": "make load() yield vf.Task objects",
        "reward": "make the reward return a number for any reply",
        "timeout": f"finish within {CALL_SECONDS:g} s: no endless loops",
        "memory": "use less memory",
        "output": "print nothing",
        "crash": "do not exit or start processes",
        "protocol": "do not write to file descriptors",
    }
    code = f"E-{error.kind.upper()}"
    return Finding(code, error.file or package, error.line, error.message, "", fixes[error.kind])


def _probe(task: TaskRules, rows: list[TaskRow]) -> list[Probe]:
    """Conversations about some of the tasks."""
    step = max(1, len(rows) // PROBED)
    return probes(task.family, rows, list(range(0, len(rows), step))[:PROBED])


def _check_rewards(
    session: EnvSession, asked: list[Probe], spec: JobSpec, task: TaskRules, package: str
) -> list[Finding]:
    """Rewards must be finite numbers in bounds that rank right answers above wrong ones.

    Returns warnings.
    """
    start = time.monotonic()
    scored = session.score([(probe.task, probe.messages) for probe in asked])
    seconds = (time.monotonic() - start) / len(asked) * spec.rollouts
    for check in (_failed, _out_of_range, _no_spread):
        if finding := check(asked, scored, package):
            raise Refused([finding])
    if seconds > task.max_seconds / 2:
        found = f"the reward needs {seconds:.0f} s for {spec.rollouts} rollouts"
        allowed = f"{task.max_seconds / 2:.0f} s"
        raise Refused([Finding("E-SLOW", package, None, found, allowed, "make it faster")])
    least = min(result.reward or 0.0 for result in scored)
    if least <= MIN_BONUS:
        return []
    found = f"every reply, an empty one too, is rewarded with {least:g} at least"
    return [Finding("W-BONUS", package, None, found, "", "leave it out: a constant has no effect")]


Check = Callable[[list[Probe], list[Scored], str], Finding | None]


def _failed(asked: list[Probe], scored: list[Scored], package: str) -> Finding | None:
    for probe, result in zip(asked, scored, strict=True):
        if result.error:
            found = f"reward fails on a reply that is {_KIND_WORDS[probe.kind]}: {result.error}"
            fix = "return a number for any reply"
            return Finding("E-REWARD", result.file or package, result.line, found, "", fix)
    return None


def _out_of_range(asked: list[Probe], scored: list[Scored], package: str) -> Finding | None:
    worst = max((result.reward or 0.0 for result in scored), key=abs)
    if abs(worst) <= MAX_REWARD:
        return None
    allowed = f"{-MAX_REWARD:g} to {MAX_REWARD:g}"
    return Finding("E-RANGE", package, None, f"a reward is {worst:g}", allowed, "scale it down")


def _no_spread(asked: list[Probe], scored: list[Scored], package: str) -> Finding | None:
    by_kind: dict[str, list[float]] = {}
    for probe, result in zip(asked, scored, strict=True):
        by_kind.setdefault(probe.kind, []).append(result.reward or 0.0)
    means = {kind: fmean(values) for kind, values in by_kind.items()}
    rewards = [result.reward or 0.0 for result in scored]
    if max(rewards) - min(rewards) < 1e-9:
        found = f"the reward is {rewards[0]:g} for every reply"
        fix = "reward right answers more: compare trace.last_reply with answer"
        return Finding("E-SPREAD", package, None, found, "", fix)
    if means["right"] <= max(means["wrong"], means["empty"], means["random"]) + 1e-9:
        shown = ", ".join(f"{kind} {mean:.2f}" for kind, mean in means.items())
        fix = "reward a right answer more than any other"
        return Finding("E-SPREAD", package, None, f"mean rewards: {shown}", "", fix)
    return None


_KIND_WORDS = {
    "right": "right",
    "plain": "right without tools",
    "wrong": "wrong",
    "empty": "empty",
    "random": "random",
    "tools": "tool calls only",
}
