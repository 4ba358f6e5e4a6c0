"""The commands `metatrainer families ...`: what can be taught, and families of one's own.

Reads arguments and prints; the work is elsewhere and is imported when a command runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metatrainer.cli.options import Config, Set
from metatrainer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

    from metatrainer.config import RunSettings
    from metatrainer.families import Family, Item
    from metatrainer.families.check import Check

SHOWN_CHARS = 1_000
"""Of a text that somebody else's family made."""

family = typer.Typer(help="What can be taught: list, show, check, play and write families.")

Name = Annotated[str, typer.Argument(help="A family's name.", show_default=False)]


@family.callback(invoke_without_command=True)
def families_list(context: typer.Context) -> None:
    """List the families of tasks, or do something with one.

    \b
    metatrainer families
    metatrainer families show triage
    metatrainer families check persona
    """
    if context.invoked_subcommand is None:
        from metatrainer import families

        for name in families.known():
            print(f"{name:12} {families.get(name).title}")


@family.command("show")
def families_show(
    name: Name,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown page, all levels.")] = False,
) -> None:
    """Show a family: goal, tools, levels and a sample with a perfect student's calls.

    \b
    metatrainer families show triage
    metatrainer families show persona --markdown
    """
    from metatrainer import families
    from metatrainer.families import page

    found = families.get(name)
    if markdown:
        print(page.render(found), end="")
        return
    (item,) = found.items("dev", seed=0, n=1)
    print(f"{found.name}: {found.title}\n\n{found.goal}\n")
    print(f"levels {list(found.levels)}, evaluated at {found.eval_level}")
    for tool in found.tools:
        print(f"tool   {tool.name}({', '.join(tool.parameters['required'])}): {tool.description}")
    print(f"\na sample\n{page.transcript(found, item)}")


@family.command("check")
def families_check(
    name: Annotated[str | None, typer.Argument(help="Check this one.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all there are here.")] = False,
    train: Annotated[bool, typer.Option(help="Run the reference job, which takes longest.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Test every property of a family, and measure how hard it is. Exits with 1 if one fails.

    \b
    metatrainer families check persona
    metatrainer families check my_family --no-train
    metatrainer families check --all --json
    metatrainer families check persona --set 'students=["smollm2-tools"]'

    A family that is not sound (items repeat, a prompt holds its answer, a checker that is not
    exact, no tools...) is refused with the reason. A sound one is measured: a guess, a constant
    answer, a student without tools, every student of the settings untrained, and the best of them
    trained with the reference job.
    """
    from rich.console import Console

    from metatrainer import families
    from metatrainer.config import check_names, load_config
    from metatrainer.console import share_shown
    from metatrainer.sandbox.unwalled import has_walls
    from metatrainer.shown import one_line

    if (name is None) == (not every):
        raise ConfigError("give the name of a family, or --all")
    found = [families.get(each) for each in (families.known() if name is None else [name])]
    resolved = load_config(config, settings)
    check_names(resolved)
    if train:
        has_walls(resolved.unsafe_without_sandbox)
    results: dict[str, list[Check]] = {}
    with share_shown(Console(stderr=True)) as at:
        for number, each in enumerate(found):
            checks = results[each.name] = []
            for share, check in _checks(each, resolved, train):
                checks.append(check)
                at((number + share) / len(found), f"{each.name}: {check.name}")
    ok = {
        title: all(check.ok is not False for check in checks) for title, checks in results.items()
    }
    if as_json:
        rows = {
            title: {"ok": ok[title], "checks": [check.as_dict() for check in checks]}
            for title, checks in results.items()
        }
        print(json.dumps({"ok": all(ok.values()), "families": rows}, indent=2))
    else:
        for title, checks in results.items():
            Console().print(_table(title, checks))
    for title, checks in results.items():
        for check in checks:
            if check.ok is False:
                reason = one_line(check.found, SHOWN_CHARS)
                print(f"refused: {title}: {check.name}: {reason}", file=sys.stderr)
    if not all(ok.values()):
        raise typer.Exit(1)


@family.command("play")
def families_play(
    name: Name,
    level: Annotated[
        int | None, typer.Option(help="Difficulty.", show_default="the hidden evaluation's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which items.")] = 0,
) -> None:
    """Be the student: call tools by name, answer, and see whether it is right.

    \b
    metatrainer families play persona
    metatrainer families play triage --level 1 --seed 3
    """
    from metatrainer import families
    from metatrainer.families import play

    found = families.get(name)
    items = play.deal(found, level, seed)
    print(play.introduction(found))
    verdicts = (_answered(found, item) for item in items)
    right = list(itertools.takewhile(lambda verdict: verdict is not None, verdicts))
    if right:
        print(f"{right.count(True)} of {len(right)} right")


@family.command("new")
def families_new(
    name: Annotated[str, typer.Argument(help="Name of the new family, such as parts.")],
    into: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="<name>-family")
    ] = None,
) -> None:
    """Write a package of your own with a family that works, to change, and its tests.

    \b
    metatrainer families new parts
    metatrainer families new parts --into ~/work/parts
    """
    from metatrainer.families import scaffold

    folder = into or Path(f"{name}-family")
    for path in scaffold.new(name, folder):
        print(f"wrote {path}")
    print(f"next: pip install -e {folder}\n      metatrainer families check {name}")


def _checks(found: Family, settings: RunSettings, train: bool) -> Iterator[tuple[float, Check]]:
    """Loads the engine only now, after everything that can be wrong with the arguments."""
    from metatrainer.families import measure

    return measure.everything(found, settings, train=train)


def _answered(found: Family, item: Item) -> bool | None:
    """Whether a person answered an item rightly; None, and nothing more, if they are leaving."""
    from metatrainer.families import play

    print(f"\n{item.prompt}")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if line in ("quit", "exit"):
            return None
        if line:
            said = play.reply(found, item, line)
            print(said.text)
            if said.right is not None:
                return said.right


def _table(name: str, checks: list[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from metatrainer.shown import one_line

    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    for column in ("", "check", "score", "95 %", "n", "found"):
        justify: JustifyMethod = "right" if column in ("score", "n") else "left"
        table.add_column(column, justify=justify, no_wrap=column != "found")
    marks = {True: "ok", False: "[red]no[/red]", None: ""}
    for check in checks:
        numbers = ("", "", "")
        if check.mean is not None:
            numbers = (f"{check.mean:.3f}", f"{check.low:.3f}-{check.high:.3f}", str(check.n))
        found = Text(one_line(check.found, SHOWN_CHARS))
        table.add_row(marks[check.ok], check.name, *numbers, found)
    return table
