"""The life of a sandbox: who may start it, how it ends, and what it says when it cannot start."""

import os
import subprocess
import sys
import threading
import time

import pytest
from submissions import submission, works

from metatrainer.errors import SandboxUnavailable
from metatrainer.sandbox import bwrap, seccomp
from metatrainer.sandbox.host import Guest


def test_outlives_the_thread_that_started_it():
    guest = Guest(slot=9)
    starter = threading.Thread(target=guest.start)
    starter.start()
    starter.join()
    pid = guest.pid
    assert works(guest)
    assert guest.pid == pid
    guest.close()
    assert guest.pid is None


HOLDER = """
from metatrainer.sandbox.host import Guest
guest = Guest(slot=9)
guest.start()
session = guest.session({"spin.py": "while True: pass"}, "spin", {}, 600)
print(guest.pid, flush=True)
session.load()
"""


def test_does_not_outlive_its_process():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    outer = int(holder.stdout.readline())
    with open(f"/proc/{outer}/task/{outer}/children") as children:
        inner = int(children.read().split()[0])
    holder.kill()
    holder.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in (outer, inner)):
        assert time.monotonic() < deadline, "the sandbox is still there"
        time.sleep(0.02)


def test_missing_verifiers_is_told(monkeypatch):
    here = bwrap.runtime()
    monkeypatch.setattr(bwrap, "runtime", lambda: bwrap.Runtime(here.python, (), here.trees))
    with pytest.raises(SandboxUnavailable, match="pip install verifiers"):
        Guest(slot=9).start()


@pytest.fixture
def refused_namespaces(monkeypatch):
    """A machine that allows no namespaces within the sandbox's."""
    real = seccomp.program
    monkeypatch.setattr(seccomp, "program", lambda session=True: real(session=True))


def test_where_sessions_cannot_be_set_apart_there_is_one_at_a_time(refused_namespaces):
    with Guest(slot=9) as guest:
        assert not guest.apart
        before = guest.pid
        leave = "import subprocess; subprocess.Popen(['/bin/sleep', '60'])"
        session = guest.session(submission(at_import=leave), "environment", {}, 5)
        session.load()
        with pytest.raises(RuntimeError, match="one session at a time"):
            guest.session(submission(), "environment", {}, 5)
        session.close()
        assert guest.pid != before, "what a session leaves goes with its sandbox"
        assert not os.path.exists(f"/proc/{before}")
        assert works(guest)
        assert works(guest)
