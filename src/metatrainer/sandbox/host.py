"""The trusted side of the sandbox: start one, run submissions in it, replace it when it breaks.

Knows the wire of guest.py and believes none of it: every answer is checked for shape and size.
Knows nothing about what a good submission is.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from metatrainer.errors import EnvError, SandboxUnavailable
from metatrainer.sandbox import bwrap, cgroup, seccomp, unwalled
from metatrainer.sandbox.unwalled import has_walls
from metatrainer.shown import one_line, visible

T = TypeVar("T")

GUEST_FILES = [Path(__file__).with_name(name) for name in ("guest.py", "submission.py")]
GUEST_AT = "/guest"

START_SECONDS = 120.0
"""The first import of verifiers may have to compile it."""
GRACE_SECONDS = 2.0
"""How much later than its own deadline a guest may answer before it is replaced."""
OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
MAX_ANSWER = 33 << 20
MAX_FILES = 64
MAX_FILES_SIZE = 1 << 20
MAX_PRINTED = 4096
MAX_PARTS = 64
"""Rewards and metrics of one conversation by name."""
MAX_MESSAGE = 400
"""Characters kept of a message that comes from a submission."""
KINDS = ("import", "load", "reward", "timeout", "memory", "crash", "output", "protocol")

CREDENTIALS = struct.Struct("iII")
"""pid, uid, gid of a sender, as the kernel vouches for them."""

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
    """One warm sandbox and any number of sessions in it, at the same time.

    Opening a session costs some milliseconds: process 1 of the sandbox, which has imported
    verifiers, forks it. Each session has user, process, mount and IPC namespaces, folders, limits
    and a socket of its own; neither sees, signals, changes or outlives another, and one that
    breaks is lost alone. Where the kernel or its security module refuses such namespaces
    (`apart` is False), there is one session at a time, and its sandbox is replaced after it.

    Sessions may be opened and used by several threads, each session by one at a time: a call
    waits for its own session only. A sandbox that broke is replaced when the next session is
    opened; `start` may be called early.

        with Guest(slot) as guest:
            sessions = [guest.session(files, "environment", {}, 10) for files in jobs]
    """

    def __init__(self, slot: int = 0, unsafe: bool = False):
        """unsafe: whether to go on without a sandbox where none can be had."""
        self.slot = slot
        self.unsafe = unsafe
        self.apart = True
        """Whether sessions have namespaces of their own; known once started."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors: Any = None
        self._folder: Path | None = None
        """Where the guest lies if it has no sandbox around it."""
        self._ready = False
        self._alone: EnvSession | None = None
        """The one session, where sessions cannot be set apart."""

    @property
    def pid(self) -> int | None:
        """Process id of the sandbox outside; another one after it was replaced."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the sandbox and wait until it is warm. Raises SandboxUnavailable."""
        with self._lock:
            self._start()

    def session(
        self, files: dict[str, str], module: str, args: dict[str, Any], seconds: float
    ) -> EnvSession:
        """Open a session on a submitted folder. Nothing of it is run before `load`.

        seconds: the longest that one call of the session may take.
        """
        check_files(files)
        spec = json.dumps({"files": files, "module": module, "args": args}).encode()
        with self._lock:
            if self._alone is not None:
                raise RuntimeError("this sandbox holds one session at a time; close the other one")
            try:
                channel = self._open()
            except OSError:  # it broke since it was last used
                self._kill()
                channel = self._open()
            session = EnvSession(self, channel, seconds)
            self._alone = None if self.apart else session
        session.send(b"open " + spec)
        return session

    def ended(self, session: EnvSession) -> None:
        """Told by a session that it is closed."""
        with self._lock:
            if self._alone is session:
                self._spawn()  # it warms up while the caller goes on

    def close(self) -> None:
        """End the sandbox and whatever runs in it."""
        with self._lock:
            self._kill()
        cgroup.remove_left()

    def __enter__(self) -> Guest:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Channel:
        """A channel to the keeper of a new session. Raises OSError if the sandbox is broken."""
        self._start()
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            socket.send_fds(self._control, [b"open"], [theirs.fileno()])  # type: ignore[arg-type]
        channel = Channel(ours)
        try:
            channel.greet(time.monotonic() + OPEN_SECONDS)
        except OSError:
            channel.close()
            raise
        return channel

    def _start(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._spawn()
        if not self._ready:
            self._wait_ready()

    def _spawn(self) -> None:
        """Start a sandbox in place of the one there is, without waiting for it."""
        walled = has_walls(self.unsafe)
        self._kill()
        self._folder = None if walled else Path(tempfile.mkdtemp(prefix="metatrainer-"))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (_kill closes it)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _STARTER.submit(self._popen, theirs).result()

    def _popen(self, control: socket.socket) -> subprocess.Popen[bytes]:
        files = {path.name: path.read_bytes() for path in GUEST_FILES}
        files["filter"] = seccomp.program(session=True)
        if self._folder is not None:
            return self._run(control, unwalled.command(self._folder, files), ())
        runtime = bwrap.runtime()
        program = [runtime.python, "-s", "-S", "-B", f"{GUEST_AT}/guest.py", *runtime.sites]
        shown = {f"{GUEST_AT}/{name}": content for name, content in files.items()}
        with bwrap.command(program, slot=self.slot, data=shown) as (argv, descriptors):
            return self._run(control, argv, descriptors)

    def _run(
        self, control: socket.socket, argv: list[str], descriptors: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            stdin=control.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=descriptors,
            cwd="/",
            start_new_session=True,  # an interrupt at the terminal is for us alone
        )

    def _wait_ready(self) -> None:
        control: socket.socket = self._control  # type: ignore[assignment]
        control.settimeout(START_SECONDS)
        try:
            ready = json.loads(control.recv(4096) or b"{}")
        except OSError:
            ready = {}
        if not ready:
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode(errors="replace").strip()
            self._kill()
            raise SandboxUnavailable(
                f"the sandbox did not come up: {said or 'no message'}; "
                "is verifiers installed? pip install verifiers"
            )
        self._ready, self.apart = True, ready["apart"]

    def _kill(self) -> None:
        process, self._process = self._process, None
        self._alone, self._ready = None, False
        if process is not None:
            process.kill()
            process.wait()
            self._control.close()  # type: ignore[union-attr]
            self._errors.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Channel:
    """The socket of a session and the control group of what is at its other end."""

    def __init__(self, ours: socket.socket):
        self._socket = ours
        self._socket.setblocking(False)
        self._rest = b""
        self._group: cgroup.Group | None = None

    def greet(self, deadline: float) -> None:
        """Wait for the keeper and put it into a group before it starts anything."""
        _wait(self._socket, select.POLLIN, deadline)
        size = socket.CMSG_SPACE(CREDENTIALS.size)
        line, ancillary, _, _ = self._socket.recvmsg(4096, size)
        if not line.startswith(b"O ") or not ancillary:
            raise ConnectionError("no keeper")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        pid, _, _ = CREDENTIALS.unpack(ancillary[0][2])
        self._group = cgroup.limit(pid)

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and read one. Raises EnvError."""
        deadline = time.monotonic() + seconds
        try:
            self.send(line, deadline)
            return self._receive(deadline)
        except TimeoutError:
            self._hang_up()
            raise EnvError("timeout", "no answer in time; the session was ended") from None
        except OSError:
            self._hang_up()
            raise EnvError("crash", "the sandbox broke; open a new session") from None

    def send(self, line: bytes, deadline: float) -> None:
        """Raises OSError."""
        view = memoryview(line + b"\n")
        while view:
            _wait(self._socket, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[self._socket.send(view) :]

    def close(self) -> None:
        """Hang up: what is at the other end ends."""
        self._socket.close()
        if self._group is not None:
            cgroup.remove(self._group)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self, deadline: float) -> bytes:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            _wait(self._socket, select.POLLIN, deadline)
            chunk = self._socket.recv(1 << 20)
            size += len(chunk)
            if not chunk or size > MAX_ANSWER:
                raise BrokenPipeError
            parts.append(chunk)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line


class EnvSession:
    """One submission in a guest. Use as a context manager; closing removes every trace of it."""

    def __init__(self, guest: Guest, channel: Channel, seconds: float):
        self._guest = guest
        self._channel = channel
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

    def send(self, line: bytes) -> None:
        """Pass a line on that has no answer; that the session broke shows at the next call."""
        with contextlib.suppress(OSError):
            self._channel.send(line, time.monotonic() + OPEN_SECONDS)

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
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(EnvError):
            reply = self._channel.exchange(b"close", CLOSE_SECONDS)
            self.printed = visible(json.loads(reply[2:])["printed"], MAX_PRINTED)
        self._channel.close()
        self._guest.ended(self)

    def _request(self, op: str, **fields: Any) -> Any:
        if not self._open:
            raise RuntimeError("the session is closed")
        number = next(self._ids)
        # The submission is interrupted a little before it is killed, to learn where it was.
        soft = 0.8 * self._seconds
        body = json.dumps({"id": number, "op": op, "seconds": soft, **fields}).encode()
        line = self._channel.exchange(
            b"call %.3f " % self._seconds + body, self._seconds + GRACE_SECONDS
        )
        if line[:2] == b"E ":
            _raise(json.loads(line[2:]))
        reply = _parse(line[2:])
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
            raise EnvError("import", f"{one_line(name, 80)!r} is not a path inside the folder")
    try:
        size = sum(len(text.encode()) for text in files.values())
    except UnicodeEncodeError:
        raise EnvError("import", "a file holds characters that are no text in UTF-8") from None
    if len(files) > MAX_FILES or size > MAX_FILES_SIZE:
        raise EnvError(
            "import",
            f"{len(files)} files, {size} bytes; at most {MAX_FILES} files, {MAX_FILES_SIZE} bytes",
        )


def _wait(pipe: socket.socket, event: int, deadline: float) -> None:
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
    raise EnvError(error["kind"], _message(error), *_place(error))


def _message(error: dict[str, Any]) -> str:
    return visible(str(error.get("message", "")), MAX_MESSAGE)


def _place(error: dict[str, Any]) -> tuple[str | None, int | None]:
    file, line = error.get("file"), error.get("line")
    return (
        one_line(file, 200) if isinstance(file, str) else None,
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
        return Scored(None, _message(error), {}, *_place(error))
    reward = float(item["reward"])
    parts = {one_line(str(name), 80): float(value) for name, value in item["parts"].items()}
    if len(parts) > MAX_PARTS or not all(map(math.isfinite, parts.values())):
        raise ValueError
    if not math.isfinite(reward):
        return Scored(None, f"the reward is {reward}, not a finite number", parts)
    return Scored(reward, None, parts)
