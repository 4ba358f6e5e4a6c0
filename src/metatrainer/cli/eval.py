"""`metatrainer eval`: agents on the same tasks, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from metatrainer.cli.options import Config, Set, folder_of
from metatrainer.errors import ConfigError

ALL = "all"


def evaluate(
    agents: Annotated[
        list[str],
        typer.Option(
            "--agent",
            help="reference, random, broken (scripts), model (untrained), a run, which is its "
            "trained agent, or openai:MODEL@URL. Repeat to compare.",
            show_default=False,
        ),
    ],
    families: Annotated[
        str, typer.Option(help="Names with commas between, or all of the settings.")
    ] = ALL,
    n: Annotated[int, typer.Option("--n", min=2, help="Tasks of each family.")] = 16,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep the ledger in this new folder, to warm-start an agent from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Have agents play the same tasks, jobs included, and compare their rewards task by task.

    \b
    metatrainer eval --agent reference --agent random --agent model
    metatrainer eval --agent nano-20250101-1 --agent model --n 64 --json
    metatrainer eval --agent openai:my-model@http://localhost:8000/v1 --agent reference

    Every task has the same hidden items for all agents. Families that the settings hold out stand
    apart. Prints Markdown; intervals are 95 % bootstraps over tasks. The key of an endpoint is in
    OPENAI_API_KEY, what its tokens cost in the settings of money.
    """
    import asyncio

    from rich.console import Console

    from metatrainer import families as known
    from metatrainer.config import check_names, load_config
    from metatrainer.console import share_shown
    from metatrainer.sandbox.unwalled import has_walls

    resolved = load_config(config, settings)
    check_names(resolved)
    names = [*resolved.families, *resolved.heldout] if families == ALL else families.split(",")
    for name in names:
        known.get(name)
    for given, what in ((agents, "agent"), (names, "family")):
        if len(set(given)) < len(given):
            raise ConfigError(f"{what} named twice; name each once")
    has_walls(resolved.unsafe_without_sandbox)
    with share_shown(Console(stderr=True)) as at:
        from metatrainer.play import Played, find_agent, play_all
        from metatrainer.report import leaderboard

        found = {name: find_agent(name, resolved) for name in agents}
        done = 0

        def count(played: Played) -> None:
            nonlocal done
            done += 1
            at(done / (n * len(names) * len(found)), f"{played.agent} on {played.family}")

        with folder_of(resolved, keep) as folder:
            played = asyncio.run(play_all(resolved, found, names, n, folder, count))
    board = leaderboard.rank(played, resolved.heldout)
    print(json.dumps(board.as_json(), indent=2) if as_json else leaderboard.markdown(board))
