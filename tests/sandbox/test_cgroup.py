"""Control groups: real limits where this machine has them, and quiet absence where it has none."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metatrainer.sandbox import cgroup

needs_groups = pytest.mark.skipif(cgroup.home() is None, reason="no control groups to be had here")

# Waits until it has been put into a group, then does what it is told.
WAITING = [sys.executable, "-c", "import sys; sys.stdin.readline(); exec(sys.argv[1])"]


def run_limited(code, monkeypatch, **limits):
    """Run code in a group of its own with other limits; its exit code and output."""
    version = cgroup.home().version
    monkeypatch.setitem(cgroup._LIMITS, version, cgroup._LIMITS[version] | limits)
    process = subprocess.Popen(
        [*WAITING, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group = cgroup.limit(process.pid)
    out, _ = process.communicate("go\n", timeout=30)
    deadline = time.monotonic() + 5
    while not group.remove():
        assert time.monotonic() < deadline, "the group is still there"
        time.sleep(0.01)
    return process.returncode, out


@needs_groups
def test_memory_of_a_group_ends_at_its_limit(monkeypatch):
    name = {1: "memory.limit_in_bytes", 2: "memory.max"}[cgroup.home().version]
    hold = "bytearray(b'x') * (200 << 20); print('held')"
    assert run_limited(hold, monkeypatch) == (0, "held\n")
    code, out = run_limited(hold, monkeypatch, **{name: 64 << 20})
    assert (code, out) == (-9, "")


@needs_groups
def test_processes_of_a_group_end_at_their_limit(monkeypatch):
    forks = """
import os, time
made = 0
try:
    for made in range(20):
        if not os.fork(): time.sleep(0.5); os._exit(0)
except OSError: print("refused", made)
"""
    assert run_limited(forks, monkeypatch, **{"pids.max": 5}) == (0, "refused 4\n")


@needs_groups
def test_a_session_is_in_a_group_and_leaves_none(guest):
    from submissions import submission

    folder = cgroup.home().folders[0]
    with guest.session(submission(), "environment", {}, 5) as session:
        session.load()
        (group,) = session._channel._group.folders[:1]
        assert group.parent == folder
        assert len((group / "cgroup.procs").read_text().split()) == 2  # keeper and submission
    deadline = time.monotonic() + 5
    while group.exists():
        assert time.monotonic() < deadline
        cgroup.remove_left()


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A hierarchy of version 2 as the kernel would show it: a new folder has its control files."""
    real = Path.mkdir

    def mkdir(path, *arguments, **options):
        real(path, *arguments, **options)
        enabled = path.parent / "cgroup.subtree_control"
        if enabled.exists():
            for name in enabled.read_text().split():
                (path / f"{name}.max").write_text("max")
            (path / "cgroup.procs").write_text("")

    root = tmp_path / "cgroup"
    (root / "user" / "session").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("memory pids")
    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    monkeypatch.setattr(cgroup, "ROOT", root)
    own = tmp_path / "own"
    own.write_text("0::/user/session\n")
    monkeypatch.setattr(cgroup, "OWN", own)
    monkeypatch.setattr(cgroup, "home", cgroup.home.__wrapped__)
    return root


def test_version_2_the_nearest_folder_that_hands_out_both_limits_is_taken(kernel):
    (kernel / "user" / "session" / "cgroup.subtree_control").write_text("memory")
    (kernel / "user" / "cgroup.subtree_control").write_text("memory pids")
    assert cgroup.home() == cgroup.Home(2, (kernel / "user",))
    group = cgroup.limit(4321)
    (folder,) = group.folders
    assert (folder / "memory.max").read_text() == str(cgroup.MEMORY)
    assert (folder / "pids.max").read_text() == str(cgroup.PROCESSES)
    assert (folder / "cgroup.procs").read_text() == "4321"
    assert group.remove()


def test_what_killed_processes_left_is_removed(kernel):
    (kernel / "cgroup.subtree_control").write_text("memory pids")
    gone = 2**22 + 1  # above any process id
    (kernel / f"metatrainer-{gone}-3").mkdir()
    assert cgroup.home() is not None
    assert not list(kernel.glob("metatrainer-*"))


def test_where_no_limit_is_handed_out_there_is_no_group_and_nothing_is_left(kernel, caplog):
    caplog.set_level("INFO")
    assert cgroup.home() is None
    assert cgroup.limit(4321) is None
    assert "no control groups" in caplog.text
    assert not list(kernel.rglob("metatrainer-*"))
