"""Where a job's files for prime-rl lie, and whether prime-rl is there. Runs nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError
from metatrainer.jobs.compile import PRIME_RL_COMMIT, Target
from metatrainer.students import catalogue


def job_target(settings: RunSettings, student: str, folder: Path, slot: int) -> Target:
    """Where a job runs whose files for prime-rl are in `folder`."""
    return Target(
        model=str(catalogue.verified_folder(student)),
        job_dir=str(folder / "packages"),
        config_path=str(folder / "rl.toml"),
        output_dir=str(folder / "outputs"),
        gpus=settings.inner.gpus,
        slot=slot,
        serve=not settings.inner.warm_server,
        evaluation=settings.evaluation,
    )


def check_installed(settings: RunSettings) -> None:
    """Raises ConfigError where the programs that the settings name are not to be found."""
    for key in ("rl", "inference"):
        program = getattr(settings.inner, key)[0]
        if shutil.which(program) is None:
            raise ConfigError(
                f"inner.{key}: there is no {program!r} on the PATH; install prime-rl at commit "
                f"{PRIME_RL_COMMIT[:7]} on a machine with a GPU, or set inner.{key} to where it is"
            )
