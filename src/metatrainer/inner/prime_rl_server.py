"""An inference server of prime-rl on a slot: started, asked whether it is up, given an adapter.

Knows its routes; knows nothing about jobs, families or scores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from metatrainer import toml
from metatrainer.errors import JobError
from metatrainer.inner.kept import Kept, said
from metatrainer.pool.base import LOST, STOPPED

POLL_SECONDS = 0.2
LOAD_SECONDS = 60.0
"""For taking an adapter."""
BAD_ADAPTER = "bad_adapter"
"""Outcome of an adapter that cannot be loaded."""


class Server:
    """A server that runs; `close` ends it."""

    def __init__(
        self,
        command: Sequence[str],
        config: dict[str, Any],
        environment: dict[str, str],
        folder: Path,
    ):
        """command: the executable. config: the whole inference.toml, which is put into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "inference.toml"
        path.write_text(toml.dumps(config), encoding="utf-8")
        self.config = config
        self.url = f"http://127.0.0.1:{config['server']['port']}"
        self._log = folder / "inference.log"
        self._kept = Kept([*command, "@", str(path)], environment, folder, self._log)

    @property
    def alive(self) -> bool:
        """Whether its process is still there."""
        return self._kept.status() is None

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Return once it answers. Raises JobError(LOST): it is not the job's fault if it does not.

        stop: set, JobError(STOPPED) is raised instead.
        """
        deadline = time.monotonic() + seconds
        while True:
            if stop.wait(POLL_SECONDS):
                raise JobError(STOPPED, "it was told to stop")
            status = self._kept.status()
            if status is not None:
                why = f"ended with status {status}: {said(self._log)}"
                raise JobError(LOST, f"the inference server {why}")
            if _answers(f"{self.url}/health"):
                return
            if time.monotonic() > deadline:
                raise JobError(LOST, f"the inference server was not up in {seconds:g} s")

    def load(self, name: str, adapter: Path) -> None:
        """Serve an adapter under a name of its own. Raises JobError."""
        body = {"lora_name": name, "lora_path": str(adapter)}
        try:
            answer = httpx.post(f"{self.url}/load_lora_adapter", json=body, timeout=LOAD_SECONDS)
        except httpx.HTTPError as error:
            raise JobError(LOST, f"the inference server is gone: {error!r}") from None
        if answer.is_error:
            why = f"{answer.status_code} {answer.text[:500]}"
            raise JobError(BAD_ADAPTER, f"the inference server does not take the adapter: {why}")

    def close(self) -> None:
        """End it and all that it started."""
        self._kept.end()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).is_success
    except httpx.HTTPError:
        return False
