"""An in-process service over a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny

from metatrainer.engine import Engine
from metatrainer.tinker.client import ServiceClient


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def service(model_folder: Path, tmp_path: Path) -> Iterator[ServiceClient]:
    client = ServiceClient(tmp_path / "checkpoints", lambda name: Engine(model_folder))
    yield client
    client.close()
