"""One warm sandbox for each test module of this folder."""

import os
import sys
from pathlib import Path

import pytest

from metatrainer.sandbox.host import Guest

sys.path.insert(0, str(Path(__file__).parent))

from submissions import SECRET


@pytest.fixture(scope="module")
def guest():
    os.environ["METATRAINER_TEST_KEY"] = SECRET
    with Guest(slot=7) as guest:
        yield guest
    del os.environ["METATRAINER_TEST_KEY"]
