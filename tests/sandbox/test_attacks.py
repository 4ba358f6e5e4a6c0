"""Submissions that try to get out, to break the sandbox, or to meddle with the next one."""

import ast
import json
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import time

import pytest
from submissions import SECRET, chat, submission, works

from metatrainer.errors import EnvError
from metatrainer.sandbox import seccomp


def attempt(guest, files, seconds=5.0):
    """Import, load and score a submission; the EnvError that it ends in."""
    with pytest.raises(EnvError) as caught, guest.session(files, "environment", {}, seconds) as s:
        s.load()
        s.score([(0, chat("reply"))])
    return caught.value


def tell(guest, expression, setup=""):
    """What an expression evaluates to inside, told through an exception."""
    error = attempt(guest, submission(at_import=f"{setup}\nraise Exception(str({expression}))"))
    assert error.kind == "import"
    return error.message.removeprefix("Exception: ")


def test_host_files_are_not_there(guest, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    for path in ("/etc/shadow", "/etc/passwd", "/root", "/home", str(secret), __file__):
        assert os.path.exists(path)
        assert tell(guest, f"__import__('os').path.exists({path!r})") == "False"


def test_own_package_is_not_there(guest):
    error = attempt(guest, submission(at_import="import metatrainer"))
    assert (error.kind, error.line) == ("import", 3)
    assert "No module named 'metatrainer'" in error.message


def test_environment_variables_are_not_passed_on(guest):
    assert SECRET in os.environ.values()
    assert SECRET not in tell(guest, "dict(os.environ)", "import os")


def test_nothing_is_writable_but_tmp(guest):
    setup = """
import os
def writable(folder):
    try:
        open(folder + "/x", "w")
        return True
    except OSError:
        return False
folders = ["/", "/usr", "/etc", "/dev", "/python", "/proc/sys/kernel", "/tmp", "/dev/shm"]
"""
    assert tell(guest, "[f for f in folders if writable(f)]", setup) == "['/tmp', '/dev/shm']"


def test_no_network(guest):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        setup = """
import socket
def reach(address):
    try:
        socket.create_connection(address, timeout=2)
        return "reached"
    except OSError as error:
        return type(error).__name__
"""
        assert tell(guest, f"reach(('127.0.0.1', {port}))", setup) == "PermissionError"
        assert tell(guest, "reach(('1.1.1.1', 53))", setup) == "PermissionError"


def test_only_own_processes_are_visible(guest):
    pids = "sorted(int(p) for p in os.listdir('/proc') if p.isdigit()) == [1, os.getpid()]"
    assert tell(guest, pids, "import os") == "True"


def run_outside(code, *arguments, cwd=None):
    """What a program prints outside. Where we may, the host's name is its own to change."""
    program = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        ["unshare", "--uts", "--", *program] if PRIVILEGED else program,
        capture_output=True,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


with open("/proc/self/status") as status:
    capabilities = next(line.split()[1] for line in status if line.startswith("CapEff"))
PRIVILEGED = bool(int(capabilities, 16) >> 21 & 1)
"""Whether we are an administrator (CAP_SYS_ADMIN)."""
COLUMN = seccomp.ARCHITECTURES[platform.machine()][0]
CLONE = seccomp.CLONE[COLUMN]
CALLS = {**seccomp.DENIED, **seccomp.DENIED_TO_SESSIONS}
CALLS = {name: numbers[COLUMN] for name, numbers in CALLS.items() if numbers[COLUMN] is not None}


MAKE_CALLS = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number):
    ctypes.set_errno(0)
    done = libc.syscall(number, -1, -1, -1, -1, -1, -1)
    return done, ctypes.get_errno()
passed = [n for n, number in {CALLS!r}.items() if call(number) != (-1, errno.EPERM)]
"""
"""Each is made with arguments that do no harm where it is let through."""


def test_every_listed_system_call_is_refused(guest):
    assert tell(guest, "passed", MAKE_CALLS) == "[]"


def test_the_listed_system_calls_are_not_refused_outside():
    """Some ask for a privilege before they look at their arguments."""
    passed = ast.literal_eval(run_outside(f"{MAKE_CALLS}\nprint(passed)"))
    assert len(CALLS) - len(passed) <= (0 if PRIVILEGED else 20)


ATTEMPTS = {
    "limits of process 1": "libc.prlimit(victim, 7, (ctypes.c_ulong * 2)(99, 99), None)",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
    "user namespace by clone": f"forked(libc.syscall({CLONE}, 0x10000011, 0, 0, 0))",
    "root": "os.setuid(0)",
    "another user": "os.setresuid(1, 1, 1)",
    "execution domain": f"libc.syscall({CALLS['personality']}, 0xffffffff)",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "host name": "socket.sethostname('x')",
    "kernel setting": "open('/proc/sys/kernel/hostname', 'w')",
    "more namespaces": "open('/proc/sys/user/max_user_namespaces', 'w')",
    "sysrq": "open('/proc/sysrq-trigger', 'w')",
    "last to be killed": "open('/proc/self/oom_score_adj', 'w')",
    "own memory by file": "open('/proc/self/mem', 'rb')",
    "memory in no folder": "libc.memfd_create(b'x', 0)",
    "root by /proc": "os.listdir(f'/proc/{victim}/root')",
    "folder of process 1": "os.listdir(f'/proc/{victim}/cwd')",
    "memory of the machine": "open('/dev/mem', 'rb')",
    "memory of the kernel": "open('/proc/kcore', 'rb').read(1)",
    "kernel's log": "open('/dev/kmsg', 'rb')",
    "a device": "os.mknod('null', 0o20666, os.makedev(1, 3))",
    "a set-uid program": "subprocess.run(['su', '-c', 'true'], check=True, stdin=-3)",
    "hard link to a program": "os.link(program, 'linked')",
    "hard link to the guest": "os.link(f'{guest}/guest.py', 'linked.py')",
    "symbolic link to a host file": "(os.symlink(secret, 's'), open('s'))",
    "symbolic link by /proc": "(os.symlink(f'/proc/self/root{root}', 'r'), os.listdir('r'))",
    "the guest's program": "open(f'{guest}/guest.py', 'a')",
    "the guest's filter": "os.rename(f'{guest}/filter', f'{guest}/other')",
    "libraries": "open(library, 'a')",
    "the interpreter": "os.rename(program, program + '.old')",
    "mode of a library": "os.chmod(library, 0o777)",
    "many inodes": "[open(f'{n}', 'w').close() for n in range(20000)]",
    "internet": "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "terminal": "os.openpty()",
}
"""Made in a folder that can be written to."""
PRIVILEGED_ONLY = {
    *("root", "another user", "host name", "kernel setting", "kernel's log", "a device"),
    "a set-uid program",
}
NO_CONTROL = {
    "the clock": "it would change this machine",
    "more namespaces": "not even root may, where user namespaces are few",
    "sysrq": "not every kernel has it",
    "memory of the machine": "not every kernel has it",
    "memory of the kernel": "not every kernel has it",
    "vsock": "not every kernel has it",
}
MAKE = """
import ctypes, json, os, resource, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def forked(pid):
    return pid or os._exit(0)
def made(attempt):
    try:
        return eval(attempt) != -1
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
"""


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_attempt_is_refused(guest, attempt):
    names = """
victim, guest, program, library = 1, "/guest", sys.executable, json.__file__
secret, root = "/etc/shadow", "/root"
"""
    assert tell(guest, f"made({attempt!r})", MAKE + names) == "False"


OUTSIDE = """
victim = subprocess.Popen(["sleep", "600"]).pid
folder = os.getcwd()
guest = root = folder
secret = library = program = f"{folder}/guest.py"
results = {}
for name, attempt in json.loads(sys.argv[1]).items():
    for file in ("guest.py", "filter"):
        open(f"{folder}/{file}", "w").close()
    os.mkdir("at"); os.chdir("at")
    if not (pid := os.fork()):
        os._exit(made(attempt))
    results[name] = os.waitpid(pid, 0)[1] >> 8 == 1
    os.chdir(folder); os.rename("at", f"done {name}".replace("/", " "))
os.kill(victim, 9)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Whether each attempt works outside, on files and a process that are there for it."""
    tried = {name: attempt for name, attempt in ATTEMPTS.items() if name not in NO_CONTROL}
    folder = tmp_path_factory.mktemp("outside")
    return json.loads(run_outside(MAKE + OUTSIDE, json.dumps(tried), cwd=folder))


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_refuses_an_attempt_is_the_sandbox(outside, name):
    """A control: the same works outside, so what fails inside is no mistake in the attempt."""
    if name in NO_CONTROL:
        pytest.skip(NO_CONTROL[name])
    if name in PRIVILEGED_ONLY and not PRIVILEGED:
        pytest.skip("takes privileges")
    assert outside[name]


def test_nothing_is_left_of_privileges(guest):
    names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp:")
    setup = f"lines = [l.split() for l in open('/proc/self/status') if l.startswith({names})]"
    state = tell(guest, "{k: int(v, 16) for k, v in lines}", setup)
    caps = dict.fromkeys(("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"), 0)
    assert ast.literal_eval(state) == caps | {"NoNewPrivs:": 1, "Seccomp:": 2}


def test_descriptors_of_the_outside_are_not_inherited(guest):
    """0 to 4: nothing, prints twice, requests, answers."""
    setup = """
import os
def there(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
"""
    assert tell(guest, "[fd for fd in range(1000) if there(fd)]", setup) == "[0, 1, 2, 3, 4]"
    kinds = "[os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in range(5)]"
    assert ast.literal_eval(tell(guest, kinds, "import os")) == ["/dev/null", *["pipe"] * 4]


class Trap:
    """Pickled, it makes a file where it is opened."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_pickle_over_the_pipe_is_not_opened(guest, tmp_path):
    trap = tmp_path / "opened"
    pickled = pickle.dumps(Trap(trap))
    code = f"""
        import os
        for fd in (3, 4):
            try: os.write(fd, {pickled!r} + b"\\n")
            except OSError: pass
    """
    assert attempt(guest, submission(at_reward=code)).kind == "protocol"
    assert not trap.exists()
    assert works(guest)
    pickle.loads(pickled)
    assert trap.exists()


@pytest.mark.parametrize("fd", [1, 2])
def test_flooded_output_ends_the_session(guest, fd):
    flood = f"import os\nwhile True: os.write({fd}, bytes(1 << 16))"
    assert attempt(guest, submission(at_import=flood)).kind == "output"
    assert works(guest)


def test_messages_that_would_move_a_terminal_are_made_visible(guest):
    error = attempt(guest, submission(at_import="raise Exception('\\x1b[2J\\u202e' + 'x' * 9999)"))
    assert error.message.startswith("Exception: \\x1b[2J\\u202ex")
    assert error.message.isprintable() or "\n" in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize("path", ["mem", "fd", "environ", "maps"])
def test_process_1_cannot_be_read(guest, path):
    read = f"os.listdir('/proc/1/fd') if {path!r} == 'fd' else open('/proc/1/{path}').read(9)"
    error = attempt(guest, submission(at_import=f"import os; {read}"))
    assert "PermissionError" in error.message


def test_signals_do_not_reach_process_1(guest):
    before = guest.pid
    send = "import os\nfor number in range(1, 65):\n    os.kill(1, number)"
    with guest.session(submission(at_import=send), "environment", {}, 5) as session:
        assert len(session.load()) == 4
    assert works(guest)
    assert guest.pid == before


LOOPS = {
    "at import": ({"at_import": "while True: pass"}, 3),
    "at load": ({"at_load": "while True: pass"}, 17),
    "in the reward": ({"at_reward": "while True: pass"}, 12),
}


@pytest.mark.parametrize("parts,line", LOOPS.values(), ids=LOOPS)
def test_endless_loop_is_found_and_placed(guest, parts, line):
    before = guest.pid
    error = attempt(guest, submission(**parts), seconds=0.5)
    assert (error.kind, error.file, error.line) == ("timeout", "environment/__init__.py", line)
    assert works(guest)
    assert guest.pid == before


STUBBORN = {
    "catches everything": """
        while True:
            try:
                while True: pass
            except BaseException: pass
    """,
    "never leaves C": "sum(range(10**12))",
    "stops itself": "import os; os.kill(os.getpid(), 19)",
}


@pytest.mark.parametrize("code", STUBBORN.values(), ids=STUBBORN)
def test_stubborn_loop_is_killed(guest, code):
    before = guest.pid
    assert attempt(guest, submission(at_import=code), seconds=0.5).kind == "timeout"
    assert works(guest)
    assert guest.pid == before


ENDS = {
    "exit code": ("import os; os._exit(3)", "exit code 3"),
    "signal": ("import os; os.kill(os.getpid(), 11)", "signal 11"),
    "child keeps the pipe": (
        "import os, time\nif os.fork():\n    os._exit(4)\ntime.sleep(60)",
        "exit code 4",
    ),
}


@pytest.mark.parametrize("code,said", ENDS.values(), ids=ENDS)
def test_end_of_the_process_is_told(guest, code, said):
    error = attempt(guest, submission(at_import=code))
    assert error.kind == "crash"
    assert said in error.message
    assert works(guest)


def test_sys_exit_is_an_error_like_any_other(guest):
    error = attempt(guest, submission(at_reward="import sys; sys.exit(0)"))
    assert (error.kind, error.line) == ("reward", 12)


def test_fork_bomb(guest):
    bomb = "import os\nwhile True:\n    os.fork()"
    error = attempt(guest, submission(at_import=bomb), seconds=2)
    assert error.kind in ("import", "memory", "timeout", "crash", "protocol")
    assert works(guest)


def test_memory_of_one_process(guest):
    error = attempt(guest, submission(at_load="bytearray(3 << 30)"))
    assert (error.kind, error.line) == ("memory", 17)
    assert works(guest)


def test_memory_of_many_processes(guest):
    code = """
        import os, time
        for _ in range(8):
            if not os.fork():
                held = bytearray(b"x") * (400 << 20)
                time.sleep(60)
        for _ in range(1000):
            print(flush=True)  # answers and prints must not keep the guard from looking
            time.sleep(0.02)
    """
    error = attempt(guest, submission(at_import=code), seconds=20)
    assert (error.kind, "MiB" in error.message) == ("memory", True)
    assert works(guest)


@pytest.mark.parametrize("folder,mib", [("/tmp", 64), ("/dev/shm", 16)])
def test_full_disk(guest, folder, mib):
    setup = f"""
import os
written = 0
try:
    for n in range(100):
        with open(f"{folder}/{{n}}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
"""
    assert 0.8 * mib <= int(tell(guest, "written >> 20", setup)) <= mib
    assert works(guest)


def test_a_megabyte_of_prints(guest):
    error = attempt(guest, submission(at_load="print('x' * (1 << 20))"))
    assert error.kind == "output"
    assert works(guest)


def test_a_few_prints_are_kept_and_harmless(guest):
    noisy = submission(at_import="print('hello \\x1b[2J')", at_reward="print('y' * 9000)")
    with guest.session(noisy, "environment", {}, 5) as session:
        assert session.score([(0, chat("x"))])[0].reward == 1.0
    assert session.printed.startswith("hello \\x1b[2J\n")
    assert len(session.printed) <= 4096


FORGED = {
    "garbage": "b'garbage\\n'",
    "no line": "b'x' * 100000",
    "not finite": """b'{"id": 1, "value": [NaN]}\\n'""",
    "deep": "b'[' * 200000 + b'\\n'",
    "wrong shape": """b'{"id": 1, "value": [{"reward": "x", "parts": 3, "error": null}]}\\n'""",
    "wrong number": """b'{"id": 1, "value": []}\\n'""",
    "unknown error": """b'{"id": 1, "error": {"kind": "root"}}\\n'""",
    "no object": "b'[]\\n'",
    "no UTF-8": "b'\\xff\\xfe\\n'",
    "long number": """b'{"id": ' + b'9' * 5000 + b'}\\n'""",
    "part not finite": """b'{"id": 1, "value": [{"reward": 1, "parts": {"a": 1e999}, '
                         b'"error": null}]}\\n'""",
    "many parts": """b'{"id": 1, "value": [{"reward": 1, "parts": {'
                     + b",".join(b'"%d": 1' % i for i in range(999)) + b'}, "error": null}]}\\n'""",
}


@pytest.mark.parametrize("line", FORGED.values(), ids=FORGED)
def test_forged_answers_are_seen(guest, line):
    code = f"""
        import os
        for fd in range(3, 256):
            try: os.write(fd, {line})
            except OSError: pass
    """
    assert attempt(guest, submission(at_reward=code)).kind == "protocol"
    assert works(guest)


def test_more_data_than_the_pipe_takes(guest):
    big = submission(at_load="big = 'x' * (40 << 20)")
    big = {name: text.replace('f"answer {i}"', "big") for name, text in big.items()}
    assert attempt(guest, big, seconds=20).kind in ("protocol", "memory")
    assert works(guest)


LEFT = """
import os, time
open("/tmp/left", "w").close(); open("/dev/shm/left", "w").close()
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    while True:
        open("/tmp/left", "w").close(); time.sleep(0.001)
"""


def test_nothing_is_left_for_the_next_session(guest):
    with guest.session(submission(at_import=LEFT), "environment", {}, 5) as session:
        session.load()
    setup = "import os, time; time.sleep(0.05)"
    left = "[f for d in ('/tmp', '/dev/shm') for f in os.listdir(d) if f != 'job']"
    assert tell(guest, left, setup) == "[]"
    pids = "sorted(int(p) for p in os.listdir('/proc') if p.isdigit()) == [1, os.getpid()]"
    assert tell(guest, pids, setup) == "True"


def test_a_session_stands_still_between_calls(guest):
    code = """
        import threading, time
        longest = 0.0
        def beat():
            global longest
            last = time.monotonic()
            while True:
                time.sleep(0.001)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
        threading.Thread(target=beat, daemon=True).start()
    """
    files = submission(at_import=code, at_reward="time.sleep(0.05)", returns="longest")
    with guest.session(files, "environment", {}, 5) as session:
        session.load()
        time.sleep(0.6)
        assert session.score([(0, chat("x"))])[0].reward > 0.5


UNREMOVABLE = {
    "closed folder": "import os; os.makedirs('/tmp/a/b'); os.chmod('/tmp/a', 0)",
    "deep folder": """
        import os
        for _ in range(3000):
            os.mkdir("d"); os.chdir("d")
    """,
}


@pytest.mark.parametrize("code", UNREMOVABLE.values(), ids=UNREMOVABLE)
def test_what_cannot_be_removed_goes_with_its_session(guest, code):
    before = guest.pid
    with guest.session(submission(at_load=code), "environment", {}, 5) as session:
        session.load()
    assert works(guest)
    assert guest.pid == before


@pytest.mark.parametrize("name", ["json.py", "verifiers.py", "verifiers/v1.py", "tomllib.py"])
def test_libraries_cannot_be_shadowed(guest, name):
    files = submission(at_import="import json, tomllib; json.dumps, tomllib.loads")
    with guest.session({**files, name: "raise Exception"}, "environment", {}, 5) as session:
        assert len(session.load()) == 4


def test_a_file_beside_the_package_can_be_imported(guest):
    """A control of shadowing: the folder is on the path, after the libraries."""
    files = {**submission(at_import="import beside"), "beside.py": "raise Exception('found')"}
    assert attempt(guest, files).message == "Exception: found"


def test_a_package_cannot_take_the_name_of_a_library(guest):
    files = {"xml/__init__.py": submission()["environment/__init__.py"]}
    with pytest.raises(EnvError, match="installed module"), guest.session(files, "xml", {}, 5) as s:
        s.load()


@pytest.mark.parametrize("path", ["../x.py", "/tmp/x.py", "a/../../x.py", "a\0.py", ""])
def test_paths_that_leave_the_folder_are_refused(guest, path):
    with pytest.raises(EnvError, match="not a path inside"):
        guest.session({path: ""}, "environment", {}, 5)
    assert works(guest)


def test_a_killed_sandbox_is_replaced(guest):
    session = guest.session(
        submission(at_import="import time; time.sleep(60)"), "environment", {}, 9
    )
    os.kill(guest.pid, signal.SIGKILL)
    with pytest.raises(EnvError) as caught:
        session.load()
    assert caught.value.kind == "crash"
    session.close()
    assert works(guest)
