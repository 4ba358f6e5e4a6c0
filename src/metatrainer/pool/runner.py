"""What does the jobs on a machine of its own: it outlives every connection and every controller.

Started there as `python -m metatrainer.pool.runner HOME MODULE:FACTORY`, once, with its setup on
standard input, so that nothing of it is on a command line or a disk. In HOME:

    lock                     held while a runner lives
    ready                    its body is made
    requests/<key>/request.json   what is asked; written whole
    requests/<key>/stop           its presence tells the request to stop
    requests/<key>/answer.json    the answer; its presence says that the request is over
    jobs/<id>/               job folders, as in jobdir

Knows nothing about what a job does or how requests come here.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from pathlib import Path

from metatrainer.pool import jobdir
from metatrainer.pool.worker import Body, Setup, answer, make_body

POLL_SECONDS = 0.05
LOCK, READY, REQUESTS, JOBS = "lock", "ready", "requests", "jobs"
REQUEST, STOP, ANSWER = "request.json", "stop", "answer.json"


def main(home: Path, factory: str) -> None:
    """Serve until killed. Returns at once where another runner is."""
    lock = (home / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    lock.write(str(os.getpid()))
    lock.flush()
    setup = Setup.model_validate_json(sys.stdin.buffer.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    body = make_body(factory, setup)
    (home / READY).touch()
    serve(body, home / REQUESTS)


def serve(body: Body, requests: Path) -> None:
    """Take up requests as they come, each in a thread of its own."""
    stops: dict[str, threading.Event] = {}
    while True:
        there = list(requests.iterdir())
        # One that was collected may be asked again.
        stops = {folder.name: stops[folder.name] for folder in there if folder.name in stops}
        for folder in there:
            if folder.name not in stops and (folder / REQUEST).exists():
                stop = stops[folder.name] = threading.Event()
                threading.Thread(target=_do, args=(body, folder, stop), daemon=True).start()
            elif folder.name in stops and (folder / STOP).exists():
                stops[folder.name].set()
        time.sleep(POLL_SECONDS)


def _do(body: Body, folder: Path, stop: threading.Event) -> None:
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    jobdir.write_durably(folder / ANSWER, json.dumps(answer(body, request, stop)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
