"""One warm sandbox for the tests of validation, and the suite as a package for them."""

import sys
from pathlib import Path

import pytest

from metatrainer.sandbox.host import Guest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def guest():
    with Guest(slot=8) as guest:
        yield guest
