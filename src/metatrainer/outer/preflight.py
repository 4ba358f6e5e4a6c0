"""What can be wrong with the agent that a run is to train, found before anything is spent.

Asks the hosted service, which costs nothing. Knows nothing about episodes.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from metatrainer.chat import NANO
from metatrainer.config import AgentSettings, RunSettings, nearest
from metatrainer.errors import ConfigError
from metatrainer.shown import one_line

KEY = "TINKER_API_KEY"
SECONDS = 60.0
"""Until the service is taken for gone; its client tries for longer."""
_SAID_CHARS = 200


def check(settings: RunSettings) -> None:
    """See that the agent's service is there, takes the key and has the model, and that the renderer
    fits it. Raises ConfigError."""
    agent = settings.agent
    if agent.backend == "embedded" and agent.renderer == NANO:
        return  # checked when the run opens the model; the cookbook takes seconds to import
    if agent.backend == "tinker":
        _need_key()
    from metatrainer.outer import renderer

    if agent.backend == "tinker":
        renderer.recommended(agent.renderer, agent.model)
        _ask(agent)
    else:
        from metatrainer.engine.files import load_tokenizer
        from metatrainer.students import catalogue

        renderer.get(agent.renderer, load_tokenizer(catalogue.agent_folder(agent.model)))


def hosted() -> Any:
    """A client of the hosted service. Raises ConfigError without a key."""
    _need_key()
    import tinker

    return tinker.ServiceClient(user_metadata={"recipe_name": "metatrainer"})


def _need_key() -> None:
    if not os.environ.get(KEY):
        raise ConfigError(
            f'agent.backend is "tinker", which needs an API key in {KEY}; set it, '
            'or use agent.backend = "embedded"'
        )


def _served() -> Any:
    """What the service says of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the method is renamed in a later SDK
        return hosted().get_server_capabilities()


def _in_time(call: Callable[[], Any]) -> Any:
    """What a call returns. Raises TimeoutError if it takes too long; it is then left alone."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # it belongs to whoever waits
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result(SECONDS)


def _ask(agent: AgentSettings) -> None:
    """Raises ConfigError if the service cannot be had, or does not serve the model."""
    import tinker

    try:
        served = _in_time(_served)
    except (tinker.APIConnectionError, TimeoutError):
        raise ConfigError(
            f"the Tinker service does not answer in {SECONDS:g} s; see that the network and "
            "TINKER_BASE_URL, if it is set, are right"
        ) from None
    except tinker.TinkerError as error:
        said = one_line(str(error).replace(os.environ[KEY], "***"), _SAID_CHARS)
        what = f"the key in {KEY} and TINKER_BASE_URL, if it is set, are right"
        raise ConfigError(f"the Tinker service cannot be used: {said}; see that {what}") from None
    names = [model.model_name for model in served.supported_models]
    if agent.model not in names:
        raise ConfigError(
            f"agent.model: the Tinker service does not serve {agent.model!r}; "
            f"{one_line(nearest(agent.model, names), 1_000)}"
        )
