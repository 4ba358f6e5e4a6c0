"""Lets tests and their worker processes import the stand-in bodies beside them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runpod_server import FakeRunpod

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


@pytest.fixture
def runpod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunpod]:
    import runpod_server

    if not Path(runpod_server.SSHD).exists():
        pytest.skip("needs sshd; scripts/sshd installs it")
    monkeypatch.setenv("RUNPOD_API_KEY", runpod_server.OWNER_KEY)
    with runpod_server.serving(tmp_path / "pods") as fake:
        fake.variables["SIGNALS"] = str(tmp_path)
        yield fake
