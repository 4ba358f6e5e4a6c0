"""`metatrainer warmstart`: an agent learns from recorded episodes before it learns by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from metatrainer.cli.options import Config, Set


def warmstart(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Whose episodes to learn from: runs, and folders of eval or episode --keep.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the adapter.", show_default=False)],
    min_reward: Annotated[
        float, typer.Option(help="Of an episode that is worth it. 0.35: valid at the first try.")
    ] = 0.35,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the episodes.")] = 4,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of one update; mostly an episode is one.")
    ] = 8,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Of the first update.", show_default="outer.learning_rate"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Config = None,
    settings: Set = [],  # noqa: B006 (typer reads the default, nothing changes it)
) -> None:
    """Train the agent's adapter on good episodes that are on record, so that a run need not begin
    by learning to be valid.

    \b
    metatrainer eval --agent reference --n 8 --keep runs/good
    metatrainer warmstart runs/good --out runs/warm
    metatrainer train configs/nano.toml --set agent.start=runs/warm

    Families that the settings hold out are left out here too. It is short and starts anew if it is
    stopped: delete the folder first. metatrainer eval --agent runs/warm plays what it made.
    """
    import asyncio

    from rich.console import Console

    from metatrainer import rundir
    from metatrainer.config import check_names, load_config
    from metatrainer.console import share_shown
    from metatrainer.outer import preflight, start

    resolved = load_config(config, settings)
    check_names(resolved)
    ledgers = [rundir.find(source).ledger for source in sources]
    with share_shown(Console(stderr=True)) as at:
        from metatrainer.outer import warmstart as learning

        selection = learning.select(ledgers, resolved, min_reward)
        recipe = learning.Recipe(epochs, batch_size, learning_rate or resolved.outer.learning_rate)
        start.check(resolved)
        preflight.check(resolved)
        run = rundir.create(resolved, out)
        learned = asyncio.run(
            learning.train(
                resolved,
                run.path,
                selection,
                recipe,
                lambda begun, all: at(begun / all, f"update {begun} of {all}"),
            )
        )
    if as_json:
        print(json.dumps({**learned.as_json(), "folder": str(run.path)}, indent=2))
        return
    left_out = "".join(f", {n} {why}" for why, n in learned.left_out.items())
    print(f"learned from {learned.episodes} episodes{left_out}")
    print(f"{learned.updates} updates, nll {learned.nll_first:.3f} to {learned.nll_last:.3f}")
    print(f"begin from it: metatrainer train CONFIG --set agent.start={run.path}")
