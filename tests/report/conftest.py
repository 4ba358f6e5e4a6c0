"""Runs that never took place, for the tests of reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from past_run import write_run

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(steps=, planned=, heldout=) -> folder of a run."""

    def make(name: str = "nano-synthetic", **kwargs: int) -> Path:
        return write_run(tmp_path / name, **kwargs)

    return make
