"""What is handled by policy is counted, and moves neither the baseline nor the agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import standin
import tiny
from test_env import Heard, Scripted, stage_for
from tinker_cookbook.rl.data_processing import compute_advantages
from tinker_cookbook.rl.rollouts import do_group_rollout

from metatrainer.ledger import Ledger
from metatrainer.outer import handled
from metatrainer.outer.env import Curriculum
from metatrainer.pool.base import LOST
from metatrainer.reward import Terms


def terms(total: float, outcome: str = "ok") -> Terms:
    return Terms(1.0, 0.0, 0.0, total, outcome)


def test_an_episode_that_errored_gets_the_mean_of_the_others() -> None:
    group = [terms(0.2), terms(0.35, LOST), terms(0.6), terms(0.35, LOST)]
    assert handled.rewards(group) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert handled.rewards([terms(0.35, LOST)] * 2) == [0.0, 0.0]
    # Exactly equal, or a group without spread would be trained on.
    assert len(set(handled.rewards([terms(0.1)] * 3 + [terms(0.35, LOST)]))) == 1
    crashed = [terms(0.2), terms(0.35, "crashed")]
    assert handled.rewards(crashed) == [0.2, 0.35], "a job that crashed is its agent's doing"


class Unlucky(standin.StandIn):
    """The second episode of each group loses its job, the third fills the context; each leaves in
    the ledger one message with a call and one without."""

    async def respond(self, message):
        n = len(self._heard)
        calls = [{"id": "0", "name": "say", "arguments": {}}] if n == 0 else []
        said = {**message, "tool_calls": calls}
        self._ledger.record_message(str(self.id), n, "assistant", json.dumps(said))
        return await super().respond(message)

    async def outcome(self) -> Terms:
        found = (
            terms(0.1 * self.id.group),
            terms(0.35, LOST),
            terms(-0.1 * self.id.group, "context_full"),
        )[self.id.index]
        self._ledger.finish_episode(
            str(self.id), 1.0, 0.0, 0.0, found.total, found.outcome, None, None, None, 0.0
        )
        return found


def test_a_step_tells_what_it_left_out(tmp_path: Path) -> None:
    """Two groups of three: in the first all that count earn 0, in the second 0.1 and -0.1."""
    heard = Heard()
    with Ledger(tmp_path / "ledger.db") as ledger:
        tokenizer = tiny.make_tokenizer()
        stage = stage_for(ledger, tokenizer, make=Unlucky, progress=heard)
        groups = Curriculum(standin.settings_for(tmp_path), stage, ledger).get_batch(0)
        policy = Scripted(tokenizer.encode("hi<|im_end|>"))
        played = [asyncio.run(do_group_rollout(group, policy)) for group in groups]
        (row,) = ledger.steps()
    assert row.mean_reward == pytest.approx(0.0)
    # Advantages are 32-bit floats.
    for group, expected in zip(played, ([0, 0, 0], [0.1, 0, -0.1]), strict=True):
        assert compute_advantages([group])[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert json.loads(row.metrics)["handled"] == {
        "messages": 12,
        "unread": 6,
        "episodes": 6,
        "context_full": 2,
        "errored": 2,
        "groups": 2,
        "dead_groups": 1,
    }
    assert heard.messages == [
        "step 0: 6 of 12 messages held no call, 2 of 6 episodes filled the context, 2 of 6 episodes"
        " lost their job and do not count, 1 of 2 groups had equal rewards and were left out"
    ]
