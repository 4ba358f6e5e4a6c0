"""The commands `metatrainer job ...`: a job by hand, without any agent.

Reads arguments and prints; the work is elsewhere and is imported when a command runs.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatrainer.chat import call_text
from metatrainer.cli.options import Config, Json, Set
from metatrainer.errors import ConfigError, MetatrainerError
from metatrainer.shown import one_line, visible

if TYPE_CHECKING:
    from metatrainer.by_hand import Plan, Ran, Trial
    from metatrainer.config import RunSettings
    from metatrainer.inner.preview import Preview
    from metatrainer.jobs.findings import Finding
    from metatrainer.jobs.validate import Verdict
    from metatrainer.students.score import Score

MESSAGE_CHARS = 2_000
"""Longer explanations of a failure are cut."""
SHOWN_STEPS = 20
"""Steps of the curve that are printed; of more, as many evenly spaced ones."""

job = typer.Typer(help="Write, check, run and compile a job by hand.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder with job.toml and the environment.")]
Family = Annotated[str, typer.Option(help="What the job is to teach.", show_default=False)]


@job.command("new")
def job_new(
    family: Annotated[str, typer.Argument(help="What the job is to teach.")],
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to write.", show_default="<family>-job")
    ] = None,
    student: Annotated[str, typer.Option(help="Base model to train.")] = "nano-wren",
) -> None:
    """Write a job that works, to change: the starter environment and a job.toml.

    \b
    metatrainer job new persona
    metatrainer job new triage my-job --student nano-finch
    """
    from metatrainer import by_hand

    folder = folder or Path(f"{family}-job")
    for path in by_hand.new(family, student, folder):
        print(f"wrote {path}")
    print(f"next: metatrainer job validate {folder} --family {family}")


@job.command("validate")
def job_validate(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders, each with job.toml and the environment.")
    ],
    family: Family,
    as_json: Json = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Check jobs as submissions are checked. Exits with 1 if one is refused.

    Of one job all findings are printed, of several a line each, and how many are valid.

    \b
    metatrainer job validate persona-job --family persona
    metatrainer job validate jobs/* --family persona --json
    """
    from metatrainer import by_hand

    jobs, trial = _read(folders, family, config, settings)
    verdicts = []
    for folder, verdict in zip(folders, by_hand.check_all(jobs, trial), strict=True):
        verdicts.append(verdict)
        if not as_json and len(jobs) > 1:
            print(_verdict_line(folder, verdict), flush=True)
    valid = sum(verdict.ok for verdict in verdicts)
    if as_json:
        told = [{"folder": str(f), **_verdict(v)} for f, v in zip(folders, verdicts)]
        print(json.dumps({"valid": valid, "refused": len(jobs) - valid, "jobs": told}, indent=2))
    elif len(jobs) > 1:
        print(f"{len(jobs)} jobs: {valid} valid, {len(jobs) - valid} refused")
    else:
        _print_verdict(verdicts[0])
    if valid < len(jobs):
        raise typer.Exit(1)


@job.command("preview")
def job_preview(
    folder: Folder,
    family: Family,
    rollouts: Annotated[int, typer.Option(min=2, help="Conversations, in whole groups.")] = 64,
    shown: Annotated[int, typer.Option(min=0, help="Of them to print.")] = 2,
    as_json: Json = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Try a job on its untrained student: is there something to learn from?

    \b
    metatrainer job preview persona-job --family persona
    metatrainer job preview persona-job --family persona --rollouts 256 --json

    Training compares the rewards of a group, and learns nothing where they are all alike. Trains
    nothing; takes seconds.
    """
    from metatrainer import by_hand
    from metatrainer.errors import EnvError, JobError

    (files,), trial = _read([folder], family, config, settings)
    spec = _judge(files, trial, as_json).spec
    assert spec is not None  # a job that was not refused has one
    try:
        found = by_hand.preview(files, spec, trial, rollouts)
    except (EnvError, JobError) as error:
        raise MetatrainerError(f"the job fails: {error.message}") from None
    package = f"{spec.environment.module}/__init__.py"
    warnings = found.warnings(spec.prime_rl, package, trial.rules.max_seconds)
    if as_json:
        kept = {"warnings": [finding.as_dict() for finding in warnings]}
        print(json.dumps({**asdict(found), **kept}, indent=2))
        return
    _print_preview(found, spec.rollouts, shown)
    for finding in warnings:
        print(f"warning: {finding.render()}")


@job.command("run")
def job_run(
    folder: Folder,
    family: Family,
    as_json: Json = False,
    seed: Annotated[int, typer.Option(help="Of the adapter and of sampling.")] = 0,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="What trains: embedded, or prime-rl.", show_default="inner.trainer of the config"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what prime-rl would be told, run nothing.")
    ] = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Train one job here: score the student on fresh hidden items, train it, score it again.

    Exits with 1 if the job is refused or fails.

    \b
    metatrainer job run persona-job --family persona
    metatrainer job run persona-job --family persona --set limits.max_seconds=120
    metatrainer job run persona-job --family persona --trainer prime-rl --dry-run
    """
    import asyncio

    from metatrainer import by_hand

    if trainer:
        settings = [f"inner.trainer={trainer}", "pool.workers=1", "pool.packed=1", *settings]
    if dry_run:
        _print_plan(by_hand.planned(folder, family, _settings(config, settings)), as_json)
        return
    by_hand.check_trainer(_settings(config, settings))
    (files,), trial = _read([folder], family, config, settings)
    verdict = _judge(files, trial, as_json)
    assert verdict.spec is not None  # a job that was not refused has one

    def show(before: Score) -> None:
        if not as_json:
            print(f"training: {_spec_line(verdict)}\nbefore  {_score(before)}", flush=True)

    ran = asyncio.run(by_hand.run(files, verdict.spec, trial, seed, show))
    if as_json:
        print(json.dumps(_outcome(ran), indent=2))
    else:
        _print_ran(ran)
    if ran.result.outcome != "ok":
        raise typer.Exit(1)


@job.command("compile")
def job_compile(
    folder: Folder,
    family: Family,
    gpus: Annotated[int, typer.Option(min=1, max=2, help="GPUs to share or to divide.")] = 2,
    model: Annotated[
        str | None,
        typer.Option(
            help="The student as prime-rl loads it: a Hugging Face name or a folder.",
            show_default="the shipped model that job.toml names",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights instead of an adapter.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the config here.", show_default="print it"),
    ] = None,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Make a complete prime-rl config of a job, and the command that would run it.

    The job's code is not run; validate does that.

    \b
    metatrainer job compile persona-job --family persona --gpus 1 --model Qwen/Qwen3-0.6B
    """
    from metatrainer import by_hand

    done = by_hand.compiled(
        folder,
        family,
        gpus=gpus,
        model=model,
        full=full,
        config_path=out or Path("rl.toml"),
        settings=_settings(config, settings),
    )
    if isinstance(done, list):
        _print_findings(done)
        raise typer.Exit(1)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    if out is None:
        # The commands as comments, so that what is printed is a TOML file as it stands.
        print(done.text + "\n" + "\n".join(f"# run: {command}" for command in done.commands))
        return
    try:
        out.write_text(done.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    print("\n".join(done.commands))


def _print_plan(plan: Plan | list[Finding], as_json: bool) -> None:
    if isinstance(plan, list):
        _print_findings(plan)
        raise typer.Exit(1)
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2))
        return
    print(f"# {plan.folder} stands for a folder that is made for the run")
    for start in plan.starts:
        said = " ".join(f"{key}={shlex.quote(value)}" for key, value in start.environment.items())
        print(f"\n# {start.what}\n{said} {shlex.join(start.command)}\n\n# {start.path}")
        print(start.text)


def _settings(config: Path | None, overrides: list[str]) -> RunSettings:
    from metatrainer.config import check_names, load_config

    resolved = load_config(config, overrides)
    check_names(resolved)
    return resolved


def _read(
    folders: list[Path], family: str, config: Path | None, overrides: list[str]
) -> tuple[list[dict[str, str]], Trial]:
    """Jobs' files and what to judge them by, once there is a sandbox to do it in."""
    from metatrainer import by_hand
    from metatrainer.sandbox.unwalled import has_walls

    trial = by_hand.make_trial(_settings(config, overrides), family)
    jobs = [by_hand.read(folder) for folder in folders]
    has_walls(trial.settings.unsafe_without_sandbox)
    return jobs, trial


def _judge(files: dict[str, str], trial: Trial, as_json: bool) -> Verdict:
    """The verdict on a valid job; a refused one is shown and ends the command."""
    from metatrainer import by_hand

    verdict = by_hand.check(files, trial)
    if not verdict.ok:
        if as_json:
            print(json.dumps(_verdict(verdict), indent=2))
        else:
            _print_findings(verdict.findings)
        raise typer.Exit(1)
    return verdict


def _verdict_line(folder: Path, verdict: Verdict) -> str:
    """A verdict among others: what to mend first, or what the job is, and codes of the rest."""
    first = _spec_line(verdict) if verdict.ok else verdict.findings[0].render()
    rest = [finding.code for finding in verdict.findings[0 if verdict.ok else 1 :]]
    more = f" (and {', '.join(rest)})" if rest else ""
    return f"{'ok     ' if verdict.ok else 'refused'}  {one_line(str(folder), 200)}  {first}{more}"


def _print_verdict(verdict: Verdict) -> None:
    """All of one verdict."""
    if not verdict.ok:
        return _print_findings(verdict.findings)
    print(f"ok: {_spec_line(verdict)} ({verdict.seconds:.1f} s)")
    _print_more(verdict)


def _print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        print(finding.render())
    print(f"refused: {len(findings)} finding{'s' if len(findings) > 1 else ''}", file=sys.stderr)


def _print_preview(found: Preview, rollouts: int, shown: int) -> None:
    for messages in found.messages[:shown]:
        for message in messages:
            calls = [call_text(c["name"], c["arguments"]) for c in message.get("tool_calls") or ()]
            text = " ".join(filter(None, [message["content"], *calls]))
            print(f"{message['role']:10} {one_line(text, MESSAGE_CHARS)}")
        print()
    teach = f"{found.groups - found.alike} of {found.groups} groups teach something"
    print(
        f"mean reward {found.reward:.3f} of {found.rollouts} rollouts; {teach} "
        f"({found.all_right} all right, {found.all_wrong} all wrong); "
        f"{found.unfinished:.0%} unfinished\n"
        f"training on {rollouts:,} rollouts would take about {found.seconds_of(rollouts):.0f} s"
    )


def _print_more(verdict: Verdict) -> None:
    """What does not decide whether a job may run."""
    for finding in verdict.warnings:
        print(f"warning: {finding.render()}")
    if estimate := verdict.estimate:
        print(
            f"about {estimate.tokens:,} tokens in {estimate.rollouts:,} rollouts "
            f"({estimate.most_tokens:,} at most)"
        )


def _print_ran(ran: Ran) -> None:
    curve = ran.result.curve
    if curve:
        print("  step  reward  no signal  unfinished  seconds")
    every = -(-len(curve) // SHOWN_STEPS) or 1
    for row in curve[::-every][::-1]:  # counted from the last step, which is always shown
        print(
            f"  {row['step'] + 1:4}  {row['reward']:6.3f}  {row['dead_groups']:9.0%}"
            f"  {row['unfinished']:10.0%}  {row['seconds']:7.2f}"
        )
    if ran.result.post is None:
        print(f"{ran.result.outcome}: {visible(ran.result.message, MESSAGE_CHARS)}")
        return
    print(f"after   {_score(ran.result.post)}")
    print(
        f"{ran.result.post.mean - ran.before.mean:+.3f} on the same hidden items, "
        f"{ran.result.rollouts} rollouts in {ran.result.train_seconds:.1f} s"
    )


def _score(score: Score) -> str:
    return (
        f"{score.student} {score.mean:.3f} on {score.family}, "
        f"95 % {score.low:.3f}-{score.high:.3f}, n = {score.n}"
    )


def _spec_line(verdict: Verdict) -> str:
    assert verdict.spec is not None
    s = verdict.spec.prime_rl
    return f"{s.model}, {s.max_steps} steps of {s.batch_size} rollouts, lr {s.learning_rate:g}"


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "ok": verdict.ok,
        "cheating": verdict.cheating,
        "findings": [finding.as_dict() for finding in verdict.findings],
        "estimate": asdict(verdict.estimate) if verdict.estimate else None,
        "seconds": verdict.seconds,
    }


def _outcome(ran: Ran) -> dict[str, Any]:
    kept = {"outcome", "message", "rollouts", "tokens", "train_seconds", "curve"}
    return {
        "ok": ran.result.outcome == "ok",
        "before": ran.before.model_dump(),
        "after": ran.result.post.model_dump() if ran.result.post else None,
        **ran.result.model_dump(include=kept),
    }
