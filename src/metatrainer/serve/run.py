"""Starts the server and ends it: which models, where, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from metatrainer import net
from metatrainer.engine import Engine
from metatrainer.serve.app import Server
from metatrainer.students import catalogue
from metatrainer.tinker.client import SDK_VERSION, ServiceClient

ANY_KEY = "tml-local"
"""What a client sends where no key is asked for: the SDK wants one."""


def serve(
    models: Sequence[str],
    checkpoints: Path,
    host: str,
    port: int,
    key: str | None,
    say: Callable[[str], None],
) -> None:
    """Serve until interrupted. Raises ConfigError for what cannot be served, or where."""
    folders = {name: find(name) for name in models}
    listening = net.listen(host, port)
    service = ServiceClient(checkpoints, lambda name: Engine.open(folders[name], name))
    app = Server(service, tuple(folders), key).app()
    say(f"serving {', '.join(folders)} to tinker {SDK_VERSION}; checkpoints in {checkpoints}")
    say(f"export TINKER_BASE_URL={net.url(host, listening)}")
    say(f"export TINKER_API_KEY={ANY_KEY if key is None else '(the key that was given)'}")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        say("ended; what clients saved is kept")
    finally:
        service.close()


def find(model: str) -> Path:
    """Where a model is that is named by the catalogue or by a path. Raises ConfigError."""
    if Path(model).exists():
        return Path(model)
    known = catalogue.models().get(model)
    return catalogue.verified_folder(model, known.role if known else "student")
