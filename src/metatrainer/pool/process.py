"""A worker subprocess as seen from the pool: start, ask, kill. One request at a time.

Knows nothing about jobs: requests and answers are JSON objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from metatrainer.errors import PoolError, WorkerFault
from metatrainer.shown import visible

LINE_BYTES = 8 * 1024 * 1024
"""A longer answer is taken for garbage."""
TAIL_BYTES = 2_000
"""How much of a worker's stderr is kept."""
START_SECONDS = 120.0
CLOSE_SECONDS = 3.0
_PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
)
"""Environment variables that workers get; keys and tokens of the controller are not among them."""


class WorkerProcess:
    """One worker subprocess, restarted on demand."""

    def __init__(self, factory: str, setup: str):
        self._factory = factory
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._busy = False
        self._tail = bytearray()
        self._drain: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None while no process is alive."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the subprocess if there is none, and wait until it is ready. Raises PoolError."""
        if self._process and self._process.returncode is None:
            return
        await self.kill()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "metatrainer.pool.worker", self._factory, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            env=worker_environment(),
            start_new_session=True,
        )
        self._drain = asyncio.create_task(self._keep_tail())
        try:
            await self._exchange(self._setup, START_SECONDS)
        except WorkerFault as fault:
            raise PoolError(f"a worker does not start: {fault.message}") from None

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises WorkerFault; the worker is dead then."""
        return await self._exchange(json.dumps(request), seconds)

    async def kill(self) -> None:
        """Kill the subprocess and its group at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await self._end_drain()

    async def close(self) -> None:
        """Let an idle worker end by itself, so that it can put things away; else kill it."""
        if self._process and self._process.stdin and not self._busy:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        await self.kill()

    async def _exchange(self, line: str, seconds: float) -> dict[str, Any]:
        self._busy = True
        self._tail.clear()  # what an earlier request left says nothing about this one
        try:
            return await asyncio.wait_for(self._write_and_read(line), seconds)
        except TimeoutError:
            await self.kill()
            raise WorkerFault("timeout", f"no answer in {seconds:.0f} s") from None
        except WorkerFault as fault:
            await self.kill()
            raise WorkerFault(fault.kind, self._with_tail(fault.message)) from None
        except BaseException:  # a cancelled request leaves an answer in the pipe that nobody reads
            await self.kill()
            raise
        finally:
            self._busy = False

    async def _write_and_read(self, line: str) -> dict[str, Any]:
        process = self._process
        assert process and process.stdin and process.stdout
        try:
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()
            answer = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        except ValueError:  # the line is longer than the reader's limit
            raise WorkerFault("crashed", f"the worker sent over {LINE_BYTES} bytes") from None
        if not answer:
            code = await process.wait()
            raise WorkerFault("crashed", f"the worker ended with {_describe_exit(code)}")
        try:
            message = json.loads(answer)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise WorkerFault("crashed", f"the worker sent garbage: {answer[:80]!r}")
        return message

    async def _keep_tail(self) -> None:
        assert self._process and self._process.stderr
        while chunk := await self._process.stderr.read(4096):
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]

    async def _end_drain(self) -> None:
        if self._drain is None:
            return
        # A grandchild may hold stderr open for a moment; what the worker wrote is read by then.
        await asyncio.wait([self._drain], timeout=1.0)
        self._drain.cancel()
        await asyncio.wait([self._drain])
        self._drain = None

    def _with_tail(self, message: str) -> str:
        tail = self._tail.decode(errors="replace").strip()
        return f"{message}; its last words: {visible(tail, TAIL_BYTES)}" if tail else message


def worker_environment() -> dict[str, str]:
    """Environment variables of a worker: no key, one thread, memory kept."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # One thread a slot: on a shared machine more threads make every job slower.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # glibc hands big blocks back to the kernel at once; kept, a training step is a fifth faster.
    keep = str(1 << 30)
    return kept | threads | {"MALLOC_MMAP_THRESHOLD_": keep, "MALLOC_TRIM_THRESHOLD_": keep}


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
