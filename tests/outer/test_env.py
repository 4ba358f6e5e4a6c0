"""Episodes as environments: the reward, the ends, and a step's entry in the ledger."""

from __future__ import annotations

import asyncio
import json

import pytest
import standin
import tiny
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout

from metatrainer.episode import Reply
from metatrainer.errors import ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer import renderer
from metatrainer.outer.env import Curriculum, EpisodeEnv, Stage
from metatrainer.outer.plan import training_step
from metatrainer.progress import Silent
from metatrainer.reward import Terms


class Scripted(TokenCompleter):
    """Says the same thing again and again and counts how often."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self.prompts: list[list[int]] = []

    async def __call__(self, model_input, stop, *, max_tokens=None):
        self.prompts.append(model_input.to_ints())
        return TokensWithLogprobs(self.tokens, [-1.0] * len(self.tokens))


class Fixed(standin.StandIn):
    """An episode of five turns whose reward says how many were played."""

    async def respond(self, message):
        reply = await super().respond(message)
        return Reply(reply.messages, len(self._heard) == 5)

    async def outcome(self) -> Terms:
        turns = len(self._heard)
        outcome = "context_full" if hasattr(self, "full") else "ok"
        return Terms(1.0, 0.5, 0.25, turns / 10, outcome)


class Heard(Silent):
    def __init__(self):
        self.episodes: list[str] = []
        self.steps: list[tuple[int, float]] = []
        self.messages: list[str] = []

    def message(self, text):
        self.messages.append(text)

    def episode_finished(self, id, terms):
        self.episodes.append(id)

    def step_finished(self, step, mean, terms, seconds):
        self.steps.append((step, mean))


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        yield ledger


@pytest.fixture
def tokenizer():
    return tiny.make_tokenizer()


def stage_for(ledger, tokenizer, *, context=None, make=Fixed, progress=None) -> Stage:
    return Stage(
        renderer=renderer.get("nano", tokenizer),
        max_tokens=24,
        context=context,
        make=lambda planned: make(planned, ledger),
        progress=progress or Silent(),
    )


def first_env(stage: Stage, tmp_path) -> EpisodeEnv:
    return EpisodeEnv(training_step(standin.settings_for(tmp_path), 0)[0][0], stage)


def play(env: EpisodeEnv, tokens: list[int]):
    policy = Scripted(tokens)
    return policy, asyncio.run(do_single_rollout(policy, env))


def test_the_reward_is_the_total_at_the_end_and_nothing_before(ledger, tokenizer, tmp_path):
    env = first_env(stage_for(ledger, tokenizer), tmp_path)
    _, trajectory = play(env, tokenizer.encode("hi<|im_end|>"))
    assert [t.reward for t in trajectory.transitions] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert trajectory.transitions[-1].metrics["quality"] == 0.5
    assert env.terms is not None and env.terms.total == 0.5


def test_each_prompt_extends_the_one_before_by_what_was_sampled(ledger, tokenizer, tmp_path):
    tokens = tokenizer.encode("hi<|im_end|>")
    policy, _ = play(first_env(stage_for(ledger, tokenizer), tmp_path), tokens)
    for before, after in zip(policy.prompts, policy.prompts[1:], strict=False):
        assert after[: len(before) + len(tokens)] == [*before, *tokens]


def test_messages_without_an_end_are_answered_until_the_episode_ends(ledger, tokenizer, tmp_path):
    policy, trajectory = play(first_env(stage_for(ledger, tokenizer), tmp_path), [65] * 24)
    assert len(trajectory.transitions) == 5
    assert "cut off after 24 tokens" in tokenizer.decode(policy.prompts[-1])


def test_an_episode_that_fills_the_context_ends_with_its_own_reward(ledger, tokenizer, tmp_path):
    stage = stage_for(ledger, tokenizer, context=400)
    env = first_env(stage, tmp_path)
    _, trajectory = play(env, [65] * 24)
    last = trajectory.transitions[-1]
    assert 1 < len(trajectory.transitions) < 5
    assert last.metrics["context_overflow"] == 1.0
    assert env.terms is not None and env.terms.outcome == "context_full"
    assert last.reward == pytest.approx(len(trajectory.transitions) / 10)
    assert all(t.ob.length + 24 <= 400 for t in trajectory.transitions)


def test_instructions_that_leave_no_room_are_a_setting_to_change(ledger, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"lower agent\.max_tokens"):
        play(first_env(stage_for(ledger, tokenizer, context=60), tmp_path), [65])


def test_a_step_is_entered_once_all_its_groups_are_over(ledger, tokenizer, tmp_path):
    heard = Heard()
    settings = standin.settings_for(tmp_path)
    stage = stage_for(ledger, tokenizer, progress=heard)
    groups = Curriculum(settings, stage, ledger).get_batch(1)
    policy = Scripted(tokenizer.encode("hi<|im_end|>"))

    async def one_by_one():
        await do_group_rollout(groups[0], policy)
        assert ledger.steps() == []
        await do_group_rollout(groups[1], policy)

    asyncio.run(one_by_one())
    (row,) = ledger.steps()
    assert (row.n, row.mean_reward) == (1, 0.5)
    assert json.loads(row.metrics)["outcomes"] == {"ok": 6}
    assert heard.steps == [(1, 0.5)]
    assert heard.episodes == [str(p.id) for g in training_step(settings, 1) for p in g]
