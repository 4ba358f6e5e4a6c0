"""Small submissions to run in the sandbox."""

import textwrap

SECRET = "a-key-that-only-the-host-knows"


def submission(at_import="", at_load="pass", at_reward="pass", returns="1.0", tasks=4):
    """A folder with an environment that does something at import, at load or in its reward."""
    text = f"""
import verifiers.v1 as vf
{textwrap.dedent(at_import)}

class Data(vf.TaskData):
    world: dict
    answer: str

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def correct(self, task, trace):
{textwrap.indent(textwrap.dedent(at_reward), " " * 8)}
        return {returns}

class Tasks(vf.Taskset[Task]):
    def load(self):
{textwrap.indent(textwrap.dedent(at_load), " " * 8)}
        for i in range({tasks}):
            yield Task(Data(prompt=f"question {{i}}", world={{"a": "b"}}, answer=f"answer {{i}}"))

__all__ = ["Tasks"]
"""
    return {"environment/__init__.py": text}


def chat(reply):
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": reply}]


def works(guest):
    """Whether the guest still runs a good submission."""
    files = submission(returns="float(len(trace.last_reply))")
    with guest.session(files, "environment", {}, 5) as session:
        scored = session.score([(0, chat("four")), (3, chat("eleven"))])
    return [result.reward for result in scored] == [4.0, 6.0]
