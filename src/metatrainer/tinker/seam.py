"""The one place where tinker-cookbook's RL loop is handed a service of ours.

Within `serve`, `tinker_cookbook.rl.train` runs unedited on the given service; nothing outside of
that module is touched. Knows nothing about what the service is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    """Have tinker-cookbook's RL loop use `service` wherever it would make a ServiceClient."""
    from tinker_cookbook.rl import train

    real = train.tinker
    train.tinker = _TinkerAsSeen(real, service)
    try:
        yield
    finally:
        train.tinker = real
