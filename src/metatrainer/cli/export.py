"""`metatrainer export`: a run's trained agent as a folder for others, or on the hub."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name in runs/.")],
    step: Annotated[
        int | None,
        typer.Option(min=1, help="The agent after so many steps.", show_default="the newest"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder.", show_default="<run>-agent")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Commit it to this repository of the Hugging Face hub too, a private one if new.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Load it in peft and compare it with what the run's agent sampled."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a trained agent for others: adapter (PEFT), model card, prompts, config, an example.

    \b
    metatrainer export nano-20250101-1
    metatrainer export runs/nano-20250101-1 --step 8 --out my-agent --verify
    metatrainer export nano-20250101-1 --push ada/nano-agent
    """
    from metatrainer import folders, rundir
    from metatrainer.export import checkpoint
    from metatrainer.export import export as write

    found_run = rundir.find(run)
    found = checkpoint(found_run, step)
    out = out or Path(f"{found_run.name}-agent")
    folders.check_new(out)
    if push:
        from metatrainer import hub

        hub.check(push)
    done = write(found_run, found, out, verified=verify)
    files, compared = [str(file) for file in done.files], done.verified
    address = hub.push(out, push) if push else None
    if as_json:
        facts = {**asdict(found), "folder": str(out), "files": files, "pushed": address}
        print(json.dumps({**facts, "verified": compared and asdict(compared)}, indent=2))
        return
    print(f"the agent after step {found.step} is in {out}: {', '.join(files)}")
    if compared:
        print(
            f"verified: {compared.tokens} recorded tokens in peft, log-probabilities at most "
            f"{compared.worst:.1e} away"
        )
    print(f"try it: python {out / 'example.py'}")
    if address:
        print(f"pushed to {address}")
