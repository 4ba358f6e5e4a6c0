"""The one place where tinker-cookbook is changed from outside, for the time of a `with` block.

Within `serve` its RL and supervised loops run unedited on the given service; within `log_to` it
writes its log into a file instead of taking over the process's logging and its terminal. Knows
nothing about what the service is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

COOKBOOK_VERSION = "0.5.8"
"""The tinker-cookbook that this fits; a contract test asserts it."""


class _TinkerAsSeen(ModuleType):
    """The tinker module, but for its ServiceClient."""

    def __init__(self, real: ModuleType, service: object):
        super().__init__(real.__name__)
        self._real = real
        self._service = service

    def ServiceClient(self, **_: Any) -> object:
        return self._service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def serve(service: object) -> Iterator[None]:
    """Have tinker-cookbook's loops use `service` wherever they would make a ServiceClient."""
    from tinker_cookbook.rl import train
    from tinker_cookbook.supervised import train as supervised

    loops = (train, supervised)
    real = train.tinker
    for loop in loops:
        loop.tinker = _TinkerAsSeen(real, service)
    try:
        yield
    finally:
        for loop in loops:
            loop.tinker = real


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send the log of tinker-cookbook and of the SDK to a file, and draw no progress bars."""
    from tinker_cookbook.rl import train
    from tinker_cookbook.utils import ml_log

    taken_over, bar = ml_log.configure_logging_module, train.tqdm
    ml_log.configure_logging_module = lambda _: None
    train.tqdm = partial(bar, disable=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("tinker_cookbook", "tinker")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(handler)
        handler.close()
        ml_log.configure_logging_module, train.tqdm = taken_over, bar
