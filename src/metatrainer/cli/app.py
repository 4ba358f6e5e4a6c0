"""The command line: reads arguments, calls one function, shows what it returns.

Commands import what they need when they run, so that help costs nothing.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatrainer.cli.eval import evaluate
from metatrainer.cli.export import export
from metatrainer.cli.families import family
from metatrainer.cli.job import job
from metatrainer.cli.options import Config, Set, folder_of
from metatrainer.cli.pool import pool
from metatrainer.cli.resumable import fail, resumable
from metatrainer.cli.serve import serve
from metatrainer.cli.solve import solve
from metatrainer.cli.status import status
from metatrainer.cli.students import students
from metatrainer.cli.warmstart import warmstart
from metatrainer.cli.watch import watch
from metatrainer.errors import ConfigError, MetatrainerError, SandboxUnavailable
from metatrainer.shown import one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

    from metatrainer.rundir import RunDir

# Before torch and the Tinker SDK are imported: spinning threads slow a busy machine down
# several times over, and an experiment on one's own machine reports to nobody.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHOWN_CHARS = 20_000
"""Of one message in an episode that is played; the rest is cut."""
NAME_CHARS = 80

app = typer.Typer(
    help="An agent whose only action is to write an RL training job for another model, itself "
    "trained by RL on how well those models turn out.",
    epilog="Start with:  metatrainer train configs/nano.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
nano = typer.Typer(help="The small models that ship with metatrainer.", no_args_is_help=True)
app.add_typer(family, name="families")
app.add_typer(job, name="job")
app.add_typer(pool, name="pool")
app.add_typer(students, name="students")
app.add_typer(nano, name="nano")
app.command()(status)
app.command()(watch)
app.command()(serve)
app.command("eval")(evaluate)
app.command()(export)
app.command()(warmstart)
app.command()(solve)


def main() -> None:
    """Run the command line. Exits with 2 for what is wrong before anything was spent."""
    try:
        app()
    except (ConfigError, SandboxUnavailable) as error:
        fail(str(error), 2)
    except MetatrainerError as error:
        fail(str(error), 1)


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="Settings of the run, a TOML file.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the new run.", show_default="runs/<preset>-<date>-<n>"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with this run: its folder, or its name in runs/."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would do and cost; begin nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Train an agent: both loops, to the end, with a report.

    \b
    metatrainer train configs/nano.toml
    metatrainer train configs/seed.toml --dry-run
    metatrainer train configs/nano.toml --set outer.steps=2 --run-dir runs/try
    metatrainer train --resume runs/try

    Ctrl-C, or kill -9, at any time: --resume goes on and runs no finished job again.
    """
    from metatrainer import rundir
    from metatrainer.config import check_names, load_config
    from metatrainer.outer import preflight, start
    from metatrainer.sandbox.unwalled import has_walls

    if (config is None) == (resume is None):
        raise ConfigError("give a config to begin a run, or --resume RUN to go on with one")
    if as_json and not dry_run:
        raise ConfigError("--json is for --dry-run; a run's numbers: metatrainer report RUN --json")
    if dry_run:
        from metatrainer.cli.dry_run import print_forecast

        resolved = load_config(config, settings) if config else rundir.find(str(resume)).settings
        check_names(resolved, pool=False)
        print_forecast(resolved, as_json)
        return
    if config is not None:
        resolved = load_config(config, settings)
        check_names(resolved)
        has_walls(resolved.unsafe_without_sandbox)
        start.check(resolved)
        preflight.check(resolved)
        run = rundir.create(resolved, run_dir)
    else:
        if settings or run_dir:
            raise ConfigError("--resume takes the run's own settings: leave out --set, --run-dir")
        run = rundir.find(str(resume))
        check_names(run.settings)
        has_walls(run.settings.unsafe_without_sandbox)
        preflight.check(run.settings)
    _train(run, resume=resume is not None)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name in runs/.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown page.")] = False,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw the figure here (.png, .svg, .pdf; no suffix: PNG and SVG)."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the tables as CSV here.")] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            help="What says which student is best: the output of benchmarks/students.py.",
            show_default="the run's scores of untrained students",
        ),
    ] = None,
) -> None:
    """Show what came of a run, finished or not, from its ledger.

    \b
    metatrainer report nano-20250101-1
    metatrainer report runs/nano-20250101-1 --json
    metatrainer report runs/nano-20250101-1 --figure docs/curve.svg --csv tables
    """
    from rich.console import Console

    from metatrainer import rundir
    from metatrainer.ledger import Ledger
    from metatrainer.report import figure as drawing
    from metatrainer.report import text
    from metatrainer.report.learned import read_table
    from metatrainer.report.summary import summarise

    found = rundir.find(run)
    table = read_table(scores) if scores else None
    with Ledger(found.ledger, readonly=True) as ledger:
        summary = summarise(ledger, table)
        written = ledger.export_csv(csv) if csv else []
    if figure:
        written += drawing.draw(summary, figure)
    if as_json:
        print(json.dumps(summary.as_json(), indent=2))
    elif markdown:
        print(text.markdown(summary))
    elif not written:
        text.print_report(summary, Console())
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


@app.command()
def episode(
    family: Annotated[str, typer.Argument(help="What the agent is to teach.")] = "persona",
    agent: Annotated[
        str,
        typer.Option(
            help="Who plays: reference, random or broken (scripts), model, a run: its agent, or "
            "openai:MODEL@URL."
        ),
    ] = "reference",
    config: Config = None,
    seed: Annotated[int, typer.Option(help="Which task, and which choices of the agent.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep the ledger in this new folder.")] = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Play one episode for real, job included, and print what was said.

    \b
    metatrainer episode
    metatrainer episode triage --agent model --seed 3
    """
    import asyncio

    from rich.console import Console

    from metatrainer import families
    from metatrainer.config import check_names, load_config
    from metatrainer.sandbox.unwalled import has_walls

    resolved = load_config(config, settings)
    families.get(family)
    check_names(resolved)
    has_walls(resolved.unsafe_without_sandbox)

    console = Console()
    with console.status("playing") if console.is_terminal else nullcontext():
        from metatrainer.play import find_agent, play_one

        found = find_agent(agent, resolved)

        def show(message: dict[str, Any]) -> None:
            _print_message(console, message)

        with folder_of(resolved, keep) as folder:
            terms = asyncio.run(play_one(resolved, family, found, seed, folder, show))
    console.print(
        f"\n[bold]reward {terms.total:.3f}[/bold]  validation {terms.validation:.3f}"
        f"  quality {terms.quality:.3f}  speed {terms.speed:.3f}  outcome {terms.outcome}"
    )
    if terms.post is not None:
        console.print(f"the student scores {terms.post:.3f}, best untrained {terms.best_pre:.3f}")


@nano.command("build")
def nano_build(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the models.", show_default="in the package")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights and traces.")] = 0,
) -> None:
    """Pretrain from nothing what is not there yet of the tokenizer, the students and the agent.

    To make a model again, delete its folder first.

    \b
    metatrainer nano build --device cuda
    metatrainer nano build --out /tmp/models
    """
    from metatrainer.nano import build
    from metatrainer.students.catalogue import MODELS

    build.build(out or MODELS, device, seed, _say)


@nano.command("check")
def nano_check(
    models: Annotated[
        Path | None, typer.Option(help="Folder of the models.", show_default="in the package")
    ] = None,
) -> None:
    """Measure the models: untrained scores, and how often a tool gets the right argument."""
    from metatrainer.nano import build
    from metatrainer.students.catalogue import MODELS

    build.check(models or MODELS, _say)


def _train(run: RunDir, *, resume: bool) -> None:
    """Bring a run to its end and report; on ctrl-C or an error, say how to go on."""
    import asyncio

    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"run {run.path}", highlight=False)
    with resumable(f"train --resume {run.path}"):
        with console.status("loading") if console.is_terminal else nullcontext():
            from metatrainer import experiment
        from metatrainer.console import shown
        from metatrainer.report import text

        with shown(console) as progress:
            asyncio.run(experiment.run(run.settings, run, resume=resume, progress=progress))
        summary = experiment.write_report(run)
    text.print_report(summary, Console())
    print(f"figure and tables: {run.path}/figure.png, report.md, report.json, csv/")


def _say(line: str) -> None:
    print(line, flush=True)


def _print_message(console: Console, message: dict[str, Any]) -> None:
    speaker = one_line(str(message.get("name") or message["role"]), NAME_CHARS)
    console.print(f"\n{speaker}", style="bold", markup=False)
    if message["content"]:
        text = visible(message["content"], SHOWN_CHARS)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for call in message.get("tool_calls") or ():
        name = one_line(str(call["name"]), NAME_CHARS)
        console.print(f"-> {name}", style="cyan", markup=False)
        for key, value in call["arguments"].items():
            text = f"{one_line(str(key), NAME_CHARS)}: {visible(str(value), SHOWN_CHARS)}"
            console.print(f"   {text}", markup=False, highlight=False, soft_wrap=True)
