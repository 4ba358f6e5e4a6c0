"""A real server over two tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import KEY, serving
from tiny import make_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("first", "second")):
        make_model(folder / name, seed)
    return folder


@pytest.fixture(scope="package")
def url(folder: Path) -> Iterator[str]:
    with serving(folder, key=KEY) as url:
        yield url
