"""The commands `metatrainer students ...`: the models that jobs train, and ones of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

students = typer.Typer(help="The models that jobs train: list them, add your own.")

New = Annotated[str, typer.Argument(help="What it shall be called.", show_default=False)]


@students.callback(invoke_without_command=True)
def students_list(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the students that a run may name, or do something with one.

    \b
    metatrainer students
    metatrainer students add smollm2 models/SmolLM2-135M-Instruct
    metatrainer students prime smollm2 smollm2-tools
    metatrainer train configs/nano.toml --set 'students=["smollm2-tools"]'
    """
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from metatrainer.students import catalogue

    found = [model for model in catalogue.models().values() if model.role == "student"]
    if as_json:
        print(json.dumps([asdict(model) for model in found], indent=2))
        return
    for model in found:
        where = model.path or model.hub or "comes with metatrainer"
        print(f"{model.name:20} {model.parameters:>15,}  {model.sha256[:12]}  {where}")


@students.command("add")
def students_add(
    name: New,
    path: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder, a GGUF file, or OWNER/NAME on the hub.", show_default=False
        ),
    ],
) -> None:
    """Put a model in the catalogue of students. Its files stay where they are.

    \b
    metatrainer students add smollm2 models/SmolLM2-135M-Instruct
    metatrainer students add gemma models/gemma-3-270m.gguf
    metatrainer students add qwen3-4b Qwen/Qwen3-4B

    Llama, Qwen2, Qwen3 and Gemma 3 models whose tokenizer has tokens for chat turns will do. One
    that was never taught to call tools scores nothing until it is primed.
    """
    from metatrainer.students import catalogue

    local = Path(path)
    if not local.exists():
        local = catalogue.download(path)
    model = catalogue.add(name, local)
    print(f"{model.name}: {model.parameters:,} parameters, sha256 {model.sha256[:12]}")


@students.command("prime")
def students_prime(
    name: Annotated[str, typer.Argument(help="A student.", show_default=False)],
    new: New,
    steps: Annotated[int, typer.Option(min=1, help="Updates, of 64 conversations each.")] = 400,
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights, in place of an adapter of rank 64.")
    ] = False,
) -> None:
    """Make a student of a model that was never taught to call tools.

    \b
    metatrainer students prime smollm2 smollm2-tools

    It is shown synthetic conversations of all families, few of them right, as the nano students
    were: it then knows how a tool is called, and has most of the skill still to learn. On a GPU if
    there is one (minutes for 135M parameters); on a CPU for the smallest models only.
    """
    from rich.console import Console

    from metatrainer import folders
    from metatrainer.console import share_shown
    from metatrainer.engine import Engine
    from metatrainer.students import catalogue
    from metatrainer.students.prime import FULL_RATE, Priming, prime

    catalogue.check_new(new)
    out = catalogue.home() / new
    folders.check_new(out)
    engine = Engine.open(catalogue.verified_folder(name), name)
    with share_shown(Console(stderr=True)) as at:
        how = Priming(steps, full=full, learning_rate=FULL_RATE if full else Priming.learning_rate)
        for done, loss in prime(engine, out, how):
            at(done / steps, f"loss {loss:.3f}")
    model = catalogue.add(new, out)
    print(f"{model.name}: {out}")


@students.command("remove")
def students_remove(
    name: Annotated[str, typer.Argument(help="A student that was added.", show_default=False)],
) -> None:
    """Take an added student out of the catalogue. Its files stay."""
    from metatrainer.students import catalogue

    catalogue.remove(name)
