"""The command `metatrainer serve`: the embedded engine for programs that use the tinker SDK."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from metatrainer.errors import ConfigError
from metatrainer.net import LOOPBACK

KEY = "METATRAINER_API_KEY"


def serve(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            help="What to serve: a name of the catalogue, or a model's folder or GGUF file. "
            "Several times for several.",
        ),
    ],
    checkpoints: Annotated[Path, typer.Option(help="Folder of what clients save.")] = Path(
        "checkpoints"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=KEY, help="Let in only who brings this key; it begins with tml-."),
    ] = None,
) -> None:
    """Serve models to programs that use the tinker SDK: sampling, training, checkpoints.

    \b
    metatrainer serve --model nano-wren
    metatrainer serve --model models/SmolLM2-135M-Instruct --port 9000
    METATRAINER_API_KEY=tml-... metatrainer serve --model nano-wren --host 0.0.0.0

    Then, for the program (tinker 0.38.0): TINKER_BASE_URL and TINKER_API_KEY, as printed. Adapters
    live as long as the program that made them; what it saves stays. On a GPU if there is one.
    """
    if host not in LOOPBACK and api_key is None:
        raise ConfigError(
            f"{host} can be reached from other machines: give an --api-key, or set {KEY}"
        )
    if api_key is not None and not api_key.startswith("tml-"):
        raise ConfigError("the SDK sends only keys that begin with tml-; choose such a one")
    try:
        from metatrainer.serve import run
    except ImportError as error:
        raise ConfigError(
            f"serving needs its extras ({error.name}): pip install 'metatrainer[train,serve]'"
        ) from None
    os.environ.pop(KEY, None)  # nothing that runs below needs it
    run.serve(model, checkpoints, host, port, api_key, _say)


def _say(line: str) -> None:
    print(line, flush=True)
