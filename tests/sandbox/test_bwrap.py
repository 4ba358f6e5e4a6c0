"""The command line of the sandbox: closed homes, and what it says where there is no sandbox."""

import os
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


def test_missing_bubblewrap_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match=r"bwrap.*apt-get install bubblewrap"):
        bwrap.require.__wrapped__()


def test_a_sandbox_that_fails_is_told_with_its_message(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bwrap, "_drop_root", lambda slot: [])
    with pytest.raises(SandboxUnavailable, match=r"create new namespace.*user namespaces"):
        bwrap.require.__wrapped__()


def test_other_machines_are_refused():
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp.program("riscv64")
