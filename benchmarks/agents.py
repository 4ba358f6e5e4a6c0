"""Whether a trained agent is better than it was, on families it was never trained on.

    python benchmarks/agents.py RUN [--n 64] [--families triage]

Plays the run's agent, the same model untrained, and the scripts reference and random, on the same
tasks with the same hidden items, by the run's own settings. Then exports the agent and asks peft
for the log-probabilities of recorded episodes. Prints JSON; 95 % intervals are bootstraps over
tasks, so they hold for tasks like these and not for another training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _machine

UNTRAINED = "model"
SCRIPTS = ("reference", "random")


def compare(name: str, families: list[str], n: int) -> dict[str, Any]:
    """The leaderboard, and the gain of the training on the held-out families."""
    from metatrainer import rundir
    from metatrainer.play import Played, find_agent, play_all
    from metatrainer.report import leaderboard

    settings = rundir.find(name).settings
    names = families or list(settings.heldout)
    agents = {agent: find_agent(agent, settings) for agent in (name, UNTRAINED, *SCRIPTS)}
    total, done = n * len(names) * len(agents), 0

    def count(played: Played) -> None:
        nonlocal done
        done += 1
        if done % 16 == 0:
            print(f"{done} of {total} episodes", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        played = asyncio.run(play_all(settings, agents, names, n, Path(folder), count))
    board = leaderboard.rank(played, settings.heldout)
    wanted = {name, UNTRAINED}
    gains = [d for d in board.differences if {d.first, d.second} == wanted]
    return {
        "families": names,
        "leaderboard": board.as_json(),
        "trained_beats_untrained": {
            gain.part: gain.first == name and gain.reward.low > 0 for gain in gains
        },
    }


def exported(name: str) -> dict[str, Any]:
    """How near the exported agent comes to what the run recorded."""
    from metatrainer import rundir
    from metatrainer.export import checkpoint, export

    run = rundir.find(name)
    with tempfile.TemporaryDirectory() as folder:
        done = export(run, checkpoint(run, None), Path(folder) / "agent", verified=True)
    assert done.verified is not None  # it was asked for
    return asdict(done.verified)


def main() -> None:
    """Play, export and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a finished run: its folder, or its name in runs/")
    parser.add_argument("--n", type=int, default=64, help="tasks of each family")
    parser.add_argument("--families", default="", help="the run's held-out ones")
    options = parser.parse_args()
    families = [name for name in options.families.split(",") if name]
    result = {
        "benchmark": "agents",
        "run": options.run,
        "n": options.n,
        "export": exported(options.run),
        **compare(options.run, families, options.n),
    }
    print(json.dumps(result | _machine.facts(), indent=1))


if __name__ == "__main__":
    main()
