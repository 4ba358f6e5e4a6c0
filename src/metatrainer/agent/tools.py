"""The agent's six tools: their schemas, and one place that answers a call with text.

Knows nothing about episodes, pools or validation: what `get_baseline_scores` and `submit_job` do
is handed in. A wrong call is answered, never raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metatrainer.agent.workspace import Workspace
from metatrainer.errors import WorkspaceError
from metatrainer.shown import one_line

OUTPUT_CHARS = 6_000
"""Longer answers are cut."""


@dataclass(frozen=True)
class AgentTool:
    """One tool as the agent sees it. All arguments are strings and required."""

    name: str
    description: str
    arguments: Mapping[str, str]
    """Name of each argument -> what it is."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": "string", "description": text}
                    for name, text in self.arguments.items()
                },
                "required": list(self.arguments),
            },
        }


TOOLS = (
    AgentTool("list_files", "List the files of the workspace", {}),
    AgentTool("read_file", "Read one file", {"path": "like job.toml"}),
    AgentTool(
        "write_file",
        "Create or replace one file",
        {"path": "like job.toml", "content": "the whole text"},
    ),
    AgentTool(
        "edit_file",
        "Replace a piece of text that occurs once in a file",
        {"path": "like job.toml", "old": "the exact text now", "new": "the text to put there"},
    ),
    AgentTool("get_baseline_scores", "Scores of the untrained students, best first", {}),
    AgentTool("submit_job", "Validate the workspace; if it is valid, the job starts", {}),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}

Action = Callable[[], Awaitable[str]]


def schemas() -> list[dict[str, Any]]:
    """All tools as chat templates take them."""
    return [tool.schema for tool in TOOLS]


class Toolbox:
    """Answers tool calls on one workspace."""

    def __init__(self, workspace: Workspace, baseline_scores: Action, submit: Action):
        self._workspace = workspace
        self._actions = {"get_baseline_scores": baseline_scores, "submit_job": submit}

    async def call(self, name: str, arguments: Any) -> str:
        """The text that answers a call."""
        if problem := problem_with(name, arguments):
            return f"error: {problem}"
        if name in self._actions:
            return cut(await self._actions[name]())
        try:
            return cut(self._file_tool(name, **arguments))
        except WorkspaceError as error:
            return cut(f"error: {error}")

    def _file_tool(self, name: str, path: str = "", **texts: str) -> str:
        if name == "list_files":
            return "\n".join(self._workspace.paths()) or "no files yet"
        if name == "read_file":
            return self._workspace.read(path) or "(empty)"
        if name == "write_file":
            self._workspace.write(path, texts["content"])
            return f"wrote {path}"
        self._workspace.edit(path, texts["old"], texts["new"])
        return f"edited {path}"


def problem_with(name: str, arguments: Any) -> str | None:
    """What is wrong with a call, or None: an unknown tool, wrong argument names or types."""
    if name not in _BY_NAME:
        close = difflib.get_close_matches(str(name), _BY_NAME, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"tools: {', '.join(_BY_NAME)}"
        return f"no tool {str(name)[:40]!r}; {hint}"
    wanted = list(_BY_NAME[name].arguments)
    takes = f"{name} takes {', '.join(wanted) or 'no arguments'}"
    if not isinstance(arguments, Mapping):
        return f"arguments must be a JSON object; {takes}"
    if missing := [key for key in wanted if key not in arguments]:
        return f"missing {', '.join(missing)}; {takes}"
    if extra := [one_line(str(key), 40) for key in arguments if key not in wanted]:
        return f"unknown argument {', '.join(extra)}; {takes}"
    if wrong := [key for key in wanted if not isinstance(arguments[key], str)]:
        return f"{', '.join(wrong)} must be a string; {takes}"
    return None


def cut(text: str, limit: int = OUTPUT_CHARS) -> str:
    """The text, or its start with a note of how much was left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"
