"""What every test starts from."""

from __future__ import annotations

import os
from pathlib import Path

# Subprocesses of tests import the package from this checkout too.
_SRC = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SRC, os.environ.get("PYTHONPATH")]))
