from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from metatrainer.agent.tools import OUTPUT_CHARS, Toolbox, schemas
from metatrainer.agent.workspace import Workspace


async def baseline_scores() -> str:
    return "nano-wren 0.31"


async def submit() -> str:
    return "accepted"


@pytest.fixture
def workspace() -> Workspace:
    return Workspace({"job.toml": "a = 1\n", "environment/__init__.py": ""})


def answer(workspace: Workspace, name: str, arguments: Any = None) -> str:
    box = Toolbox(workspace, baseline_scores, submit)
    return asyncio.run(box.call(name, {} if arguments is None else arguments))


def test_each_tool_does_its_work(workspace: Workspace) -> None:
    assert answer(workspace, "list_files") == "environment/__init__.py\njob.toml"
    assert answer(workspace, "read_file", {"path": "job.toml"}) == "a = 1\n"
    assert answer(workspace, "read_file", {"path": "environment/__init__.py"}) == "(empty)"
    edit = {"path": "job.toml", "old": "1", "new": "2"}
    assert answer(workspace, "edit_file", edit) == "edited job.toml"
    assert workspace.read("job.toml") == "a = 2\n"
    write = {"path": "notes.md", "content": "x"}
    assert answer(workspace, "write_file", write) == "wrote notes.md"
    assert workspace.read("notes.md") == "x"
    assert answer(workspace, "get_baseline_scores") == "nano-wren 0.31"
    assert answer(workspace, "submit_job") == "accepted"


def test_schemas_are_json_and_ask_for_every_argument() -> None:
    names = []
    for schema in json.loads(json.dumps(schemas())):
        names.append(schema["name"])
        assert schema["description"]
        parameters = schema["parameters"]
        assert parameters["required"] == list(parameters["properties"])
    assert names == [
        "list_files",
        "read_file",
        "write_file",
        "edit_file",
        "get_baseline_scores",
        "submit_job",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("submit", {}, "did you mean submit_job?"),
        ("fly", {}, "tools: list_files, read_file"),
        ("read_file", {}, "missing path; read_file takes path"),
        ("read_file", {"path": 3}, "path must be a string"),
        ("read_file", {"path": "job.toml", "line": "1"}, "unknown argument line"),
        ("submit_job", {"now": "yes"}, "submit_job takes no arguments"),
        ("write_file", "job.toml", "must be a JSON object; write_file takes path, content"),
        ("write_file", ["job.toml"], "must be a JSON object"),
        ("read_file", {"path": "jobs.toml"}, "did you mean job.toml?"),
        ("write_file", {"path": "/tmp/x.py", "content": ""}, "outside the workspace"),
        ("edit_file", {"path": "job.toml", "old": "b", "new": "c"}, "not found in job.toml"),
    ],
)
def test_wrong_calls_are_answered_in_short(
    workspace: Workspace, name: str, arguments: Any, says: str
) -> None:
    text = answer(workspace, name, arguments)
    assert text.startswith("error: ")
    assert says in text
    assert len(text) < 200
    assert workspace.paths() == ["environment/__init__.py", "job.toml"]


def test_long_answers_are_cut_with_a_note(workspace: Workspace) -> None:
    workspace.write("long.md", "x" * (OUTPUT_CHARS + 123))
    text = answer(workspace, "read_file", {"path": "long.md"})
    assert text.endswith("x\n[cut: 123 more characters]")
    echo = answer(workspace, "read_file", {"path": "y" * 50_000})
    assert len(echo) < 200
    assert len(answer(workspace, "z" * 50_000)) < 200
