"""What `metatrainer train --dry-run` prints: the plan of a run, for people or as JSON.

Knows nothing about how the plan comes about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from metatrainer.config import RunSettings
from metatrainer.forecast import Forecast, Range, forecast


def print_forecast(settings: RunSettings, as_json: bool) -> None:
    """Print the plan of a run with these settings."""
    plan = forecast(settings)
    print(json.dumps(plan.as_json(), indent=2) if as_json else "\n".join(lines(plan)))


def lines(plan: Forecast) -> Iterator[str]:
    """The plan, line by line."""
    agent = plan.agent
    yield f"agent     {agent['model']} ({agent['backend']}), adapter of rank {agent['lora_rank']}"
    for student in plan.students:
        size = f"{student['parameters'] / 1e6:,.1f} M parameters"
        yield f"student   {student['name']}: {size}, from {student['from']}"
    rest = {key: value for key, value in plan.pool.items() if key not in ("kind", "slots")}
    yield f"pool      {plan.pool['kind']}, {plan.pool['slots']} jobs at a time"
    yield from (f"          {key}: {_plain(value)}" for key, value in rest.items())
    episodes = ", ".join(f"{n} {phase}" for phase, n in plan.episodes.items())
    yield f"episodes  {sum(plan.episodes.values()):,}: {episodes}"
    yield f"jobs      {_range(plan.jobs)}, each {_range(plan.job_seconds)} s"
    yield f"hours     {_range(plan.hours, 1)} of the pool at work"
    for kind, amount in plan.tokens.items():
        yield f"tokens    {_range(amount.times(1e-6), 1)} million {kind}"
    for kind, amount in plan.usd.items():
        yield f"USD       {_range(amount, 2)} {kind}"
    for cap, value in plan.caps.items():
        yield f"cap       {cap} {value:g}"
    yield from (f"rests on  {text}" for text in plan.rests_on)
    for command in plan.commands:
        yield f"\n# {command.what}\n{command.command}"
        if command.body:
            yield "\n".join(f"    {line}" for line in command.body.splitlines())


def _range(amount: Range, digits: int = 0) -> str:
    low, high = (f"{value:,.{digits}f}" for value in (amount.low, amount.high))
    return low if low == high else f"{low} to {high}"


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
