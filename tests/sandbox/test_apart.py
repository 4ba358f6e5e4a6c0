"""Several sessions of one guest at the same time: none sees, stops or changes another."""

import subprocess
import sys
import threading
import time

import pytest
from submissions import chat, submission, works

from metatrainer.errors import EnvError


def opened(guest, code, seconds=5.0, **parts):
    return guest.session(submission(at_import=code, **parts), "environment", {}, seconds)


SPY = """
import os, signal
def tries(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return type(error).__name__
"""


def test_sessions_run_at_the_same_time_and_keep_their_state(guest):
    many = [opened(guest, f"count = {i}", returns="float(count)") for i in range(6)]
    assert [s.score([(0, chat("x"))])[0].reward for s in many] == [0, 1, 2, 3, 4, 5]
    assert [s.score([(0, chat("x"))])[0].reward for s in many[::-1]] == [5, 4, 3, 2, 1, 0]
    for session in many:
        session.close()
    assert works(guest)


def test_a_slow_session_holds_up_nobody(guest):
    """The other one's call ends while the slow call waits for what only comes afterwards."""
    before = guest.pid
    with opened(guest, "", at_reward="while True: pass") as slow, opened(guest, "") as quick:
        quick.load()
        slow.load()
        ends = []
        thread = threading.Thread(target=lambda: ends.append(outcome(slow)))
        thread.start()
        assert quick.score([(0, chat("x"))])[0].reward == 1.0
        assert not ends, "the slow call ended first: it was not going on at the same time"
        thread.join()
    assert ends == ["timeout"]
    assert guest.pid == before


def outcome(session):
    with pytest.raises(EnvError) as caught:
        session.score([(0, chat("x"))])
    return caught.value.kind


def test_processes_files_and_folders_of_another_are_not_there(guest):
    left = """
open("/tmp/secret", "w").write("x"); open("/dev/shm/secret", "w").write("x")
import subprocess
subprocess.Popen(["/bin/sleep", "60"])
"""
    seen = """
paths = [f for d in ("/tmp", "/dev/shm", "/dev/pts") for f in os.listdir(d)]
pids = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
print(paths, pids == [1, os.getpid()])
"""
    with opened(guest, left) as first, opened(guest, SPY + seen) as second:
        first.load()
        second.load()
    assert second.printed == "['job'] True\n"


def test_signals_reach_only_the_own_session(guest):
    storm = """
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
    for pid in range(1, 4000):
        if pid != os.getpid():
            tries(os.kill, pid, number)
tries(os.kill, -1, signal.SIGTERM)
"""
    with opened(guest, "") as first, opened(guest, SPY + storm) as second:
        first.load()
        second.load()
        assert first.score([(0, chat("x"))])[0].reward == 1.0
        assert second.score([(0, chat("x"))])[0].reward == 1.0


@pytest.mark.parametrize("code", ["import os; os._exit(1)", "import os\nwhile True: os.fork()"])
def test_the_end_of_one_session_is_not_that_of_another(guest, code):
    before = guest.pid
    with opened(guest, "") as first, opened(guest, code, seconds=1) as second:
        first.load()
        with pytest.raises(EnvError):
            second.load()
        assert first.score([(0, chat("x"))])[0].reward == 1.0
    assert guest.pid == before


def test_a_fork_bomb_leaves_others_their_processes(guest):
    bomb = """
import threading, time
try:
    for started in range(100):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print(started < 20)
"""
    forks = "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)"
    with opened(guest, bomb) as first, opened(guest, forks) as second:
        first.load()
        assert len(second.load()) == 4
    assert first.printed == "True\n"


WAYS = """
import socket
made = []
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_NETLINK, socket.AF_VSOCK):
    made.append(tries(socket.socket, family, socket.SOCK_STREAM))
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]
made.append(tries(pair.bind, chr(0) + "meet"))
made.append(tries(os.open, "/dev/ptmx", os.O_RDWR))
print(set(made))
"""


def test_no_way_of_talking_between_sessions(guest):
    with opened(guest, SPY + WAYS) as session:
        session.load()
    assert session.printed in (
        "{'PermissionError', 'FileNotFoundError'}\n",
        "{'FileNotFoundError', 'PermissionError'}\n",
    )


def test_ways_of_talking_are_open_outside():
    """A control; a kernel may lack one of them, which is another error."""
    told = subprocess.run([sys.executable, "-c", SPY + WAYS], capture_output=True, text=True)
    assert told.returncode == 0
    assert "PermissionError" not in told.stdout and "FileNotFoundError" not in told.stdout


def test_changed_library_code_stays_in_its_session(guest):
    """A submission that rewrites the scoring code around it changes its own scores only."""
    patch = """
import sys, builtins, json
for module in list(sys.modules.values()):
    if hasattr(module, "Submission"):
        module.Submission.score = lambda self, batch: [
            {"reward": 99.0, "parts": {}, "error": None}] * len(batch)
json.dumps = lambda *a, **k: "{}"
builtins.float = lambda *a: 99.0
"""
    with opened(guest, "") as other, opened(guest, patch) as session:
        with pytest.raises(EnvError):
            session.load()
        assert other.score([(0, chat("x"))])[0].reward == 1.0
    assert works(guest)


def test_memory_of_one_session_is_not_found_in_the_next(guest):
    leave = "import builtins, sys; builtins.left = sys.left = 'x'; sys.modules['left'] = sys"
    look = "import builtins, sys; print([hasattr(builtins, 'left'), 'left' in sys.modules])"
    with opened(guest, f"{leave}\n{look}") as session:
        session.load()
    assert session.printed == "[True, True]\n"
    with opened(guest, look) as session:
        session.load()
    assert session.printed == "[False, False]\n"


def test_sessions_end_with_their_host_side(guest):
    """A closed session leaves no process behind."""
    for _ in range(3):
        opened(guest, "import subprocess; subprocess.Popen(['/bin/sleep', '60'])").close()
    deadline = time.monotonic() + 5
    while len(living(guest.pid)) > 2:  # bubblewrap's own process, and process 1
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(pid):
    """A process and its descendants, without those that have ended and only wait to be noted."""
    try:
        with open(f"/proc/{pid}/status") as file:
            if "State:\tZ" in file.read():
                return []
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(p) for p in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(each for child in children for each in living(child))]
