"""The trusted side of the sandbox: start one, run submissions in it, replace it when it breaks.

Knows the wire of guest.py and believes none of it: every answer is checked for shape and size.
Knows nothing about what a good submission is. Not thread-safe; one session at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from metatrainer.errors import EnvError, SandboxUnavailable
from metatrainer.sandbox import bwrap

T = TypeVar("T")

GUEST_FILE = Path(__file__).with_name("guest.py")
GUEST_AT = "/guest.py"

START_SECONDS = 120.0
"""The first import of verifiers may have to compile it."""
GRACE_SECONDS = 2.0
"""How much later than its own deadline a guest may answer before it is replaced."""
CLOSE_SECONDS = 5.0
MAX_ANSWER = 33 << 20
MAX_FILES = 64
MAX_FILES_SIZE = 1 << 20
MAX_MESSAGE = 400
"""Characters kept of a message that comes from a submission."""
KINDS = ("import", "load", "reward", "timeout", "memory", "crash", "output", "protocol")

# A sandbox dies with the thread that started it (PR_SET_PDEATHSIG), so all are started by one
# thread that lives as long as the process.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")


@dataclass(frozen=True)
class TaskRow:
    """One task of a submission."""

    prompt: str
    system_prompt: str | None
    data: dict[str, Any]
    """The fields that the submission's data class adds, world and answer among them."""
    key: str
    """The task's own key where the submission defines one, else a hash of its content."""


@dataclass(frozen=True)
class Scored:
    """The reward of one conversation, or why there is none."""

    reward: float | None
    error: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Each reward by name, before its weight."""
    file: str | None = None
    line: int | None = None


class Guest:
    """One warm sandbox. A broken one is replaced on the next use; `start` may be called early."""

    def __init__(self, slot: int = 0):
        self.slot = slot
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._ready = False
        self._rest = b""
        self._session: EnvSession | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the sandbox outside; another one after it was replaced."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the sandbox and wait until it is warm. Raises SandboxUnavailable."""
        if self._process is None or self._process.poll() is not None:
            self._spawn()
        if not self._ready:
            self._wait_ready()

    def session(
        self, files: dict[str, str], module: str, args: dict[str, Any], seconds: float
    ) -> EnvSession:
        """Open a session on a submitted folder. Nothing of it is run before `load`.

        seconds: the longest that one call of the session may take.
        """
        if self._session is not None:
            raise RuntimeError("a guest holds one session at a time; close the other one first")
        check_files(files)
        self.start()
        spec = {"files": files, "module": module, "args": args}
        self._own(b"open " + json.dumps(spec).encode(), CLOSE_SECONDS)
        self._session = EnvSession(self, seconds)
        return self._session

    def close(self) -> None:
        """End the sandbox and whatever runs in it."""
        self._kill()

    def __enter__(self) -> Guest:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, session: EnvSession, body: bytes, seconds: float) -> bytes:
        """Pass a request to the session's process and return its line. Raises EnvError."""
        if self._session is not session:
            raise EnvError("crash", "the session's sandbox was replaced; open a new session")
        line = self._exchange(b"call %.3f " % seconds + body, seconds + GRACE_SECONDS)
        if line[:2] == b"E ":
            _raise(json.loads(line[2:]))
        return line[2:]

    def end_session(self, session: EnvSession) -> str:
        """Clean up after the session; replaces the sandbox where that fails."""
        if self._session is not session:
            return ""
        self._session = None
        try:
            return clean(self._own(b"close", CLOSE_SECONDS)["printed"], limit=4096)
        except EnvError:
            return ""

    def _own(self, line: bytes, seconds: float) -> dict[str, Any]:
        reply = self._exchange(line, seconds)
        if reply[:2] != b"O ":
            self._spawn()
            raise EnvError("protocol", "the sandbox answered out of turn and was replaced")
        answer: dict[str, Any] = json.loads(reply[2:])
        return answer

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and read one, or replace the sandbox and raise EnvError."""
        deadline = time.monotonic() + seconds
        try:
            self._send(memoryview(line + b"\n"), deadline)
            return self._receive(deadline)
        except TimeoutError:
            self._spawn()
            raise EnvError("timeout", "no answer in time; the sandbox was replaced") from None
        except OSError:
            self._spawn()
            raise EnvError("crash", "the sandbox broke and was replaced") from None

    def _send(self, view: memoryview, deadline: float) -> None:
        pipe = self._process.stdin.fileno()  # type: ignore[union-attr]
        while view:
            _wait(pipe, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(pipe, view) :]

    def _receive(self, deadline: float) -> bytes:
        pipe = self._process.stdout.fileno()  # type: ignore[union-attr]
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            _wait(pipe, select.POLLIN, deadline)
            chunk = os.read(pipe, 1 << 20)
            size += len(chunk)
            if not chunk or size > MAX_ANSWER:
                raise BrokenPipeError
            parts.append(chunk)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _spawn(self) -> None:
        """Start a sandbox in place of the one there is; it warms up while the caller goes on."""
        bwrap.require()
        self._kill()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (_kill closes it)
        self._process = _STARTER.submit(self._popen).result()
        os.set_blocking(self._process.stdin.fileno(), False)  # type: ignore[union-attr]

    def _popen(self) -> subprocess.Popen[bytes]:
        runtime = bwrap.runtime()
        program = [runtime.python, "-s", "-P", "-S", "-B", GUEST_AT, *runtime.sites]
        shown = {GUEST_AT: GUEST_FILE.read_bytes()}
        with bwrap.command(program, slot=self.slot, data=shown) as (argv, descriptors):
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=descriptors,
                bufsize=0,
                cwd="/",
                start_new_session=True,  # an interrupt at the terminal is for us alone
            )

    def _wait_ready(self) -> None:
        try:
            line = self._receive(time.monotonic() + START_SECONDS)
        except (TimeoutError, OSError):
            line = b""
        if not line.startswith(b'O {"ready"'):
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode(errors="replace").strip()
            self._kill()
            raise SandboxUnavailable(
                f"the sandbox did not come up: {said or 'no message'}; "
                "is verifiers installed? pip install verifiers"
            )
        self._ready = True

    def _kill(self) -> None:
        process, self._process = self._process, None
        self._session, self._ready, self._rest = None, False, b""
        if process is not None:
            process.kill()
            process.wait()
            pipes: tuple[Any, ...] = (process.stdin, process.stdout, self._errors)
            for pipe in pipes:
                pipe.close()


class EnvSession:
    """One submission in a guest. Use as a context manager; closing removes every trace of it."""

    def __init__(self, guest: Guest, seconds: float):
        self._guest = guest
        self._seconds = seconds
        self._ids = itertools.count()
        self._tasks: int | None = None
        self._open = True
        self.printed = ""
        """The start of what the submission printed; known once the session is closed."""

    def __enter__(self) -> EnvSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, limit: int = 4096) -> list[TaskRow]:
        """Import the package and build its tasks, `limit` at most. Raises EnvError."""
        value = self._request("load", limit=limit)
        rows = _checked(value, _task_row)
        self._tasks = len(rows)
        return rows

    def score(self, batch: Iterable[tuple[int, list[dict[str, Any]]]]) -> list[Scored]:
        """Reward each (task index, conversation of OpenAI-style messages), in order.

        A reward that fails spoils only its own row. Raises EnvError if the whole call failed.
        """
        pairs = list(batch)
        if self._tasks is None:
            self.load()
        for index, _ in pairs:
            if not 0 <= index < (self._tasks or 0):
                raise IndexError(f"task {index} of {self._tasks}")
        scored = _checked(self._request("score", batch=pairs), _scored)
        if len(scored) != len(pairs):
            raise EnvError("protocol", f"{len(scored)} rewards for {len(pairs)} conversations")
        return scored

    def close(self) -> None:
        if self._open:
            self._open = False
            self.printed = self._guest.end_session(self)

    def _request(self, op: str, **fields: Any) -> Any:
        if not self._open:
            raise RuntimeError("the session is closed")
        number = next(self._ids)
        # The submission is interrupted a little before it is killed, to learn where it was.
        soft = 0.8 * self._seconds
        body = json.dumps({"id": number, "op": op, "seconds": soft, **fields}).encode()
        reply = _parse(self._guest.call(self, body, self._seconds))
        if not isinstance(reply, dict) or reply.get("id") != number:
            raise EnvError("protocol", "the environment wrote into the trainer's pipe")
        if "error" in reply:
            _raise(reply["error"])
        return reply.get("value")


def check_files(files: dict[str, str]) -> None:
    """Refuse paths that leave the folder and folders that are too large. Raises EnvError."""
    for name in files:
        path = PurePosixPath(name)
        parts_ok = path.parts and not path.is_absolute() and ".." not in path.parts
        if not parts_ok or "\0" in name or len(name) > 200:
            raise EnvError("import", f"{clean(name, 80)!r} is not a path inside the folder")
    try:
        size = sum(len(text.encode()) for text in files.values())
    except UnicodeEncodeError:
        raise EnvError("import", "a file holds characters that are no text in UTF-8") from None
    if len(files) > MAX_FILES or size > MAX_FILES_SIZE:
        raise EnvError(
            "import",
            f"{len(files)} files, {size} bytes; at most {MAX_FILES} files, {MAX_FILES_SIZE} bytes",
        )


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """Text of a submission made safe to show: control characters escaped, cut to `limit`."""
    text = str(text)[: 2 * limit]
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _wait(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise EnvError("protocol", "the environment wrote into the trainer's pipe") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _raise(error: Any) -> NoReturn:
    """Raise what the guest or its child reports, as an EnvError."""
    if not isinstance(error, dict) or error.get("kind") not in KINDS:
        raise EnvError("protocol", "the environment wrote into the trainer's pipe")
    raise EnvError(error["kind"], clean(error.get("message", "")), *_place(error))


def _place(error: dict[str, Any]) -> tuple[str | None, int | None]:
    file, line = error.get("file"), error.get("line")
    return (
        clean(file, 200) if isinstance(file, str) else None,
        line if isinstance(line, int) else None,
    )


def _checked(value: Any, build: Callable[[Any], T]) -> list[T]:
    try:
        if not isinstance(value, list):
            raise TypeError
        return [build(item) for item in value]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise EnvError("protocol", "the environment answered something else than asked") from None


def _task_row(item: dict[str, Any]) -> TaskRow:
    prompt, system, data = item["prompt"], item["system_prompt"], item["data"]
    if not (isinstance(prompt, str) and isinstance(data, dict)):
        raise TypeError
    if not isinstance(system, str | None):
        raise TypeError
    key = item["key"]
    if not isinstance(key, str):
        content = json.dumps([prompt, system, data], sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return TaskRow(prompt, system, data, key)


def _scored(item: dict[str, Any]) -> Scored:
    error = item["error"]
    if error is not None:
        return Scored(None, clean(error["message"]), {}, *_place(error))
    reward = float(item["reward"])
    parts = {str(name): float(value) for name, value in item["parts"].items()}
    if not math.isfinite(reward):
        return Scored(None, f"the reward is {reward}, not a finite number", parts)
    return Scored(reward, None, parts)
