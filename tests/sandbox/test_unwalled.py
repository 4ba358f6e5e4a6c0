"""Without a sandbox: refusal by default, and what remains where the user insists."""

import signal
import subprocess
import sys

import pytest
from submissions import chat, submission, works

from metatrainer.errors import EnvError, SandboxUnavailable
from metatrainer.sandbox import bwrap, unwalled
from metatrainer.sandbox.host import Guest


@pytest.fixture
def no_sandbox(monkeypatch):
    def refuse():
        raise SandboxUnavailable("no bubblewrap here")

    monkeypatch.setattr(bwrap, "require", refuse)
    unwalled.has_walls.cache_clear()
    yield
    unwalled.has_walls.cache_clear()


def lives(pid):
    """Whether a process is still there; one that only waits to be noted is not."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return "State:\tZ" not in status.read()
    except FileNotFoundError:
        return False


def test_it_is_refused_unless_asked_for(no_sandbox):
    with pytest.raises(SandboxUnavailable, match="no bubblewrap here"):
        Guest(slot=9).start()


def test_asked_for_it_runs_with_a_warning_and_limits(no_sandbox, capfd):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with Guest(slot=9, unsafe=True) as guest:
        assert works(guest)
        assert works(guest)
        sleeper = "import subprocess\nprint(subprocess.Popen(['/bin/sleep', '60']).pid)"
        with guest.session(submission(at_import=sleeper), "environment", {}, 5) as session:
            session.load()
            folder = guest._folder
        assert not lives(int(session.printed))
        assert not folder.exists()
        spin = submission(at_reward="while True: pass")
        session = guest.session(spin, "environment", {}, 0.5)
        with session, pytest.raises(EnvError) as caught:
            session.score([(0, chat("x"))])
        assert caught.value.kind == "timeout"
    assert bystander.poll() is None, "ending a session must reach no other process of the user"
    bystander.send_signal(signal.SIGKILL)
    bystander.wait()
    warned = capfd.readouterr().err
    assert warned.count("NO SANDBOX: no bubblewrap here") == 1
    assert "Trust no result" in warned


def test_where_a_sandbox_works_it_is_used_all_the_same(capfd):
    with Guest(slot=9, unsafe=True) as guest:
        assert guest.apart
        assert works(guest)
    assert "NO SANDBOX" not in capfd.readouterr().err
