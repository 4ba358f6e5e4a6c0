"""What the agent's adapter begins from: nothing, or the last checkpoint of another run.

A warm start leaves a folder like a run's, so one setting, agent.start, is for both. Knows nothing
about how either was trained.
"""

from __future__ import annotations

from pathlib import Path

from metatrainer import rundir
from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError
from metatrainer.outer import checkpoints
from metatrainer.outer.service import CHECKPOINTS

SCHEME = "tinker://"
_SAME = ("model", "backend", "lora_rank")
"""Settings of the agent that an adapter depends on."""


def check(settings: RunSettings) -> None:
    """See that agent.start is there and fits. Raises ConfigError."""
    if settings.agent.start:
        _find(settings, settings.agent.start)


def bring(settings: RunSettings, run_dir: Path) -> str | None:
    """The checkpoint to begin from, as the run's own service has it; None for a new adapter.

    In a run on this machine it is a copy, so that the run needs the other folder only once.
    Raises ConfigError.
    """
    start = settings.agent.start
    if not start:
        return None
    if settings.agent.backend == "tinker":
        return _find(settings, start)[1]
    from metatrainer.tinker.checkpoints import CheckpointStore

    own = CheckpointStore(run_dir / CHECKPOINTS)
    if copied := own.adopted():
        return copied
    folder, path = _find(settings, start)
    return own.adopt(CheckpointStore(folder / CHECKPOINTS), path)


def _find(settings: RunSettings, start: str) -> tuple[Path, str]:
    """The other run's folder and the path of its newest state."""
    if start.startswith(SCHEME):
        if settings.agent.backend != "tinker":
            raise ConfigError("agent.start: a tinker:// path is the hosted service's; give a run")
        return Path(), start
    try:
        run = rundir.find(start)
    except ConfigError as error:
        raise ConfigError(f"agent.start: {error}") from None
    for key in _SAME:
        found, wanted = getattr(run.settings.agent, key), getattr(settings.agent, key)
        if found != wanted:
            raise ConfigError(f"agent.start: {start} has agent.{key} {found!r}, not {wanted!r}")
    last = checkpoints.last(run.path / "logs", "state_path")
    if last is None:
        raise ConfigError(f"agent.start: {start} has no checkpoint yet; let it go on first")
    return run.path, str(last["state_path"])
