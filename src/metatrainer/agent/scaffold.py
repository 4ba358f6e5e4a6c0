"""What a workspace holds when an episode begins, and how a job file is written.

Knows nothing about episodes, policies or validation.
"""

from __future__ import annotations

from metatrainer.agent import instructions
from metatrainer.agent.task import Task
from metatrainer.agent.workspace import Workspace
from metatrainer.config import RunSettings

JOB = "job.toml"
ENVIRONMENT = "environment/__init__.py"


def make_workspace(task: Task, settings: RunSettings) -> Workspace:
    """The folder of a new episode: the instructions and the scaffold that the settings choose."""
    files = {instructions.PATH: instructions.render(task, settings)}
    if settings.agent.scaffold == "starter":
        files |= task.family.starter_files()
    return Workspace(files, readonly=[instructions.PATH])


def job_toml(
    student: str, learning_rate: str, *, batch_size: int, group_size: int, max_steps: int
) -> str:
    """A complete job file; what it leaves out has good defaults."""
    return (
        "[prime_rl]\n"
        f'model = "{student}"\n'
        f"learning_rate = {learning_rate}\n"
        f"batch_size = {batch_size}\n"
        f"group_size = {group_size}\n"
        f"max_steps = {max_steps}\n"
        "[environment]\n"
        'module = "environment"\n'
    )
