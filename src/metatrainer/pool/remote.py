"""A worker on a rented pod as seen from the pool; asked in the same way as a WorkerProcess.

Job folders go there and results come back over ssh; a runner on the pod does the jobs, whether
anybody is connected or not. Knows nothing about what a job does or what a pod costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shlex
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metatrainer.config import RunpodSettings
from metatrainer.errors import PoolError, WorkerFault
from metatrainer.pool import deadman, jobdir, runner, source
from metatrainer.pool.base import LOST, STOPPED, JobOrder, JobResult
from metatrainer.pool.pods import Fleet
from metatrainer.pool.process import START_SECONDS, STOP_SECONDS
from metatrainer.pool.runpod_api import Pod
from metatrainer.pool.ssh import Ssh
from metatrainer.pool.worker import Setup

WAIT_SECONDS = 20
"""How long one call waits on the pod for an answer; it also says that the controller lives."""
UNREACHABLE_SECONDS = 300.0
"""A pod that cannot be reached for so long, though Runpod says that it runs, is ended."""
MAX_BACK_BYTES = 4 << 30
"""What a job may send back."""
_BACK = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", jobdir.TRAINED)


class PodWorker:
    """One pod, rented anew where it is gone."""

    def __init__(
        self,
        number: int,
        factory: str,
        setup: Setup,
        settings: RunpodSettings,
        fleet: Fleet,
        stop_seconds: float = STOP_SECONDS,
    ):
        """stop_seconds: what a request gets to end by itself before the runner is killed."""
        self._number = number
        self._factory = factory
        self._setup = setup
        self._settings = settings
        self._fleet = fleet
        self._stop_seconds = stop_seconds
        self._home = f".{fleet.slot_name(number)}"
        self._starting = asyncio.Lock()
        self._ssh: Ssh | None = None
        self._pod: str | None = None
        self._up = False
        self._killed = False
        self._found = False
        self._asked: set[str] = set()
        self._used = time.monotonic()
        self.held: list[str] = []
        """Keys of requests that its runner already had when it was found."""

    async def start(self) -> None:
        """Have a pod with a runner on it. Raises PoolError, BudgetError or ConfigError."""
        async with self._starting:
            self._used = time.monotonic()
            if self._up:
                return
            try:
                await self._start()
            except WorkerFault as fault:
                raise PoolError(fault.message) from None

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer; others may be under way. Raises WorkerFault."""
        if not self._up:
            raise WorkerFault(LOST, "its pod is gone")
        key = request_key(request)
        self._asked.add(key)
        try:
            answer = await asyncio.wait_for(self._ask(key, request), seconds)
        except TimeoutError:
            await self._stop(key)
            raise WorkerFault("timeout", f"no answer in {seconds:.0f} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._stop(key))
            raise
        except PoolError as error:  # the pod does not do what it should, whatever was asked
            await self._give_up()
            raise WorkerFault(LOST, str(error)) from None
        finally:
            self._asked.discard(key)
            self._used = time.monotonic()
        if "error" in answer:
            raise WorkerFault(LOST, answer["error"])
        return answer

    async def beat(self) -> None:
        """Tell the pod that its controller lives."""
        if self._up and self._ssh:
            with contextlib.suppress(WorkerFault, PoolError):
                await self._ssh.run(f"touch {self._home}/{deadman.BEAT}", seconds=60.0)

    async def rest(self) -> None:
        """End the pod if it has had nothing to do for long; the next start rents another."""
        idle = time.monotonic() - self._used > self._settings.idle_seconds
        if self._up and idle and not self._asked:
            await self._give_up()

    async def close(self) -> None:
        """Give up the connection; what the fleet still has is ended there."""
        self._up = False
        if self._ssh:
            await self._ssh.close()
            self._ssh = None

    # -- a runner on a pod ----------------------------------------------------------------------

    async def _start(self) -> None:
        pod = await self._fleet.ready(self._number, self._answers)
        self._pod, self._killed = pod.id, False
        try:
            await self._prepare()
            await self._start_runner()
        except (PoolError, WorkerFault):
            await self._give_up()
            raise
        self._up = True

    async def _answers(self, pod: Pod) -> bool:
        assert pod.address
        if self._ssh is None or self._ssh.address != pod.address:
            if self._ssh:
                await self._ssh.close()
            self._ssh = Ssh(f"{pod.name}.{pod.id}", pod.address, self._fleet.keys)
        try:
            await self._ssh.run("true", seconds=30.0)
        except WorkerFault:  # it says that it runs before its sshd does, or at an old port
            return False
        return True

    async def _prepare(self) -> None:
        """Bring metatrainer's source, once, and run what the settings say on a new pod."""
        text, version = source.packed()
        home, mark = self._home, f"src/.{version}"
        asked = f"mkdir -p {home}/{runner.REQUESTS} {home}/{runner.JOBS} && cd {home}"
        there = await self._run(f"{asked} && touch {deadman.BEAT} && {{ ls {mark} || true; }}")
        if there.strip():
            return
        await self._run(f"cd {home} && rm -rf src && mkdir src && tar -xz -C src", text, 300.0)
        seconds = self._settings.prepare_seconds
        prepare = f"cd {home}\n{self._settings.prepare}\ntouch {mark}"
        await self._run(f"sh -e -c {shlex.quote(prepare)}", b"", seconds)

    async def _start_runner(self) -> None:
        """Start the switch and the runner where they are not; learn what the runner has."""
        settings = self._settings
        seconds = f"{settings.deadman_seconds:g}"
        switch = f"{deadman.__name__} . {seconds} {shlex.quote(settings.url)}"
        script = _START.format(
            home=self._home,
            python=shlex.quote(settings.python),
            switch=switch,
            runner=f"{runner.__name__} . {shlex.quote(self._factory)}",
            tries=int(START_SECONDS * 10),
        )
        setup = self._setup.model_dump_json().encode() + b"\n"
        told = await self._run(script, setup, 2 * START_SECONDS)
        if not self._found:
            self._found = True
            self.held = told.decode().split()

    async def _give_up(self) -> None:
        """End the pod: it is not worth its money any more."""
        self._up = False
        pod, self._pod = self._pod, None
        await self.close()
        if pod:
            with contextlib.suppress(PoolError):  # its switch ends it, or the next sweep does
                await self._fleet.end(pod)

    # -- one request ----------------------------------------------------------------------------

    async def _ask(self, key: str, request: dict[str, Any]) -> dict[str, Any]:
        order = JobOrder.model_validate(request["order"]) if "order" in request else None
        if key in self.held:
            self.held.remove(key)
        else:
            if order:
                jobdir.claim(order)  # from here on somebody may have begun it
            await self._send(key, request, order)
        answer = await self._wait(key)
        if order:
            answer = await self._collect(order, answer)
        folders = f"{runner.REQUESTS}/{key}" + (f" {runner.JOBS}/{order.job_id}" if order else "")
        await self._run(f"cd {self._home} && rm -rf {folders}")
        return answer

    async def _send(self, key: str, request: dict[str, Any], order: JobOrder | None) -> None:
        """Put a request and its job folder on the pod; once, however often this is tried."""
        folder = f"{runner.REQUESTS}/{key}"
        files: list[tuple[str, bytes]] = []
        if order:
            there = order.model_copy(update={"job_dir": Path(runner.JOBS, order.job_id)})
            request = {**request, "order": there.model_dump(mode="json")}
            files += _job_files(order)
        files.append((f"{folder}/{runner.REQUEST}.part", json.dumps(request).encode()))
        whole = f"{folder}/{runner.REQUEST}"
        await self._run(
            f"cd {self._home} && if [ ! -e {whole} ]; then tar -xz && mv {whole}.part {whole};"
            " else cat >/dev/null; fi",
            _tar(files),
            300.0,
        )

    async def _wait(self, key: str) -> dict[str, Any]:
        """The answer to a request. Raises WorkerFault if its runner is gone."""
        script = _WAIT.format(
            home=self._home, folder=f"{runner.REQUESTS}/{key}", tries=WAIT_SECONDS * 20
        )
        while True:
            told = await self._run(script, b"", WAIT_SECONDS + 60.0)
            word, _, rest = told.partition(b"\n")
            if word == b"answer":
                try:
                    return dict(json.loads(rest))
                except ValueError:
                    raise PoolError(f"the runner answered garbage: {rest[:80]!r}") from None
            if word == b"dead":
                self._up = False
                raise self._fault(rest.decode(errors="replace").strip())

    def _fault(self, tail: str) -> WorkerFault:
        """What those are told whose runner is gone. Only one that was alone in it is to blame."""
        if self._killed:
            return WorkerFault(LOST, "its runner was killed for another request in it")
        why = "its runner ended" + (f"; its last words: {tail}" if tail else "")
        if len(self._asked) > 1:
            return WorkerFault(LOST, f"{len(self._asked)} requests were in a runner: {why}")
        return WorkerFault("crashed", why)

    async def _collect(self, order: JobOrder, answer: dict[str, Any]) -> dict[str, Any]:
        """Bring a job's adapter and result here, the result last."""
        if "result" not in answer:
            return answer
        result = JobResult.model_validate(answer["result"])
        names = " ".join(_BACK)
        script = (
            f"cd {self._home}/{runner.JOBS}/{order.job_id} && "
            f'for f in {names}; do [ -f "$f" ] && echo "$f"; done | tar -cz -T - '
        )
        packed = await self._run(f"{script} | head -c {MAX_BACK_BYTES}", b"", 1800.0)
        await asyncio.to_thread(_unpack, packed, order.job_dir)
        folder = order.job_dir / jobdir.ADAPTER
        result = result.model_copy(update={"adapter": folder if folder.is_dir() else None})
        if result.outcome not in (LOST, STOPPED):
            jobdir.write_result(order.job_dir, result)
        return {"result": result.model_dump(mode="json")}

    async def _stop(self, key: str) -> None:
        """Bring a request to its end: by asking, else by killing the runner."""
        if not self._up:
            return
        folder = f"{runner.REQUESTS}/{key}"
        script = _STOP.format(
            home=self._home, folder=folder, tries=max(1, int(self._stop_seconds * 10))
        )
        try:
            told = await self._run(script, b"", self._stop_seconds + 60.0)
        except (WorkerFault, PoolError):
            await self._give_up()
            return
        if told.strip() == b"killed":
            self._up, self._killed = False, True

    async def _run(self, script: str, given: bytes = b"", seconds: float = 120.0) -> bytes:
        """A script on the pod, tried again while the pod may come back.

        Raises WorkerFault(LOST) once it will not, PoolError if the script fails.
        """
        began = time.monotonic()
        while True:
            if self._ssh is None or self._pod is None:
                raise WorkerFault(LOST, "its pod is gone")
            try:
                return await self._ssh.run(script, given, seconds)
            except WorkerFault as fault:
                pod = await self._fleet.look(self._pod)
                if pod is None or pod.over:
                    await self._give_up()
                    raise WorkerFault(LOST, "its pod is gone") from None
                if time.monotonic() - began > UNREACHABLE_SECONDS:
                    await self._give_up()
                    raise fault
                if pod.address and pod.address != self._ssh.address:
                    await self._answers(pod)
                await asyncio.sleep(self._fleet.poll_seconds)


def request_key(request: dict[str, Any]) -> str:
    """Names a request on its pod, the same whoever asks."""
    if order := request.get("order"):
        return f"{order['job_id']}.{order['attempt']}"
    return f"baseline.{request['family']}.{request['student']}"


def job_of(key: str) -> tuple[str, int] | None:
    """The attempt at a job that a request is for; None if it is for none."""
    job, _, attempt = key.rpartition(".")
    return (job, int(attempt)) if attempt.isdigit() and not job.startswith("baseline.") else None


def _job_files(order: JobOrder) -> Iterable[tuple[str, bytes]]:
    """What a pod needs of a job's folder: the submission, and how far an attempt before it got."""
    for path in sorted(order.job_dir.rglob("*")):
        name = str(path.relative_to(order.job_dir))
        if path.is_file() and (name.startswith(f"{jobdir.FILES}/") or name in _BACK):
            yield f"{runner.JOBS}/{order.job_id}/{name}", path.read_bytes()


def _tar(files: Iterable[tuple[str, bytes]]) -> bytes:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w:gz", compresslevel=1) as tar:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return text.getvalue()


def _unpack(packed: bytes, job_dir: Path) -> None:
    """Write what came back, by our own list of names: a job may have written the archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            for name in _BACK:
                with contextlib.suppress(KeyError):
                    entry = tar.getmember(name)
                    file = tar.extractfile(entry) if entry.isreg() else None
                    if file:
                        _write(job_dir / name, file.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise PoolError(f"what came back of {job_dir.name} is broken: {error}") from None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


# A request without an answer whose runner is gone will never have one: it is forgotten.
_START = """
cd {home} && read -r setup
export PYTHONPATH="$PWD/src${{PYTHONPATH:+:$PYTHONPATH}}"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
setsid {python} -m {switch} >>deadman.log 2>&1 </dev/null &
switch=$!
if flock -n lock true; then
    rm -f ready
    for r in requests/*/; do [ -d "$r" ] && [ ! -e "$r/answer.json" ] && rm -rf "$r"; done
    printf '%s\\n' "$setup" | setsid {python} -m {runner} >>runner.log 2>&1 &
    pid=$!
fi
n=0
while [ ! -e ready ] || [ ! -e armed ]; do
    n=$((n + 1))
    if [ $n -gt {tries} ] || {{ [ -n "$pid" ] && ! kill -0 $pid 2>/dev/null; }} ||
        {{ [ ! -e armed ] && ! kill -0 $switch 2>/dev/null && [ ! -e armed ]; }}; then
        tail -c 1500 runner.log >&2
        [ -e armed ] || tail -c 500 deadman.log >&2
        exit 1
    fi
    sleep 0.1
done
ls requests
"""
_WAIT = """
cd {home} && touch beat && n=0
while [ ! -e {folder}/answer.json ]; do
    if {{ [ ! -d {folder} ] || flock -n lock true; }} && [ ! -e {folder}/answer.json ]; then
        echo dead; tail -c 1500 runner.log; exit 0
    fi
    n=$((n + 1)); [ $n -gt {tries} ] && {{ echo alive; exit 0; }}
    sleep 0.05
done
echo answer; cat {folder}/answer.json
"""
_STOP = """
cd {home} && touch {folder}/stop && n=0
while [ ! -e {folder}/answer.json ] && ! flock -n lock true; do
    n=$((n + 1))
    if [ $n -gt {tries} ]; then
        kill -9 -$(cat lock); while ! flock -n lock true; do sleep 0.05; done
        echo killed; exit 0
    fi
    sleep 0.1
done
rm -rf {folder}
"""
