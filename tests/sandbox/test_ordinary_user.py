"""The attacks once more, started by a user without any privilege."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = ["test_attacks.py", "test_apart.py"]
UID = 65533

# In a mount namespace of its own: an interpreter in a home that is closed to others is shown where
# it is, and nothing else of that home.
AS_USER = f"""
set -e
closed=$1 base=$2; shift 2
if [ -n "$closed" ]; then
    mkdir "$STAGE"; mount --bind "$base" "$STAGE"; mount -t tmpfs -o mode=755 none "$closed"
    mkdir -p "$base"; mount --bind "$STAGE" "$base"
fi
exec setpriv --reuid={UID} --regid={UID} --clear-groups --inh-caps=-all --bounding-set=-all "$@"
"""


@pytest.fixture
def folder():
    """A folder that everybody may write to; pytest's own are closed."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def closed_part(path):
    """The outermost folder on the way to `path` that others cannot enter, or nothing."""
    parts = [*Path(path).parents][::-1]
    return next((str(p) for p in parts if not p.stat().st_mode & 0o001), "")


@pytest.mark.skipif(os.geteuid() != 0, reason="the attacks have already run as an ordinary user")
def test_attacks_fail_as_an_ordinary_user(folder):
    base = os.path.realpath(sys.base_prefix)
    tests = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests += [f"--basetemp={folder / 'base'}", *(str(HERE / suite) for suite in SUITES)]
    shell = ["sh", "-c", AS_USER, "sh", closed_part(base), base, *tests]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", *shell],
        env={**os.environ, "STAGE": str(folder / "stage"), "HOME": str(folder)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
