"""Answers that are fetched later: a request is taken at once, its result asked for by its id.

An id names one request of a client, so that one that is sent again is not done again. Knows nothing
about HTTP or what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

KEEP_SECONDS = 600.0
"""An answer may be fetched again for so long, in case the first one got lost on its way."""


@dataclass
class Promise:
    """One request, under way or answered."""

    session: str
    future: Future[Any]
    answered: float | None = None
    """When its answer was first fetched."""


@dataclass
class Promises:
    """All of a server's. For one event loop."""

    _known: dict[str, Promise] = field(default_factory=dict)

    def take(self, id: str, session: str, begin: Callable[[], Future[Any]]) -> str:
        """The id of a request, which is begun unless it has been before."""
        if id not in self._known:
            self._known[id] = Promise(session, begin())
        return id

    async def wait(self, id: str, seconds: float) -> Future[Any] | None:
        """The finished future of a request, None if it needs longer. Raises KeyError."""
        promise = self._known[id]
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        promise.future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), seconds)
        if not promise.future.done():
            return None
        promise.answered = promise.answered or time.monotonic()
        return promise.future

    def cancel(self, id: str) -> None:
        """Do not begin a request whose answer nobody wants any more."""
        if promise := self._known.get(id):
            promise.future.cancel()

    def forget(self, session: str) -> None:
        """Drop a session's requests; those that have not begun are not done."""
        for id in [id for id, promise in self._known.items() if promise.session == session]:
            self._known.pop(id).future.cancel()

    def sweep(self) -> None:
        """Drop what was answered long ago."""
        old = time.monotonic() - KEEP_SECONDS
        for id, promise in list(self._known.items()):
            if promise.answered is not None and promise.answered < old:
                del self._known[id]
