"""Loading and scoring: the quick way gives what the library gives, and faults stay in their row."""

import asyncio
import importlib.util

import pytest
import verifiers.v1 as vf
from submissions import chat, submission
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask

from metatrainer.errors import EnvError

RICH = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    world: dict
    answer: str

class State(vf.State):
    seen: int = 3

class Task(vf.Task[Data, State]):
    @vf.reward(weight=0.5)
    async def right(self, task, trace):
        return task.answer == trace.last_reply

    @vf.reward(weight=2.0, priority=-1)
    async def graph(self, trace):
        texts = [str(m.content) for m in trace.messages] + [trace.transcript]
        calls = [c.name + c.arguments for m in trace.assistant_messages for c in m.tool_calls or []]
        count = trace.num_turns * 1000 + len(trace.tool_messages) * 100 + trace.num_branches
        return {"size": len("".join(texts + calls)) / 97, "count": count, "state": trace.state.seen}

    @vf.reward
    async def after_metric(self, trace):
        return trace.metrics["halves"] + sum(r is None for r in trace.rewards.values())

    @vf.reward
    async def needs_a_box(self, trace, runtime):
        return 100.0

    @vf.metric
    async def halves(self, task):
        return len(task.world) / 2

class Config(vf.TasksetConfig):
    size: int = 2

class Tasks(vf.Taskset[Task, Config]):
    def load(self):
        for i in range(self.config.size):
            data = Data(prompt=f"q{i}", system_prompt="be brief", world={"a": i}, answer=f"a{i}")
            yield Task(data)

__all__ = ["Tasks", "Task", "Data"]
"""


def call(number, arguments):
    function = {"name": "lookup", "arguments": arguments}
    return {"id": f"c{number}", "type": "function", "function": function}


CONVERSATIONS = [
    (0, [{"role": "user", "content": "q0"}, {"role": "assistant", "content": " a0 "}]),
    (
        1,
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": None, "tool_calls": [call(1, '{"x": "y"}')]},
            {"role": "tool", "tool_call_id": "c1", "name": "lookup", "content": "z"},
            {"role": "assistant", "content": "hm", "tool_calls": [call(2, "not json")]},
            {"role": "tool", "tool_call_id": "c2", "content": "error"},
            {"role": "assistant", "content": "a1"},
        ],
    ),
    (1, [{"role": "user", "content": "q1"}, {"role": "assistant", "content": ""}]),
    (0, [{"role": "user", "content": "q0"}]),
]


def typed(message):
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "tool": vf.ToolMessage}
    if message["role"] != "assistant":
        return kinds[message["role"]](**message)
    calls = [
        vf.ToolCall(id=c["id"], **c["function"]) for c in message.get("tool_calls") or ()
    ] or None
    return vf.AssistantMessage(content=message["content"], tool_calls=calls)


def by_the_library(module, index, messages):
    """Rewards of a trace that is built and scored as the library's documentation has it."""
    task = list(module.Tasks(module.Config()))[index]
    nodes = [
        MessageNode(parent=i - 1 if i else None, message=typed(m), sampled=m["role"] == "assistant")
        for i, m in enumerate(messages)
    ]
    trace = vf.Trace(
        task=TraceTask(type="Task", data=task.data),
        agent=AgentInfo(config=AgentConfig()),
        nodes=nodes,
        state=module.State(),
    )
    asyncio.run(task.score(trace))
    return trace


def test_scores_are_the_librarys(guest, tmp_path):
    file = tmp_path / "rich.py"
    file.write_text(RICH)
    spec = importlib.util.spec_from_file_location("rich", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with guest.session({"environment/__init__.py": RICH}, "environment", {}, 5) as session:
        scored = session.score(CONVERSATIONS)
    for (index, messages), result in zip(CONVERSATIONS, scored, strict=True):
        trace = by_the_library(module, index, messages)
        assert result.error is None
        assert result.reward == pytest.approx(trace.reward, abs=1e-12)
        assert result.parts == {name: reward.score for name, reward in trace.rewards.items()}
    assert len({result.reward for result in scored}) == len(scored)


def test_tasks_come_as_data(guest):
    with guest.session({"environment/__init__.py": RICH}, "environment", {"size": 5}, 5) as session:
        rows = session.load(limit=3)
    assert [row.prompt for row in rows] == ["q0", "q1", "q2"]
    assert rows[2].system_prompt == "be brief"
    assert rows[2].data == {"world": {"a": 2}, "answer": "a2"}
    assert len({row.key for row in rows}) == 3


def test_loading_is_the_same_each_time(guest):
    files = submission(at_load="import random; salt = str(random.random()) + str(hash('x'))")
    files = {name: text.replace('f"question {i}"', "salt + str(i)") for name, text in files.items()}
    loaded = []
    for _ in range(2):
        with guest.session(files, "environment", {}, 5) as session:
            loaded.append(session.load())
    assert loaded[0] == loaded[1]


def test_endless_tasksets_are_cut(guest):
    files = submission(tasks="10**9")
    with guest.session(files, "environment", {}, 5) as session:
        assert len(session.load(limit=100)) == 100


BAD_VALUES = {
    "None": ("None", "returned NoneType, not a number"),
    "text": ("'1.0'", "returned str, not a number"),
    "nan": ("float('nan')", "returned nan; a reward must be finite"),
    "infinite": ("{'x': float('-inf')}", "returned -inf; a reward must be finite"),
    "list": ("[1.0]", "returned list, not a number"),
    "raises": ("{}['key']", "KeyError: 'key'"),
}


@pytest.mark.parametrize("value,said", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_failing_reward_spoils_only_its_row(guest, value, said):
    files = submission(returns=f"({value}) if trace.last_reply == 'bad' else 0.25")
    with guest.session(files, "environment", {}, 5) as session:
        good, bad, also = session.score([(0, chat("x")), (1, chat("bad")), (2, chat("y"))])
    assert (good.reward, also.reward) == (0.25, 0.25)
    assert bad.reward is None
    assert said in bad.error
    if value.startswith("{}"):
        assert (bad.file, bad.line) == ("environment/__init__.py", 13)


def test_a_reward_that_is_not_async_is_told(guest):
    text = submission()["environment/__init__.py"].replace("async def", "def")
    with guest.session({"environment/__init__.py": text}, "environment", {}, 5) as session:
        assert "write 'async def correct'" in session.score([(0, chat("x"))])[0].error


STRUCTURE = {
    "no __all__": ("__all__ = ", "names = ", "import", "no __all__"),
    "no taskset": ('["Tasks"]', '["Task"]', "import", "exports 0 Tasksets"),
    "two tasksets": (
        '__all__ = ["Tasks"]',
        'class Other(Tasks): pass\n__all__ = ["Tasks", "Other"]',
        "import",
        "exports 2 Tasksets",
    ),
    "syntax": ("class Data", "class class Data", "import", "invalid syntax"),
    "missing field": (', answer=f"answer {i}"', "", "load", "Data.answer: Field required"),
    "not a task": ("yield Task(", "yield (", "load", "AttributeError"),
}


@pytest.mark.parametrize("old,new,kind,said", STRUCTURE.values(), ids=STRUCTURE)
def test_faults_of_structure_have_a_kind_and_a_text(guest, old, new, kind, said):
    text = submission()["environment/__init__.py"]
    assert old in text
    files = {"environment/__init__.py": text.replace(old, new)}
    with guest.session(files, "environment", {}, 5) as session, pytest.raises(EnvError) as caught:
        session.load()
    assert caught.value.kind == kind
    assert said in caught.value.message


def test_unknown_arguments_are_refused_by_the_taskset(guest):
    session = guest.session(submission(), "environment", {"sizes": 3}, 5)
    with session, pytest.raises(EnvError, match="sizes"):
        session.load()


def test_a_session_after_an_error_still_answers(guest):
    """A failed call that did not end the process leaves the session usable."""
    files = submission(at_reward="import sys\nif trace.last_reply == 'x': sys.exit(1)")
    with guest.session(files, "environment", {}, 5) as session:
        with pytest.raises(EnvError):
            session.score([(0, chat("x"))])
        assert session.score([(0, chat("y"))])[0].reward == 1.0


def test_a_task_that_was_not_loaded_cannot_be_scored(guest):
    session = guest.session(submission(tasks=2), "environment", {}, 5)
    with session, pytest.raises(IndexError):
        session.score([(2, chat("x"))])


def test_a_reward_must_not_take_the_place_of_the_librarys_own_method(guest):
    files = {p: t.replace("def correct", "def score") for p, t in submission().items()}
    with (
        guest.session(files, "environment", {}, 5) as session,
        pytest.raises(EnvError, match="rename your reward"),
    ):
        session.load()
