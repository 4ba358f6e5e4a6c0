"""The session's process: submitted code, its tasks, and scores of conversations by its rewards.

Runs inside the sandbox, forked from a process that has imported verifiers. Standard library and
verifiers only. Knows nothing about namespaces or about the host; answers requests on a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

JOB = os.environ.get("JOB", "/tmp/job")
"""The submitted folder; elsewhere only where there is no sandbox."""

MIB = 1 << 20
ADDRESS_SPACE = 1536 * MIB
PROCESSES = 16
CPU_SECONDS = 300
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2


class Slow(BaseException):
    """The time of a call is nearly over; raised in the submitted code to learn where it is."""


def run(pipes: tuple[int, int, int], spec: dict[str, Any], filtered: bytes) -> NoReturn:
    """Become the session's process. Holds nothing of its keeper but its own three pipes.

    pipes: requests, answers and prints. filtered: the filter of system calls.
    """
    requests, answers, prints = pipes
    try:
        os.setsid()
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        requests, answers = os.dup2(requests, 3), os.dup2(answers, 4)
        os.closerange(5, 1 << 16)
        set_limits()
        refuse_calls(filtered)
        os.makedirs(JOB)
        os.chdir(JOB)
        write_files(spec["files"])
        serve(requests, answers, Submission(spec["module"], spec["args"]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def set_limits() -> None:
    for what, value in (
        (resource.RLIMIT_AS, ADDRESS_SPACE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def refuse_calls(filtered: bytes) -> None:
    """Take the filter on, for good."""
    length = len(filtered) // 8  # bytes of one instruction
    code = ctypes.create_string_buffer(filtered)
    descriptor = struct.pack("HxxxxxxP", length, ctypes.addressof(code))
    if ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, descriptor, 0, 0):
        raise OSError("the filter of system calls was not taken")


def write_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(JOB, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def serve(requests: int, answers: int, submission: Submission) -> None:
    """Answer requests until the pipe closes."""
    signal.signal(signal.SIGALRM, on_alarm)
    with open(requests, "rb") as lines:
        for line in lines:
            request = json.loads(line)
            reply = {"id": request["id"], **answer(submission, request)}
            view = memoryview(json.dumps(reply).encode() + b"\n")
            while view:
                view = view[os.write(answers, view) :]


def on_alarm(signum: int, frame: Any) -> NoReturn:
    raise Slow


def answer(submission: Submission, request: dict[str, Any]) -> dict[str, Any]:
    try:
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        if request["op"] == "load":
            value: Any = submission.load(request["limit"])
        else:
            value = submission.score(request["batch"])
        return {"value": value}
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return {"error": describe(error, submission.stage)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(Exception):
            sys.stdout.flush()


def describe(error: BaseException, stage: str) -> dict[str, Any]:
    """An exception as data: what kind, what it says, and where in the submission."""
    kind = {MemoryError: "memory", Slow: "timeout"}.get(type(error), stage)
    message = "not finished in time" if isinstance(error, Slow) else say(error)
    file, line = place(error)
    return {"kind": kind, "message": message, "file": file, "line": line}


def say(error: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{error.title}.{'.'.join(map(str, first['loc']))}: {first['msg']}"
    text = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"[:2000]


def place(error: BaseException) -> tuple[str | None, int | None]:
    """File and line in the submission: the innermost frame that lies in it."""
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno or 0))
    own = [(file[len(JOB) + 1 :], line) for file, line in places if file.startswith(JOB + "/")]
    return own[-1] if own else (None, None)


class Submission:
    """The submitted package: its tasks, and scores of conversations by their rewards."""

    def __init__(self, module: str, args: dict[str, Any]):
        self.module = module
        self.args = args
        self.stage = "import"
        self.tasks: list[Any] = []
        self._hooks: dict[int, tuple[list[Hook], list[Hook]]] = {}
        self._builder: TraceBuilder | None = None

    def load(self, limit: int) -> list[dict[str, Any]]:
        """Import the package and build its tasks, `limit` of them at most."""
        random.seed(0)  # a fork reseeds it; loading twice has to give the same tasks
        self.stage = "import"
        taskset = find_taskset(import_package(self.module))
        self.stage = "load"
        self.tasks = list(itertools.islice(iter(make(taskset, self.args)), limit))
        if self.tasks:
            check_names(self.tasks[0])
            self._builder = TraceBuilder(self.tasks[0])
        return [row(task) for task in self.tasks]

    def score(self, batch: list[tuple[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """A result for each (task index, conversation); one that fails leaves the others be."""
        self.stage = "reward"
        return asyncio.run(self._score_all(batch))

    async def _score_all(self, batch: list[Any]) -> list[dict[str, Any]]:
        return [await self._score_one(index, messages) for index, messages in batch]

    async def _score_one(self, index: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            return await self._rewards(index, messages)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            described = describe(error, "reward")
            return {"reward": None, "parts": {}, "error": described}

    async def _rewards(self, index: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        task = self.tasks[index]
        if index not in self._hooks:
            self._hooks[index] = hooks(task, "metric"), hooks(task, "reward")
        metrics, rewards = self._hooks[index]
        trace = self._builder.build(task, messages)  # type: ignore[union-attr]
        # As in the library: names are known beforehand, results of rewards only after all ran.
        trace.metrics.update((hook.name, None) for hook in metrics)
        trace.rewards.update((hook.name, None) for hook in rewards)
        measured = [pair for hook in metrics for pair in await hook(task, trace)]
        trace.metrics.clear()
        trace.metrics.update(measured)
        parts: dict[str, float] = {}
        total = 0.0
        for hook in rewards:
            for name, value in await hook(task, trace):
                parts[name] = value
                total += value * hook.weight
        if not rewards:
            raise TypeError("the task has no @vf.reward method")
        return {"reward": total, "parts": parts, "error": None}


def import_package(name: str) -> Any:
    """Import the submission. It comes last on the path: it can replace no library."""
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        raise ImportError(f"{name!r} is the name of an installed module; rename the package")
    sys.path.append(JOB)
    return importlib.import_module(name)


def find_taskset(module: Any) -> type:
    """The one Taskset that the package exports."""
    from verifiers.v1 import Taskset

    names = getattr(module, "__all__", None)
    if names is None:
        raise TypeError("the package has no __all__; write __all__ = ['NameOfYourTaskset']")
    exported = [getattr(module, name) for name in names]
    found = [x for x in exported if isinstance(x, type) and issubclass(x, Taskset)]
    if len(found) != 1:
        raise TypeError(f"__all__ exports {len(found)} Tasksets; export exactly one")
    return found[0]


def make(taskset: type, args: dict[str, Any]) -> Any:
    from verifiers.v1 import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    config = concrete_type(taskset, TasksetConfig) or TasksetConfig
    return taskset(config.model_validate(args))


def row(task: Any) -> dict[str, Any]:
    """A task as data: the prompt, and the fields that the submission's data class adds."""
    from verifiers.v1 import Task, TaskData

    own = set(type(task.data).model_fields) - set(TaskData.model_fields)
    return {
        "prompt": task.data.prompt_text,
        "system_prompt": task.data.system_prompt,
        "data": task.data.model_dump(mode="json", include=own),
        "key": None if type(task).key is Task.key else str(task.key),
    }


class Hook:
    """A @vf.reward or @vf.metric method, called as the library would."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.name = fn.__name__
        self.weight = float(getattr(fn, "_vf_weight", 1.0))
        self.wanted = [p for p in inspect.signature(fn).parameters if p in ("task", "trace")]

    async def __call__(self, task: Any, trace: Any) -> list[tuple[str, float]]:
        values = {"task": task.data, "trace": trace}
        pending = self.fn(**{name: values[name] for name in self.wanted})
        if not inspect.isawaitable(pending):
            raise TypeError(f"{self.name} is not async; write 'async def {self.name}'")
        result = await pending
        items = result.items() if isinstance(result, Mapping) else [(self.name, result)]
        return [(str(name), number(name, value)) for name, value in items]


def number(name: str, value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} returned {type(value).__name__}, not a number")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"{name} returned {result}; a reward must be finite")
    return result


def hooks(task: Any, kind: str) -> list[Hook]:
    """The task's methods of a kind, without those that need a runtime: there is none here."""
    found = task.hooks(kind)
    return [Hook(fn) for fn in found if not needs_runtime(fn)]


def check_names(task: Any) -> None:
    """Refuse rewards that take the place of the library's own methods: no rollout would end well.

    Here they would work, as scoring is done without those methods.
    """
    from verifiers.v1 import Task

    found = [fn.__name__ for kind in ("metric", "reward") for fn in task.hooks(kind)]
    if taken := sorted(set(found) & set(dir(Task))):
        raise TypeError(f"{taken[0]!r} is a method of verifiers' Task itself; rename your reward")


def needs_runtime(fn: Callable[..., Any]) -> bool:
    parameter = inspect.signature(fn).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class TraceBuilder:
    """Builds the library's traces from chat messages, by copying one that was built properly."""

    def __init__(self, task: Any):
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, TraceTask

        self.state = state_cls(type(task))
        info = TraceTask(type=type(task).__name__, data=task.data)
        agent = AgentInfo(config=AgentConfig())
        self.trace = vf.Trace(task=info, agent=agent, state=self.state(), is_completed=True)
        self.types = vf
        self.node = MessageNode(message=vf.UserMessage(content=""))

    def build(self, task: Any, messages: list[dict[str, Any]]) -> Any:
        """A finished trace of `messages`; the assistant's count as the model's own."""
        nodes = list(self._nodes(messages))
        return self.trace.model_copy(
            update={
                "task": self.trace.task.model_copy(update={"data": task.data}),
                "nodes": nodes,
                "calls": [],
                "rewards": {},
                "metrics": {},
                "info": {},
                "errors": [],
                "state": self.state(),
            }
        )

    def _nodes(self, messages: list[dict[str, Any]]) -> Iterator[Any]:
        for i, message in enumerate(messages):
            yield self.node.model_copy(
                update={
                    "parent": i - 1 if i else None,
                    "message": self._message(message),
                    "sampled": message["role"] == "assistant",
                }
            )

    def _message(self, message: dict[str, Any]) -> Any:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            calls = [self._call(call) for call in message.get("tool_calls") or ()]
            return self.types.AssistantMessage.model_construct(
                content=content, tool_calls=calls or None
            )
        if role == "tool":
            return self.types.ToolMessage.model_construct(
                tool_call_id=str(message.get("tool_call_id", "")),
                content=content or "",
                name=message.get("name"),
            )
        kind = self.types.SystemMessage if role == "system" else self.types.UserMessage
        return kind.model_construct(content=content or "")

    def _call(self, call: dict[str, Any]) -> Any:
        """OpenAI's nested form, or the flat one."""
        function = call.get("function") or call
        arguments = function["arguments"]
        return self.types.ToolCall.model_construct(
            id=str(call.get("id", "")),
            name=function["name"],
            arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        )
