"""Validation off the event loop, in a few warm sandboxes that all episodes share.

Knows nothing about what is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from metatrainer.jobs.validate import TaskRules, Verdict, validate
from metatrainer.sandbox.host import Guest

FIRST_SLOT = 100
"""Sandboxes of the pool's workers have the slots below."""


class Validator:
    """Validates submissions, as many at a time as it has sandboxes."""

    def __init__(self, sandboxes: int = 2, unsafe: bool = False):
        self._guests = [Guest(FIRST_SLOT + i, unsafe) for i in range(sandboxes)]
        self._idle: asyncio.Queue[Guest] = asyncio.Queue()
        for guest in self._guests:
            self._idle.put_nowait(guest)

    async def start(self) -> None:
        """Warm the sandboxes. Raises SandboxUnavailable."""
        await asyncio.gather(*(asyncio.to_thread(guest.start) for guest in self._guests))

    async def close(self) -> None:
        """End the sandboxes once the validations in them are over."""
        for _ in self._guests:
            await self._idle.get()
        for guest in self._guests:
            await asyncio.to_thread(guest.close)

    async def validate(self, files: Mapping[str, str], rules: TaskRules) -> Verdict:
        """The verdict on a submitted folder."""
        guest = await self._idle.get()
        work = asyncio.ensure_future(asyncio.to_thread(validate, dict(files), rules, guest))
        # A cancelled caller goes at once; its sandbox is free only when the thread is done with it.
        work.add_done_callback(lambda _: self._idle.put_nowait(guest))
        return await asyncio.shield(work)
