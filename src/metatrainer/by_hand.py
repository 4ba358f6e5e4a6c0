"""A job without an agent: a person writes the folder, and it is validated and run as any other.

Knows how a job's folder is read and what a single job needs. Knows nothing about episodes, rewards
of the agent or how anything is shown.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatrainer import families, folders, toml
from metatrainer.agent.policies import GOOD
from metatrainer.agent.scaffold import job_toml
from metatrainer.agent.task import draw_task
from metatrainer.agent.validator import FIRST_SLOT
from metatrainer.config import PoolSettings, RunSettings
from metatrainer.errors import ConfigError
from metatrainer.families import Family
from metatrainer.inner.prime_rl_plan import check_installed, job_target
from metatrainer.jobs.compile import (
    Compiled,
    Target,
    compile_job,
    server_config,
    server_device,
)
from metatrainer.jobs.findings import Finding
from metatrainer.jobs.spec import JOB_FILE, VERSIONS, JobSpec, parse_job_toml
from metatrainer.jobs.validate import TaskRules, Verdict, validate
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult
from metatrainer.pool.kinds import make_pool
from metatrainer.sandbox.host import MAX_FILES, MAX_FILES_SIZE, Guest
from metatrainer.students import catalogue
from metatrainer.students.score import Score

if TYPE_CHECKING:
    from metatrainer.inner.preview import Preview

PREVIEW_SECONDS = 60.0
"""Time of one call into the environment, while a person waits for it."""
HERE = "JOB"
"""Stands for the job's folder in a dry run."""


@dataclass(frozen=True)
class Trial:
    """What one job is judged against: hidden items of its own, drawn now and never again."""

    settings: RunSettings
    family: str
    hidden_seed: int
    rules: TaskRules


@dataclass(frozen=True)
class Ran:
    """A job that was run, with the student's score before it."""

    before: Score
    result: JobResult


@dataclass(frozen=True)
class Start:
    """One program that a job on prime-rl starts."""

    what: str
    command: list[str]
    environment: dict[str, str]
    path: str
    """Where its config is."""
    text: str
    """The config."""


@dataclass(frozen=True)
class Plan:
    """What a job on prime-rl would start, in order."""

    folder: str
    starts: list[Start]

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)


def make_trial(settings: RunSettings, family: str) -> Trial:
    """A trial with fresh hidden items. Raises ConfigError for an unknown family."""
    hidden_seed = secrets.randbits(62)
    rules = draw_task(settings, family, settings.seed, hidden_seed).rules
    return Trial(settings, family, hidden_seed, rules)


def new(family: str, student: str, folder: Path) -> list[Path]:
    """Write the starter environment and a job.toml that trains on it. Returns the files.

    Raises ConfigError for an unknown family or student, or a folder that holds something.
    """
    files = families.get(family).starter_files()
    files[JOB_FILE] = f"version = {VERSIONS[-1]}\n" + job_toml(
        catalogue.get(student).name,
        GOOD.learning_rate,
        batch_size=GOOD.batch_size,
        group_size=GOOD.group_size,
        max_steps=GOOD.max_steps,
    )
    folders.check_new(folder)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return [folder / path for path in files]


def read(folder: Path) -> dict[str, str]:
    """The files of a job's folder, but for hidden ones and what Python caches.

    Raises ConfigError for what cannot be a job: no folder, links, other than text, too much.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"no folder {folder}; write one with: metatrainer job new FAMILY {folder}"
        )
    files: dict[str, str] = {}
    size = 0
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            continue
        if path.is_symlink():
            raise ConfigError(f"{path} is a link; put what it points to in its place")
        if path.is_file():
            size += path.stat().st_size
            if len(files) == MAX_FILES or size > MAX_FILES_SIZE:
                raise ConfigError(
                    f"{folder} holds more than {MAX_FILES} files or {MAX_FILES_SIZE} bytes; "
                    "give the folder of a job alone"
                )
            files[name.as_posix()] = _text(path)
    return dict(sorted(files.items()))


def check(files: dict[str, str], trial: Trial) -> Verdict:
    """Validate a job in a sandbox of its own. Raises SandboxUnavailable."""
    (verdict,) = check_all([files], trial)
    return verdict


def check_all(jobs: Iterable[dict[str, str]], trial: Trial) -> Iterator[Verdict]:
    """Validate jobs one after another, each in a session of one sandbox, against the same items.

    Raises SandboxUnavailable.
    """
    with Guest(FIRST_SLOT, trial.settings.unsafe_without_sandbox) as guest:
        for files in jobs:
            yield validate(files, trial.rules, guest)


def preview(files: dict[str, str], spec: JobSpec, trial: Trial, rollouts: int) -> Preview:
    """Try a valid job's environment on its untrained student.

    Raises EnvError, JobError, SandboxUnavailable.
    """
    from metatrainer.engine import Engine
    from metatrainer.inner.preview import preview

    student = spec.prime_rl.model
    engine = Engine.open(catalogue.verified_folder(student), student)
    environment = spec.environment
    with (
        Guest(FIRST_SLOT, trial.settings.unsafe_without_sandbox) as guest,
        guest.session(files, environment.module, environment.args, PREVIEW_SECONDS) as session,
    ):
        tasks, family = session.load(), families.get(trial.family)
        return preview(engine, spec.prime_rl, tasks, session, family, rollouts)


async def run(
    files: dict[str, str],
    spec: JobSpec,
    trial: Trial,
    seed: int,
    on_baseline: Callable[[Score], None] = lambda score: None,
) -> Ran:
    """Score the student, train it, score it again on the same items.

    files, spec: of a job that was found valid. seed: of the adapter and of sampling.
    """
    student = spec.prime_rl.model
    settings = trial.settings.model_copy(
        update={"students": (student,), "pool": PoolSettings(workers=1, packed=1)}
    )
    pool = make_pool(settings, trial.hidden_seed)
    with tempfile.TemporaryDirectory(prefix="metatrainer-") as folder:
        order = JobOrder(
            job_id="by-hand", family=trial.family, job_dir=Path(folder), student=student, seed=seed
        )
        jobdir.create(order, files)
        await pool.start()
        try:
            (before,) = await pool.baselines(trial.family)
            on_baseline(before)
            return Ran(before, await pool.run(order))
        finally:
            await pool.close()


def compiled(
    folder: Path,
    family: str,
    *,
    gpus: int,
    model: str | None,
    full: bool,
    config_path: Path,
    settings: RunSettings,
) -> Compiled | list[Finding]:
    """A job for prime-rl, or what is wrong with its job.toml.

    model: the student as prime-rl loads it; None is the shipped one of the catalogue.
    Raises ConfigError for a missing folder or job.toml, an unknown family or student, and what
    prime-rl cannot run.
    """
    known = families.get(family)
    spec = _spec(folder)
    if isinstance(spec, list):
        return spec
    student = catalogue.get(spec.prime_rl.model).name
    target = Target(
        model=model or str(catalogue.verified_folder(student)),
        job_dir=str(folder.resolve()),
        config_path=str(config_path),
        run_name=folder.resolve().name,
        gpus=1 if gpus == 1 else 2,
        full=full,
        evaluation=settings.evaluation,
    )
    return compile_job(spec, known, target)


def planned(folder: Path, family: str, settings: RunSettings) -> Plan | list[Finding]:
    """What a run of the job on prime-rl would start, or what is wrong with its job.toml.

    Runs nothing. Raises ConfigError as compiled() does, and for the embedded trainer.
    """
    if settings.inner.trainer != "prime-rl":
        raise ConfigError("a dry run is of prime-rl; say --trainer prime-rl")
    known = families.get(family)
    spec = _spec(folder)
    if isinstance(spec, list):
        return spec
    target = job_target(settings, spec.prime_rl.model, Path(HERE), 0)
    return Plan(HERE, starts(settings, spec, known, target))


def starts(settings: RunSettings, spec: JobSpec, family: Family, target: Target) -> list[Start]:
    """The programs of one job on prime-rl, in order. Raises ConfigError where it cannot run it."""
    job = compile_job(spec, family, target)
    served, path = server_config(target), f"{HERE}/inference.toml"
    device = {"CUDA_VISIBLE_DEVICES": str(server_device(target))}
    command = [*settings.inner.inference, "@", path]
    rl = [*settings.inner.rl, "@", target.config_path]
    text = toml.dumps(served)
    all_of_them = [
        Start("the untrained student is scored on this server", command, device, path, text),
        Start("the run", rl, job.environment, target.config_path, job.text),
        Start("the trained student is scored on this server", command, device, path, text),
    ]
    return all_of_them[:2] if settings.inner.warm_server else all_of_them


def check_trainer(settings: RunSettings) -> None:
    """Raises ConfigError where the trainer's programs are missing."""
    if settings.inner.trainer == "prime-rl":
        check_installed(settings)


def _spec(folder: Path) -> JobSpec | list[Finding]:
    text = read(folder).get(JOB_FILE)
    if text is None:
        raise ConfigError(f"no {JOB_FILE} in {folder}; metatrainer job new shows one")
    return parse_job_toml(text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8; take it out of the job") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
