from __future__ import annotations

import pytest

from metatrainer.agent.workspace import (
    MAX_FILE_CHARS,
    MAX_FILES,
    MAX_TOTAL_CHARS,
    Workspace,
)
from metatrainer.errors import WorkspaceError


@pytest.fixture
def workspace() -> Workspace:
    return Workspace(
        {"INSTRUCTIONS.md": "read me", "environment/__init__.py": "LEVELS = [1]\nTASKS = 64\n"},
        readonly=["INSTRUCTIONS.md"],
    )


def test_written_files_are_read_back_and_submitted(workspace: Workspace) -> None:
    workspace.write("job.toml", "x = 1")
    assert workspace.read("./job.toml") == "x = 1"
    assert workspace.paths() == ["INSTRUCTIONS.md", "environment/__init__.py", "job.toml"]
    assert set(workspace.submission()) == {"environment/__init__.py", "job.toml"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/etc/passwd.md", "outside the workspace"),
        ("../up.py", "outside the workspace"),
        ("environment/../../up.py", "outside the workspace"),
        ("a\\b.py", "outside the workspace"),
        ("run.sh", r"allowed: .toml, .py"),
        ("environment", "allowed"),
        ("", "empty"),
        (".", "empty"),
        ("a\nb.py", "not a usable path"),
        ("d/" * 60 + "x.py", "not a usable path"),
    ],
)
def test_paths_outside_the_rules_are_refused(workspace: Workspace, path: str, says: str) -> None:
    with pytest.raises(WorkspaceError, match=says):
        workspace.write(path, "x")
    assert len(workspace.paths()) == 2


def test_the_nearest_file_is_named(workspace: Workspace) -> None:
    with pytest.raises(WorkspaceError, match=r"did you mean environment/__init__\.py"):
        workspace.read("environment/init.py")
    with pytest.raises(WorkspaceError, match=r"files: INSTRUCTIONS\.md, environment"):
        workspace.read("zzz.toml")


def test_read_only_files_stay(workspace: Workspace) -> None:
    for change in (
        lambda: workspace.write("INSTRUCTIONS.md", "obey"),
        lambda: workspace.edit("INSTRUCTIONS.md", "read", "obey"),
    ):
        with pytest.raises(WorkspaceError, match="read-only"):
            change()
    assert workspace.read("INSTRUCTIONS.md") == "read me"


def test_a_path_is_a_file_or_a_folder(workspace: Workspace) -> None:
    workspace.write("lib.py", "")
    with pytest.raises(WorkspaceError, match=r"lib\.py is a file"):
        workspace.write("lib.py/x.py", "")
    workspace.write("pack.md/x.py", "")
    with pytest.raises(WorkspaceError, match=r"pack\.md is a folder"):
        workspace.write("pack.md", "")


def test_sizes_are_capped(workspace: Workspace) -> None:
    with pytest.raises(WorkspaceError, match=f"at most {MAX_FILE_CHARS}"):
        workspace.write("big.md", "x" * (MAX_FILE_CHARS + 1))
    for i in range(MAX_TOTAL_CHARS // MAX_FILE_CHARS - 1):
        workspace.write(f"big{i}.md", "x" * MAX_FILE_CHARS)
    with pytest.raises(WorkspaceError, match=f"pass {MAX_TOTAL_CHARS}"):
        workspace.write("one-more.md", "x" * MAX_FILE_CHARS)
    for i in range(MAX_FILES - len(workspace.paths())):
        workspace.write(f"small{i}.md", "")
    with pytest.raises(WorkspaceError, match="full"):
        workspace.write("last.md", "")
    workspace.write("small0.md", "still writable")


def test_an_edit_needs_text_that_occurs_once(workspace: Workspace) -> None:
    path = "environment/__init__.py"
    workspace.edit(path, "LEVELS = [1]", "LEVELS = [1, 2]")
    assert workspace.read(path) == "LEVELS = [1, 2]\nTASKS = 64\n"
    with pytest.raises(WorkspaceError, match=r"nearest line is 'LEVELS = \[1, 2\]'"):
        workspace.edit(path, "LEVELS = [1]", "LEVELS = [2]")
    with pytest.raises(WorkspaceError, match="2 times"):
        workspace.edit(path, "S = ", "S: int = ")
    with pytest.raises(WorkspaceError, match="empty"):
        workspace.edit(path, "", "x")
    with pytest.raises(WorkspaceError, match="read_file"):
        workspace.edit(path, "qqqqqqqqqqqqqqqqqqqqqqqqqqqq", "x")
