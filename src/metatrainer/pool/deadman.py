"""The switch on a pod that ends the pod when its controller is gone: no heartbeat, no pod.

Started there as `python -m metatrainer.pool.deadman HOME SECONDS URL`. Whoever wants the pod to
live on touches HOME/beat. The pod ends itself by the key that Runpod gives every pod for itself;
the owner's key is never here. Standard library only; knows nothing about jobs.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BEAT, LOCK, ARMED = "beat", "deadman.lock", "armed"
POD, KEY = "RUNPOD_POD_ID", "RUNPOD_API_KEY"
CHECKS = 50
"""Looks at the heartbeat within the time that it may stand still."""
CALL_SECONDS = 30.0


def main(home: Path, seconds: float, url: str) -> None:
    """Watch until the pod is ended. Returns where another switch is; exits without a key."""
    lock = (home / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    given = environment()
    if not (given.get(POD) and given.get(KEY)):
        sys.exit(f"no {POD} and {KEY} in the pod's environment")
    (home / ARMED).touch()
    # A clock that jumps says nothing: what counts is how long the beat has stood still.
    seen, since = _beat(home), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(seconds / CHECKS)
        if (beat := _beat(home)) != seen:
            seen, since = beat, time.monotonic()
    while True:
        print(f"no beat for {seconds:g} s: {_end(url, given[POD], given[KEY])}", flush=True)
        time.sleep(seconds / CHECKS)


def environment() -> dict[str, str]:
    """The container's variables: an ssh session may not be given them."""
    try:
        pairs = Path("/proc/1/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        pairs = []
    return {key: value for key, _, value in (p.partition("=") for p in pairs)} | dict(os.environ)


def _beat(home: Path) -> int:
    try:
        return (home / BEAT).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _end(url: str, pod: str, key: str) -> str:
    """Ask Runpod to terminate the pod; what came of it."""
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/pods/{pod}", method="DELETE", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return str(answer.status)
    except urllib.error.URLError as error:
        return str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
