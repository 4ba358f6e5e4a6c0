"""What every test starts from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Subprocesses of tests import the package from this checkout too.
_SRC = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SRC, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module")
def validator() -> Iterator[Any]:
    """A real one with one sandbox."""
    from metatrainer.agent.validator import Validator

    validator = Validator(sandboxes=1)
    yield validator
    asyncio.run(validator.close())


@pytest.fixture
def lab(tmp_path: Path, validator: Any) -> Iterator[Any]:
    """See lab.Lab."""
    from lab import Lab

    lab = Lab(tmp_path, validator)
    yield lab
    lab.ledger.close()
