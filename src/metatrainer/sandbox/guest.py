"""The program inside the sandbox: holds verifiers ready and keeps submissions apart.

Process 1 imports verifiers once. For each session it forks a keeper, so a session costs forks
instead of seconds. The keeper moves into user, process, mount and IPC namespaces of its own with
folders of its own, and forks the one process that runs submitted code (submission.py). It passes
requests on, watches time, memory and prints, and takes everything of its session with it when it
ends. Process 1 and keepers run no submitted code. Standard library only; the host shows this
folder inside.

Wire: process 1 gets a socket for each session over its own socket. On a session's socket, one
line a message, both ways, of bounded length. From the host: `open {json}`, `call SECONDS {json}`,
`close`. To the host: `O {json}` from the keeper, `E {json}` a failure that the keeper saw, `R ...`
a line of the submission's process as it came - not to be trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
FILTER = HERE / "filter"

MIB = 1 << 20
MAX_LINE = 32 * MIB
"""Longest line taken from a session."""
MAX_PRINTED = MIB // 4
"""A session that prints more is ended."""
KEEP_PRINTED = 4096
"""What is kept of the printed text."""
MAX_RESIDENT = 1024 * MIB
"""Memory of all processes of a session together."""
TICK = 0.05
"""Seconds between two looks at a session's memory."""

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
PR_SET_DUMPABLE, PR_CAPBSET_DROP = 4, 24
CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 63

libc = ctypes.CDLL(None, use_errno=True)
submission: Any
"""The module beside this one."""


# ---- process 1 -----------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Fork keepers for the host until it closes its end.

    arguments: folders with libraries; before them --unwalled where there is no sandbox around.
    """
    walled = arguments[0] != "--unwalled"
    sites = arguments if walled else arguments[1:]
    control = claim_control()
    set_dumpable(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path.remove(str(HERE))
    sys.path.extend(sites)
    sys.dont_write_bytecode = True
    import numpy.random
    import verifiers.v1  # noqa: F401

    numpy.random.seed(0)
    filtered = FILTER.read_bytes()
    gc.collect()
    gc.freeze()
    apart = walled and can_set_apart()
    control.send(json.dumps({"ready": True, "apart": apart}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            keep(descriptors[0], filtered, apart, walled)
        os.close(descriptors[0])
        reap()


def claim_control() -> socket.socket:
    """The socket to the host, moved away from where submitted code would look for it."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    os.close(null)
    return control


def reap() -> None:
    """Take note of processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def can_set_apart() -> bool:
    """Whether namespaces within the sandbox's can be made here; tried, not guessed."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            set_apart()
            os._exit(0)
        os._exit(1)
    # set_apart goes on in a grandchild, whose status its parent passes on.
    return os.waitpid(pid, 0)[1] == 0


# ---- namespaces ----------------------------------------------------------------------------


def set_apart(wait: bool = True) -> None:
    """Go on as process 1 of namespaces of its own. Raises OSError.

    wait: whether the process that called stays until the new one ends, with its status.
    """
    set_dumpable(True)  # else its files in /proc belong to nobody
    Path("/proc/self/oom_score_adj").write_text("1000")
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    for file, number in ids.items():
        Path("/proc/self", file).write_text(f"{number} {number} 1")
    if pid := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF if wait else 0)
    mount_own()
    drop_capabilities()
    set_dumpable(False)


def mount_own() -> None:
    """Folders that no other session sees, over those of the sandbox."""
    quiet = MS_NOSUID | MS_NODEV
    mount("proc", "/proc", quiet | MS_NOEXEC)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    mount("proc", "/proc", quiet | MS_NOEXEC | MS_RDONLY | MS_REMOUNT)
    mount("tmpfs", "/tmp", quiet, "size=64m,nr_inodes=8192,mode=700")
    mount("tmpfs", "/dev/shm", quiet, "size=16m,nr_inodes=1024,mode=700")
    mount("tmpfs", "/dev/pts", quiet | MS_RDONLY, "size=4k,mode=500")


def mount(kind: str, place: str, flags: int, options: str = "") -> None:
    done = libc.mount(kind.encode(), place.encode(), kind.encode(), flags, options.encode())
    check(done, f"mount {kind} on {place}")


def drop_capabilities() -> None:
    """Give up, for good, what a new user namespace gives."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # numbers that do not exist are refused
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def set_dumpable(dumpable: bool) -> None:
    """Without: no debugger, no reading of memory or descriptors through /proc."""
    libc.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def check(done: int, what: str) -> None:
    if done:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


# ---- the keeper ----------------------------------------------------------------------------


def keep(descriptor: int, filtered: bytes, apart: bool, walled: bool) -> NoReturn:
    """Serve one session on a socket of the host, then end with everything in it."""
    try:
        if apart:
            set_apart(wait=False)
        keeper = Keeper(Host(descriptor), filtered, walled)
        try:
            keeper.serve()
        finally:
            keeper.kill_everything()
    finally:
        os._exit(0)


class Host:
    """The socket of a session."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._rest = b""

    def read_line(self) -> bytes | None:
        """The next line, None when the host has gone."""
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            chunk = os.read(self.descriptor, MIB)
            if not chunk:
                return None
            parts.append(chunk)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def send(self, mark: bytes, message: dict[str, Any]) -> None:
        self.send_raw(mark, json.dumps(message).encode())

    def send_raw(self, mark: bytes, line: bytes) -> None:
        view = memoryview(mark + b" " + line + b"\n")
        while view:
            view = view[os.write(self.descriptor, view) :]


class Keeper:
    """One session: the process of the submission, the pipes to it and what it printed."""

    def __init__(self, host: Host, filtered: bytes, walled: bool):
        self.host = host
        self.walled = walled
        self.pid = 0
        self.filtered = filtered
        self.printed = b""
        self.printed_size = 0
        self.failed = False

    def serve(self) -> None:
        """Do what the host asks until it closes the session or goes."""
        self.host.send(b"O", {"ready": True})
        while (line := self.host.read_line()) is not None:
            verb, _, rest = line.partition(b" ")
            if verb == b"open":
                self.open(json.loads(rest))
            elif verb == b"call":
                seconds, _, body = rest.partition(b" ")
                self.call(float(seconds), body)
            elif verb == b"close":
                self.kill_everything()
                return self.host.send(b"O", {"printed": self.printed.decode(errors="replace")})

    def open(self, spec: dict[str, Any]) -> None:
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        self.prints, prints = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            submission.run((requests, answers, prints), spec, self.filtered)
        for end in (requests, answers, prints):
            os.close(end)
        self.gone = os.pidfd_open(self.pid)
        os.set_blocking(self.requests, False)

    def call(self, seconds: float, body: bytes) -> None:
        """Pass a request on and send the host the answer, or why there is none."""
        if self.failed:
            return self._fail("crash", "the session has already ended")
        deadline = time.monotonic() + seconds
        self.signal_everything(signal.SIGCONT)
        try:
            answer = self._exchange(memoryview(body + b"\n"), deadline)
        except Ended as end:
            return self._fail(end.kind, end.message)
        # Between calls a session stands still: it takes no time from others.
        self.signal_everything(signal.SIGSTOP)
        self.host.send_raw(b"R", answer)

    def _fail(self, kind: str, message: str) -> None:
        self.failed = True
        self.kill_everything()
        self.host.send(b"E", {"kind": kind, "message": message})

    def _exchange(self, request: memoryview, deadline: float) -> bytes:
        poll = select.poll()
        for end in (self.answers, self.prints, self.gone, self.host.descriptor):
            poll.register(end, select.POLLIN)
        poll.register(self.requests, select.POLLOUT)
        parts: list[bytes] = []
        size = 0
        look = time.monotonic() + TICK
        while True:
            events = dict(poll.poll(TICK * 1000))
            if self.host.descriptor in events:
                sys.exit()  # the host speaks only between calls: it has gone
            if self.requests in events:
                request = self._push(request)
                if not request:
                    poll.unregister(self.requests)
            if self.prints in events:
                self._take_prints(poll)
            if self.answers in events:
                chunk = os.read(self.answers, MIB)
                if not chunk:
                    raise Ended("crash", self._obituary())
                parts.append(chunk)
                size += len(chunk)
                if b"\n" in chunk:
                    return b"".join(parts).partition(b"\n")[0]
                if size > MAX_LINE:
                    raise Ended("protocol", f"an answer is longer than {MAX_LINE} bytes")
            elif self.gone in events:
                raise Ended("crash", self._obituary())
            now = time.monotonic()
            if now > deadline:
                raise Ended("timeout", "the time of the call is over")
            if self.walled and now > look and resident() > MAX_RESIDENT:
                raise Ended("memory", f"more than {MAX_RESIDENT // MIB} MiB of memory used")
            look = now + TICK if now > look else look

    def _push(self, request: memoryview) -> memoryview:
        try:
            return request[os.write(self.requests, request) :]
        except BlockingIOError:
            return request
        except BrokenPipeError:
            return request[len(request) :]

    def _take_prints(self, poll: select.poll) -> None:
        chunk = os.read(self.prints, 1 << 16)
        if not chunk:
            poll.unregister(self.prints)
        self.printed += chunk[: KEEP_PRINTED - len(self.printed)]
        self.printed_size += len(chunk)
        if self.printed_size > MAX_PRINTED:
            raise Ended("output", f"more than {MAX_PRINTED} bytes printed")

    def signal_everything(self, number: int) -> None:
        """Signal every other process of the namespace; without one, the session's group."""
        targets = [-1] if self.walled else [self.pid, -self.pid] if self.pid else []
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)

    def kill_everything(self) -> None:
        """Kill and reap what the session runs; forks race, so until nothing is left."""
        while True:
            self.signal_everything(signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _obituary(self) -> str:
        os.kill(self.pid, signal.SIGKILL)  # it may only have closed its pipe
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


class Ended(Exception):
    """A session has to be ended, and why."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message


def resident() -> int:
    """Bytes of memory that the other processes hold."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/status") as status:
                total += sum(
                    int(line.split()[1]) * 1024
                    for line in status
                    if line.startswith(("RssAnon:", "RssShmem:"))
                )
    return total


if __name__ == "__main__":
    # The neighbour in the folder that the host shows; found before the folder leaves the path.
    submission = importlib.import_module("submission")
    main(sys.argv[1:])
