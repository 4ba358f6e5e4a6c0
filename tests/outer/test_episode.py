"""Real episodes (workspace, tools, validation in the sandbox) through the environment."""

from __future__ import annotations

import asyncio
import random
import re

import lab
import pytest
import tiny
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_single_rollout

from metatrainer import chat
from metatrainer.agent import policies
from metatrainer.agent.task import draw_task
from metatrainer.agent.validator import Validator
from metatrainer.ledger import Ledger
from metatrainer.outer import renderer
from metatrainer.outer.env import EpisodeEnv, Stage
from metatrainer.outer.episodes import episode_maker
from metatrainer.outer.plan import training_step
from metatrainer.progress import Silent

RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class Writes(TokenCompleter):
    """A scripted agent that reads and writes tokens."""

    def __init__(self, script: policies.Script, tokenizer):
        self.script, self.tokenizer = script, tokenizer
        self.read = 0

    async def __call__(self, model_input, stop, *, max_tokens=None):
        prompt = model_input.to_ints()
        heard = RESULT.findall(self.tokenizer.decode(prompt[self.read :]))
        replies = [{"role": "tool", "content": text} for text in heard]
        message = self.script.send(replies) if self.read else next(self.script)
        calls = [chat.call_text(c["name"], c["arguments"]) for c in message["tool_calls"]]
        text = "\n".join([*filter(None, [message["content"]]), *calls]) + chat.IM_END
        tokens = self.tokenizer.encode(text)
        self.read = len(prompt) + len(tokens)
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens))


@pytest.fixture(scope="module")
def validator():
    validator = Validator(sandboxes=1)
    yield validator
    asyncio.run(validator.close())


@pytest.mark.parametrize("script", ["reference", "broken"])
def test_an_agent_of_tokens_earns_what_the_same_agent_of_messages_does(tmp_path, validator, script):
    tokenizer = tiny.make_tokenizer()
    planned = training_step(lab.SETTINGS, 0)[0][0]
    task = draw_task(lab.SETTINGS, planned.family, planned.task_seed, lab.HIDDEN_SEED)

    def agent() -> policies.Script:
        return policies.SCRIPTS[script](task, random.Random(1))

    async def by_tokens(ledger: Ledger) -> EpisodeEnv:
        stage = Stage(
            renderer=renderer.get("nano", tokenizer),
            max_tokens=2048,
            context=None,
            make=episode_maker(lab.SETTINGS, tmp_path, ledger, lab.RecordingPool(), validator),
            progress=Silent(),
        )
        env = EpisodeEnv(planned, stage)
        trajectory = await do_single_rollout(Writes(agent(), tokenizer), env)
        assert trajectory.transitions[-1].reward == env.terms.total
        return env

    (tmp_path / "messages").mkdir()
    by_messages = lab.Lab(tmp_path / "messages", validator)
    by_messages.task = task
    expected = by_messages.follow(agent())
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create_run("r", "nano", lab.SETTINGS.model_dump_json(), 0, {}, lab.HIDDEN_SEED)
        env = asyncio.run(by_tokens(ledger))
        written = [row.content for row in ledger.messages(str(planned.id))]
    assert env.terms == expected
    assert (expected.outcome == "ok") == (script == "reference")
    by_messages_wrote = by_messages.ledger.messages(str(lab.ID))
    assert written == [row.content for row in by_messages_wrote]
