"""The same folder through the verifiers API and through the embedded engine's sandbox.

The student is a stand-in server on the loopback; harness, rollout and scoring are the library's.
"""

import asyncio
import json
import sys

import pytest
from chat_server import ChatServer, call, say

from metatrainer import families
from metatrainer.agent.scaffold import job_toml
from metatrainer.inner.talk import tool_schemas
from metatrainer.jobs.compile import Target, compile_job
from metatrainer.jobs.spec import parse_job_toml

PERSONA = families.get("persona")


def reference(family):
    """A good job of a family, as a folder of files."""
    files = family.starter_files()
    package = files["environment/__init__.py"]
    for old, new in (
        (f"LEVELS = [{family.levels[0]}]", f"LEVELS = {list(family.levels)}"),
        ("self.data.answer in reply", "reply == self.data.answer"),
    ):
        assert old in package
        package = package.replace(old, new)
    settings = {"batch_size": 64, "group_size": 8, "max_steps": 20}
    return {
        **files,
        "environment/__init__.py": package,
        "job.toml": job_toml("nano-wren", "3e-3", **settings),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a job's package where verifiers imports it; forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NO_KEY", "none")

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    yield write
    for name in [n for n in sys.modules if n.partition(".")[0] == "environment"]:
        del sys.modules[name]


def environment(files, family):
    """The environment that the compiled config names, made by the library."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config = compile_job(parse_job_toml(files["job.toml"]), family, Target(model="x/y")).config
    return load_environment(resolve_env_config(config["orchestrator"]["train"]["source"][0]["env"]))


def play(env, server, tasks):
    """Episodes of some tasks, run by the library against the server."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    client = EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY")
    context = ModelContext(model="student", client=client, sampling=vf.SamplingConfig())

    async def run():
        async with env.serving():
            return [await env.run_slot(env.slots(task)[0], context) for task in tasks]

    return asyncio.run(run())


def flat(messages):
    """The messages of a trace as the embedded engine hands them to the sandbox, without ids."""
    rows = []
    for m in messages:
        calls = [(c.name, c.arguments) for c in getattr(m, "tool_calls", None) or ()]
        rows.append((m.role, m.content or "", calls))
    return rows


class Script:
    """A student that says the same in every conversation, message by message."""

    def __init__(self, *answers):
        self.answers = answers

    def __call__(self, body, adapters):
        said = sum(m["role"] == "assistant" for m in body["messages"])
        return self.answers[min(said, len(self.answers) - 1)]


def first_call(family):
    tool = family.tools[0]
    return call(tool.name, dict.fromkeys(tool.parameters["required"], "nobody"))


@pytest.mark.parametrize("name", families.NAMES)
def test_the_same_folder_means_the_same_in_both(name, folder, guest):
    family = families.get(name)
    files = reference(family)
    folder(files)
    env = environment(files, family)
    tasks = list(env.taskset.load())
    with guest.session(files, "environment", {}, 20) as session:
        rows = session.load()
        # The same tasks, in the same order.
        assert [t.data.prompt for t in tasks] == [r.prompt for r in rows]
        assert [t.data.model_dump()["world"] for t in tasks] == [r.data["world"] for r in rows]
        # The same conversations, a right one of each kind and wrong ones.
        right = {t.data.prompt: say(t.data.answer) for t in tasks}
        used = first_call(family)

        def answer(body, adapters):
            said = sum(m["role"] == "assistant" for m in body["messages"])
            prompt = body["messages"][0]["content"]
            wrong = tasks[0].data.prompt == prompt
            return used if not said else say("nonsense") if wrong else right[prompt]

        with ChatServer(answer) as server:
            episodes = play(env, server, tasks[:4])
        assert [[e.errors, [t.errors for t in e.traces]] for e in episodes] == [[[], [[]]]] * 4
        traces = [e.traces[0] for e in episodes]
        # The same tool schemas.
        assert server.asked[0]["tools"] == tool_schemas(family)
        assert [t["function"] for t in server.asked[0]["tools"]] == [t.schema for t in family.tools]
        # The same answers of tools, and the same rewards.
        recorded = []
        for i, trace in enumerate(traces):
            messages = flat(trace.branches[-1].messages)
            assert [m[0] for m in messages] == ["user", "assistant", "tool", "assistant"]
            ((called, arguments),) = messages[1][2]
            world = rows[i].data["world"]
            assert messages[2][1] == family.call(world, called, json.loads(arguments))
            recorded.append(
                (
                    i,
                    [
                        {
                            "role": role,
                            "content": content,
                            **(
                                {"tool_calls": [{"name": n, "arguments": a} for n, a in calls]}
                                if calls
                                else {}
                            ),
                        }
                        for role, content, calls in messages
                    ],
                )
            )
        scores = [s.reward for s in session.score(recorded)]
        library = [sum(r.score * r.weight for r in t.rewards.values()) for t in traces]
        assert scores == library == [0.0, 1.0, 1.0, 1.0]


MISTAKES = {
    "unknown tool": (call("fly", {}), "error: no tool fly"),
    "wrong arguments": (call("lookup", {"who": "x"}), "error: lookup takes"),
    "no JSON": (call("lookup", "{oops"), "error: the tool call is not JSON"),
    "no object": (call("lookup", "[1]"), 'error: "arguments" must be an object'),
    "left in the text": (
        say('<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'),
        "<tool_response>\nerror: no tool fly\n</tool_response>",
    ),
    "never closed": (say("<tool_call>{"), "error: a <tool_call> was not closed"),
}


@pytest.mark.parametrize(("first", "answered"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_answered_with_text(first, answered, folder):
    files = reference(PERSONA)
    folder(files)
    env = environment(files, PERSONA)
    with ChatServer(Script(first, say("done"))) as server:
        (episode,) = play(env, server, list(env.taskset.load())[:1])
    assert episode.ok
    messages = flat(episode.traces[0].branches[-1].messages)
    assert answered in messages[-2][1] and messages[-1][1] == "done"


def test_turns_end_as_the_config_says_and_a_cut_off_message_ends_it_all(folder):
    files = reference(PERSONA)
    folder(files)
    env = environment(files, PERSONA)
    tasks = list(env.taskset.load())[:1]
    used = first_call(PERSONA)
    with ChatServer(Script(used)) as server:
        (episode,) = play(env, server, tasks)
    assert episode.ok and len(server.asked) == 6
    assert episode.traces[0].stop_condition == "max_turns"
    message, _ = used
    with ChatServer(Script((message, "length"))) as server:
        (episode,) = play(env, server, tasks)
    assert episode.ok and len(server.asked) == 1


def test_a_server_that_fails_is_an_error_of_the_rollout(folder):
    files = reference(PERSONA)
    folder(files)
    env = environment(files, PERSONA)
    with ChatServer(lambda body, adapters: 500) as server:
        (episode,) = play(env, server, list(env.taskset.load())[:1])
    assert not episode.ok and "500" in episode.traces[0].last_error.message
