"""The Tinker service that trains a run's agent, hosted or in this process, and what it has.

Knows nothing about what is trained there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatrainer.config import AgentSettings, RunSettings
from metatrainer.errors import AgentError
from metatrainer.shown import one_line

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

CHECKPOINTS = "checkpoints"
"""Folder of a run in which the service of this process keeps its checkpoints."""


@dataclass(frozen=True)
class Model:
    """The agent's model as its service has it."""

    tokenizer: Any
    renderer: Renderer
    context: int | None
    """Tokens that it takes; None where the service does not say."""


@contextmanager
def opened(settings: RunSettings, run_dir: Path) -> Iterator[Any]:
    """The service that the settings name, for the time of a run.

    Raises AgentError where the hosted one fails.
    """
    service = connect(settings, run_dir)
    if settings.agent.backend == "tinker":
        yield from _hosted(service)
        return
    try:
        yield service
    finally:
        service.close()


def connect(settings: RunSettings, run_dir: Path) -> Any:
    """The service that the settings name. One in this process has to be closed.

    run_dir: holds its checkpoints.
    """
    if settings.agent.backend == "tinker":
        from metatrainer.outer import preflight

        return preflight.hosted()
    from metatrainer.students import catalogue
    from metatrainer.tinker.client import ServiceClient

    folder = catalogue.agent_folder(settings.agent.model)
    return ServiceClient(run_dir / CHECKPOINTS, lambda _: _engine(folder), settings.seed)


async def describe(service: Any, agent: AgentSettings) -> Model:
    """Ask a service for the agent's model. Raises ConfigError if the renderer does not fit it."""
    from tinker_cookbook import tokenizer_utils

    from metatrainer.outer import renderer

    sampler = await service.create_sampling_client_async(base_model=agent.model)
    tokenizer = await asyncio.to_thread(sampler.get_tokenizer)
    if agent.backend == "embedded":
        tokenizer_utils.register_tokenizer(agent.model, lambda: tokenizer)
    fitting = renderer.get(agent.renderer, tokenizer)
    return Model(tokenizer, fitting, await _context(service, agent.model))


async def _context(service: Any, model: str) -> int | None:
    capabilities = await service.get_server_capabilities_async()
    lengths = [m.max_context_length for m in capabilities.supported_models if m.model_name == model]
    return lengths[0] if lengths else None


def _hosted(service: Any) -> Iterator[Any]:
    import tinker

    try:
        yield service
    except tinker.TinkerError as error:
        raise AgentError(f"the Tinker service failed: {one_line(str(error), 300)}") from error


def _engine(folder: Path) -> Any:
    from metatrainer.engine import Engine

    return Engine(folder)
