"""A worker subprocess as seen from the pool: start, ask, kill. Several requests at a time.

Knows nothing about jobs: requests and answers are JSON objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
EXIT_SECONDS = 1.0
STOP_SECONDS = 10.0
"""What a job gets to heed that it should stop: about one of its steps."""
_READY = 0
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
    "METATRAINER_HOME",
)
"""Environment variables that workers get; keys and tokens of the controller are not among them."""


class WorkerProcess:
    """One worker subprocess, restarted on demand."""

    def __init__(self, factory: str, setup: dict[str, Any], stop_seconds: float = STOP_SECONDS):
        """stop_seconds: what a request gets to end by itself before the worker is killed."""
        self._factory = factory
        self._setup = setup
        self._stop_seconds = stop_seconds
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._killed = False
        self._tail = bytearray()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        """Process id, None while no process is alive."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the subprocess if there is none, and wait until it is ready. Raises PoolError."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer; others may be under way. Raises WorkerFault.

        A request past its time, or one that is cancelled, is told to stop. If it does not, the
        worker is killed, and the other requests in it end as lost.
        """
        if self._process is None:
            raise WorkerFault("lost", "its worker is gone")
        id = next(self._ids)
        answer = self._expect(id)
        try:
            self._write(self._process, {"id": id, **request})
            given = await asyncio.wait_for(asyncio.shield(answer), seconds)
        except TimeoutError:
            await self._stop(id)
            raise WorkerFault("timeout", f"no answer in {seconds:.0f} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._stop(id))
            raise
        if "error" in given:  # not of the job itself, which would be its result
            raise WorkerFault("lost", given["error"])
        return given

    async def kill(self) -> None:
        """Kill the subprocess and its group at once. What it was asked for is lost."""
        self._killed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._gone()

    async def close(self) -> None:
        """Let an idle worker end by itself, so that it can put things away; else kill it."""
        if self._process and self._process.stdin and not self._asked:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._gone()), CLOSE_SECONDS)
        await self.kill()

    async def _start(self) -> None:
        await self._gone()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "metatrainer.pool.worker", self._factory, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            env=worker_environment(),
            start_new_session=True,
        )
        self._process, self._killed = process, False
        ready = self._expect(_READY)
        drain = asyncio.create_task(self._keep_tail(process))
        self._tasks = [drain, asyncio.create_task(self._listen(process, drain))]
        self._write(process, self._setup)
        try:
            await asyncio.wait_for(ready, START_SECONDS)
        except TimeoutError:
            await self.kill()
            raise PoolError(f"a worker is not ready in {START_SECONDS:.0f} s") from None
        except WorkerFault as fault:
            raise PoolError(f"a worker does not start: {fault.message}") from None
        except BaseException:
            await self.kill()
            raise

    def _expect(self, id: int) -> asyncio.Future[dict[str, Any]]:
        if not self._asked:
            self._tail.clear()  # what earlier requests left says nothing about this one
        self._asked[id] = asyncio.get_running_loop().create_future()
        return self._asked[id]

    def _write(self, process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
        # Requests are short and the worker always reads, so the pipe is never full for long.
        assert process.stdin
        process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _stop(self, id: int) -> None:
        """Bring a request to its end: by asking, else by killing the worker."""
        answer = self._asked.get(id)
        if answer is None or self._process is None:
            return
        self._write(self._process, {"cancel": id})
        done, _ = await asyncio.wait([answer], timeout=self._stop_seconds)
        if not done:
            await self.kill()

    async def _listen(self, process: asyncio.subprocess.Process, drain: asyncio.Task[None]) -> None:
        """Hand out answers until the worker ends, then tell those who still wait."""
        why = await self._hand_out(process)
        with contextlib.suppress(TimeoutError):  # let it end by itself: its exit code says more
            await asyncio.wait_for(process.wait(), 0.0 if why else EXIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        why = why or f"the worker ended with {_describe_exit(await process.wait())}"
        await process.wait()
        # A grandchild may hold stderr open for a moment; what the worker wrote is read by then.
        await asyncio.wait([drain], timeout=1.0)
        drain.cancel()
        self._process = None
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(self._fault(why, len(asked)))
                answer.exception()  # those who were cancelled do not ask for it

    async def _hand_out(self, process: asyncio.subprocess.Process) -> str:
        """Returns what is wrong with what the worker sent; nothing, if the pipe just closed."""
        assert process.stdout
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # the line is longer than the reader's limit
                return f"the worker sent over {LINE_BYTES} bytes"
            except ConnectionResetError:
                return ""
            if not line:
                return ""
            message = _parsed(line)
            answer = self._asked.pop(_id_of(message), None)
            if answer is None:
                return f"the worker sent garbage: {line[:80]!r}"
            if not answer.done():
                answer.set_result(message)

    def _fault(self, why: str, requests: int) -> WorkerFault:
        """What those in a worker that is gone are told. Only one that was alone is to blame."""
        if self._killed:
            return WorkerFault("lost", "its worker was killed for another request in it")
        tail = self._tail.decode(errors="replace").strip()
        why = f"{why}; its last words: {visible(tail, TAIL_BYTES)}" if tail else why
        if requests > 1:
            return WorkerFault("lost", f"{requests} requests were in a worker: {why}")
        return WorkerFault("crashed", why)

    async def _keep_tail(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        while chunk := await process.stderr.read(4096):
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]

    async def _gone(self) -> None:
        """Wait until the subprocess is gone and everybody has been told."""
        if self._tasks:
            await asyncio.wait(self._tasks)


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


def _parsed(line: bytes) -> dict[str, Any]:
    """A message of the worker; empty, if it is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _id_of(message: dict[str, Any]) -> int:
    """Which request a message answers; -1, if none."""
    if message.get("ready") is True:
        return _READY
    id = message.get("id")
    return id if isinstance(id, int) else -1
