"""A stand-in for Runpod on the loopback: the calls of its API that a pool makes, with their faults.

Its pods are real sshds of this user, each with a folder of its own, under a keeper that ends all
that was started on the pod when the pod ends. As a program it serves until its input closes; the
controller's side of the tests is tests/pool/test_runpod.py.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from metatrainer.inner import keeper

OWNER_KEY = "owner-key"
CHEAP, DEAR, RARE = "NVIDIA A40", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
PRICES = {CHEAP: 0.5, RARE: 1.0, DEAR: 3.0}
FIELDS = {"name", "image", "cloud", "gpu", "disk", "ports", "env", "mounts", "dataCenterIds"}
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
START_SECONDS = 20.0


@dataclass
class FakePod:
    """A pod; its sshd runs from the start."""

    id: str
    name: str
    gpu: str
    count: int
    folder: Path
    public_key: str
    began: float
    port: int = 0
    said_port: int | None = None
    """The port that the API tells, if it is not the true one."""
    status: str = "PROVISIONING"
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def usd_per_hour(self) -> float:
        return PRICES[self.gpu] * self.count

    def as_json(self) -> dict[str, Any]:
        port = self.said_port or self.port
        direct = {"host": "127.0.0.1", "port": port, "username": _user()}
        return {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "cost": self.usd_per_hour,
            "gpu": {"id": self.gpu, "count": self.count},
            "ssh": {"direct": direct if self.status == "RUNNING" else None},
            "image": "ignored",
        }


@dataclass
class FakeRunpod:
    """The account. Faults are set from outside, at any time."""

    root: Path
    url: str = ""
    pods: dict[str, FakePod] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    """Names of all pods that were ever rented."""
    ended: list[FakePod] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], Any]] = field(default_factory=list)
    """Status, headers and body of the next answers, in place of the true ones."""
    lost_creates: int = 0
    """So many creates come through, and are answered with 502."""
    no_stock: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    """Names of pods that stay PROVISIONING."""
    stale: set[str] = field(default_factory=set)
    """Names of pods whose port is told wrong the first time."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment of all pods."""
    credit: bool = True
    pod_keys: bool = True
    """Whether pods are given a key of their own."""
    _ids: Iterator[int] = field(default_factory=itertools.count)

    # -- what tests do to pods --------------------------------------------------------------

    def by_name(self, end: str) -> FakePod:
        """The pod whose name ends so."""
        (pod,) = [pod for pod in self.pods.values() if pod.name.endswith(end)]
        return pod

    def vanish(self, pod: FakePod) -> None:
        """Take a pod away with all that runs on it, as the service does without credit."""
        self.pods.pop(pod.id, None)
        self.ended.append(pod)
        _end(pod)

    def move(self, pod: FakePod, *, new_key: bool = False) -> None:
        """Have its sshd listen elsewhere; what else runs on the pod goes on."""
        assert pod.sshd
        _stop_listening(pod)
        if new_key:
            _make_key(pod.folder / "host_key")
        _listen(pod, beside=True)

    def close(self) -> None:
        for pod in list(self.pods.values()):
            self.vanish(pod)

    # -- the service --------------------------------------------------------------------------

    def app(self) -> Starlette:
        routes = [
            Route("/catalog/gpus", self._gpus),
            Route("/pods", self._list),
            Route("/pods", self._create, methods=["POST"]),
            Route("/pods/{id}", self._terminate, methods=["DELETE"]),
            Route("/billing/pods", self._billing),
        ]
        return Starlette(routes=routes)

    def _refused(self, request: Request, pod: str = "") -> Response | None:
        self.calls.append(f"{request.method} {request.url.path}")
        if self.answers:
            status, headers, body = self.answers.pop(0)
            return JSONResponse(body, status, headers)
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key == OWNER_KEY or (pod and key == pod_key(pod)):
            return None
        return JSONResponse({"title": "Unauthorized", "detail": "invalid api key"}, 401)

    def _gpus(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        query = dict(request.query_params)
        assert query == {"include": "AVAILABILITY", "product": "POD", "cloud": "SECURE"}
        rows = [
            {
                "id": id,
                "name": id,
                "availability": "NONE" if id == RARE else "HIGH",
                "price": {"secure": usd},
            }
            for id, usd in PRICES.items()
        ]
        return JSONResponse({"gpus": rows})

    def _list(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        pods = [pod.as_json() for pod in self.pods.values()]
        for pod in self.pods.values():  # the next look sees it one step on
            pod.said_port = None
            if pod.status == "PROVISIONING" and pod.name not in self.stuck:
                pod.status = "RUNNING"
                if pod.name in self.stale:
                    self.stale.discard(pod.name)
                    pod.said_port = _free_port()
        return JSONResponse({"pods": pods})

    async def _create(self, request: Request) -> Response:
        body = await request.json()
        if refused := self._refused(request):
            return refused
        if unknown := set(body) - FIELDS:
            return JSONResponse({"detail": f"unknown field {sorted(unknown)[0]}"}, 422)
        if not self.credit:
            return JSONResponse({"detail": "Your account balance is too low"}, 400)
        gpu = body["gpu"]["id"]
        if gpu in self.no_stock:
            return JSONResponse({"error": "There are no longer any instances available"}, 400)
        assert body["ports"] == ["22/tcp"] and list(body["env"]) == ["PUBLIC_KEY"]
        pod = self._rent(body["name"], gpu, body["gpu"]["count"], body["env"]["PUBLIC_KEY"])
        if self.lost_creates:
            self.lost_creates -= 1
            return JSONResponse({"detail": "bad gateway"}, 502)
        return JSONResponse(pod.as_json(), 201)

    def _rent(self, name: str, gpu: str, count: int, public_key: str) -> FakePod:
        id = f"pod{next(self._ids)}"
        folder = self.root / id
        folder.mkdir(parents=True)
        pod = FakePod(id, name, gpu, count, folder, public_key, time.time())
        self.pods[id] = pod
        self.created.append(name)
        _make_key(folder / "host_key")
        environment = {
            "RUNPOD_POD_ID": id,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **self.variables,
        }
        if self.pod_keys:
            environment["RUNPOD_API_KEY"] = pod_key(id)
        (folder / "environment").write_text(
            "".join(f"export {key}='{value}'\n" for key, value in environment.items())
        )
        _listen(pod)
        return pod

    def _terminate(self, request: Request) -> Response:
        id = request.path_params["id"]
        if refused := self._refused(request, id):
            return refused
        pod = self.pods.pop(id, None)
        if pod is None:
            return JSONResponse({"detail": "no such pod"}, 404)
        # It may be the pod that asks: answer before it is gone.
        threading.Thread(target=self.vanish, args=(pod,)).start()
        return Response(status_code=204)

    def _billing(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        id = request.query_params["podId"]
        known = [*self.pods.values(), *self.ended]
        rows = [{"podId": pod.id, "totalAmount": pod.usd_per_hour} for pod in known if pod.id == id]
        return JSONResponse({"records": rows, "metadata": {"totals": {}}})


@contextmanager
def serving(root: Path) -> Iterator[FakeRunpod]:
    """The service, until the context ends; no pod outlives it."""
    fake = FakeRunpod(root)
    port = _free_port()
    server = uvicorn.Server(
        uvicorn.Config(fake.app(), host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{port}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()
        fake.close()


def pod_key(id: str) -> str:
    """The key that a pod has for itself."""
    return f"key-of-{id}"


def _listen(pod: FakePod, beside: bool = False) -> None:
    """Start the pod's sshd. beside: where one has run before, whose sessions go on."""
    pod.port = _free_port()
    (pod.folder / "home").mkdir(exist_ok=True)
    (pod.folder / "authorized_keys").write_text(pod.public_key + "\n")
    login = pod.folder / "login"
    login.write_text(
        f'. {pod.folder}/environment\ncd {pod.folder}/home && exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    config = {
        "Port": pod.port,
        "ListenAddress": "127.0.0.1",
        "HostKey": pod.folder / "host_key",
        "AuthorizedKeysFile": pod.folder / "authorized_keys",
        "PidFile": pod.folder / "sshd.pid",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "StrictModes": "no",
        "UsePAM": "no",
        "MaxStartups": "100",
        "SetEnv": f"HOME={pod.folder}/home",
        "ForceCommand": f"sh {login}",
    }
    path = pod.folder / "sshd_config"
    path.write_text("".join(f"{key} {value}\n" for key, value in config.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # Debian's own service would make it
    if not beside:
        # The keeper ends whatever was started from a session, in any group, with the pod.
        stay = f"{SSHD} -D -f {path} -E {pod.folder}/log & sleep 1000000"
        pod.sshd = subprocess.Popen(
            [sys.executable, "-P", keeper.__file__, str(os.getpid()), "sh", "-c", stay],
            stderr=subprocess.DEVNULL,
        )
    else:
        subprocess.run([SSHD, "-f", str(path), "-E", f"{pod.folder}/log"], check=True)
    deadline = time.monotonic() + START_SECONDS
    while not _listens(pod.port):
        assert time.monotonic() < deadline, (pod.folder / "log").read_text()
        time.sleep(0.01)


def _stop_listening(pod: FakePod) -> None:
    """End the sshd that listens, and the sessions' sshds; what they have started goes on."""
    listener = int((pod.folder / "sshd.pid").read_text())
    for pid in (listener, *_children(listener)):
        os.kill(pid, signal.SIGKILL)
    while _listens(pod.port):
        time.sleep(0.01)


def _end(pod: FakePod) -> None:
    if pod.sshd:
        for pid in keeper.descendants(pod.sshd.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        pod.sshd.terminate()
        pod.sshd.wait()
    # A daemon that was moved is not the keeper's; its sessions end with the port.
    path = pod.folder / "sshd.pid"
    if path.exists():
        try:
            pid = int(path.read_text())
            for each in (pid, *keeper.descendants(pid)):
                os.kill(each, signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            pass
    shutil.rmtree(pod.folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _make_key(path: Path) -> None:
    path.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
