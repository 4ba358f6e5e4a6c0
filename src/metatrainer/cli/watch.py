"""`metatrainer watch`: the live page of one run, or of all runs below a folder."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from metatrainer.errors import ConfigError

PORT = 8400


def watch(
    run: Annotated[
        str | None,
        typer.Argument(help="A run's folder or name, or a folder of runs.", show_default="runs"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = PORT,
    token: Annotated[
        str | None,
        typer.Option(
            help="What a reader must show; drawn at random where others can connect.",
            envvar="METATRAINER_TOKEN",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show runs in a browser, live while they go on. Reads only; nothing is fetched from elsewhere.

    \b
    metatrainer watch                     # all runs in runs/
    metatrainer watch nano-20250101-1
    ssh -L 8400:localhost:8400 machine    # then open http://localhost:8400 here
    """
    from metatrainer import net, rundir

    root = Path(run) if run and Path(run).is_dir() else None
    root = root or (rundir.find(run).path if run else rundir.RUNS)
    if not root.is_dir():
        raise ConfigError(f"no runs at {root}; begin one: metatrainer train configs/nano.toml")
    try:
        import uvicorn

        from metatrainer.web import app as web
    except ImportError:
        raise ConfigError("the page needs its extra: pip install 'metatrainer[web]'") from None
    if host not in net.LOOPBACK and token is None:
        token = secrets.token_urlsafe(16)
    listening = net.listen(host, port)
    address = f"{net.url(host, listening)}/" + (f"?token={token}" if token else "")
    print(f"watching {root} at {address}   (ctrl-C ends it)", file=sys.stderr, flush=True)
    server = uvicorn.Server(uvicorn.Config(web.make_app(root, token), log_level="warning"))
    server.run(sockets=[listening])
