"""Lets tests and their worker processes import the stand-in bodies beside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _workers_find_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers inherit PYTHONPATH and nothing else of this process's import path.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.pool)
