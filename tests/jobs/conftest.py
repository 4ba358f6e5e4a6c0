"""One warm sandbox for the tests of validation."""

import pytest

from metatrainer.sandbox.host import Guest


@pytest.fixture(scope="module")
def guest():
    with Guest(slot=8) as guest:
        yield guest
