"""What agent-written code costs to run in the sandbox: starting it, a session, and many at once.

    python benchmarks/sandbox.py [--sessions 20] [--together 8]

The submission is persona's starter environment; 64 conversations are scored in a call. Starting
happens once a worker; `open` to `close` is what one job pays. `together`: as many sessions open at
the same time in one sandbox, all loaded and scored once. Prints JSON; quote the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import _machine

CALL_SECONDS = 10.0
TRACES = 64


def measure(sessions: int, together: int) -> dict[str, Any]:
    """Milliseconds: the median of each part, and of everything together."""
    from metatrainer import families
    from metatrainer.sandbox.host import EnvSession, Guest

    files = {"job.toml": "", **families.get("persona").starter_files()}
    batch = [(0, _conversation(n)) for n in range(TRACES)]
    parts: dict[str, list[float]] = {}

    def timed(name: str, work: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        done = work(*arguments)
        parts.setdefault(name, []).append(1000 * (time.perf_counter() - began))
        return done

    def one(guest: Guest) -> EnvSession:
        return guest.session(files, "environment", {}, CALL_SECONDS)

    def many(guest: Guest) -> None:
        open_at_once = [one(guest) for _ in range(together)]
        for session in open_at_once:
            session.score(batch)
        for session in open_at_once:
            session.close()

    for _ in range(3):
        guest = Guest(0)
        timed("start", guest.start)
        apart = guest.apart
        for _ in range(sessions):
            session = timed("open", one, guest)
            timed("load", session.load)
            timed("score first", session.score, batch)
            timed("score", session.score, batch)
            timed("close", session.close)
        if apart:
            timed("together", many, guest)
        guest.close()
    medians = {name: round(statistics.median(values), 2) for name, values in parts.items()}
    return {"milliseconds": medians, "sessions apart": apart}


def _conversation(n: int) -> list[dict[str, Any]]:
    call = {"id": "c", "name": "lookup", "arguments": {"name": f"P{n}", "relation": "boss"}}
    return [
        {"role": "user", "content": "Who is the boss of P1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "lookup", "content": f"P{n + 1}"},
        {"role": "assistant", "content": f"P{n + 1}"},
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--together", type=int, default=8)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = measure(arguments.sessions, arguments.together)

    from metatrainer.sandbox import bwrap, cgroup

    home = cgroup.home()
    result |= {
        "together": arguments.together,
        "traces": TRACES,
        "bubblewrap": bwrap.require(),
        "control groups": home and home.version,
    }
    print(json.dumps(result | _machine.facts(), indent=2))


if __name__ == "__main__":
    main()
