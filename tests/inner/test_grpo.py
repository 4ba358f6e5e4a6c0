"""GRPO: advantages and rows by hand, rollouts against the engine, and real learning."""

from types import SimpleNamespace

import pytest
from practice import Practice, settings

from metatrainer import families
from metatrainer.config import EvalSettings
from metatrainer.engine import Engine
from metatrainer.errors import EnvError, JobError
from metatrainer.inner.grpo import group_advantages, train_job, train_row
from metatrainer.inner.rollout import Limits, Question, Rollout, roll_out
from metatrainer.students import catalogue
from metatrainer.students.evaluate import evaluate


@pytest.fixture(scope="module")
def engine():
    return Engine(catalogue.verified_folder("nano-wren"))


def train(engine, spec, practice, family, seconds=60.0):
    deadline = engine.clock() + seconds
    return train_job(engine, spec, practice.load(), practice, family, 3, deadline)


def test_advantages_are_reward_minus_group_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], 2) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([1.0, 1.0, 0.0, 3.0], 2) == [0.0, 0.0, -1.5, 1.5]
    assert group_advantages([1.0, None, None, None], 2) == [0.0, 0.0, 0.0, 0.0]
    assert group_advantages([None, 1.0, 0.0], 3) == [0.0, 0.5, -0.5]


def test_a_row_trains_the_sampled_tokens_and_nothing_else():
    rollout = Rollout([1, 2, 3], [4, 5, 6, 7], [-0.1, -0.2, 0.0, -0.4], [True, True, False, True])
    row = train_row(rollout, 2.0)
    assert row.tokens == [1, 2, 3, 4, 5, 6]
    assert row.targets == [2, 3, 4, 5, 6, 7]
    assert row.advantages == [0, 0, 2.0, 2.0, 0, 2.0]
    assert row.old_logprobs == [0, 0, -0.1, -0.2, 0.0, -0.4]


@pytest.mark.parametrize("name", families.NAMES)
def test_rollouts_record_what_was_sampled(engine, name):
    """Ids and messages tell the same story, and log-probabilities are the model's own."""
    family = families.get(name)
    items = family.items("train", 2, 24)
    questions = [Question(i.prompt, i.world) for i in items]
    rollouts = roll_out(engine, None, family, questions, Limits(6, 48), list(range(24)))
    assert sum(r.finished for r in rollouts) > 12
    for rollout, item in zip(rollouts, items):
        assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.sampled)
        whole = rollout.prompt + rollout.tokens
        scored = engine.logprobs([whole], None)[0][len(rollout.prompt) - 1 :]
        for got, expected, sampled in zip(rollout.logprobs, scored, rollout.sampled):
            assert got == (pytest.approx(expected, abs=1e-3) if sampled else 0.0)
        text = engine.tokenizer.decode(rollout.tokens)
        for message in rollout.messages[1:]:
            assert message["content"] in text
            for call in message.get("tool_calls", ()):
                answer = family.call(item.world, call["name"], call["arguments"])
                assert f"<tool_response>\n{answer}\n" in text or message is rollout.messages[-1]
    alone = roll_out(engine, None, family, questions[5:6], Limits(6, 48), [5])[0]
    assert alone.tokens == rollouts[5].tokens


def test_a_good_job_teaches_and_a_wild_one_destroys(engine):
    """8 steps at a good rate lift the hidden score well over noise (n = 128: 2 errors < 0.09)."""
    family = families.get("persona")
    hidden = family.items("hidden", 4, 128)

    def score(adapter):
        return evaluate(engine, adapter, family, hidden, EvalSettings(), seed=0).mean

    before = score(None)
    good = train(engine, settings(), Practice(family), family)
    wild = train(engine, settings(learning_rate=1e-1, max_steps=4), Practice(family), family)
    assert score(good.adapter) > before + 0.15
    assert score(wild.adapter) < before
    assert good.rollouts == 512
    assert [row["step"] for row in good.curve] == list(range(8))
    assert good.curve[-1]["reward"] > good.curve[0]["reward"]


def test_the_same_seed_gives_the_same_job(engine):
    family = families.get("inventory")
    one, two = (train(engine, settings(max_steps=2), Practice(family), family) for _ in range(2))
    drop = [{k: v for k, v in row.items() if k != "seconds"} for row in one.curve]
    assert drop == [{k: v for k, v in row.items() if k != "seconds"} for row in two.curve]


def test_no_signal_changes_nothing(engine):
    family = families.get("persona")
    job = train(engine, settings(max_steps=2), Practice(family, reward=lambda i, r: 1.0), family)
    item = family.items("hidden", 0, 1)[0]
    ids = engine.tokenizer.encode(item.prompt)
    assert engine.logprobs([ids], job.adapter) == engine.logprobs([ids], None)
    assert job.curve[0]["dead_groups"] == 1.0


def test_failures_have_names_and_leave_no_adapter(engine):
    family = families.get("persona")
    before = dict(engine._adapters)
    with pytest.raises(JobError) as out_of_time:
        train(engine, settings(), Practice(family), family, seconds=-1.0)
    assert out_of_time.value.outcome == "timeout"
    with pytest.raises(EnvError) as broken:
        train(engine, settings(), Practice(family, reward=lambda i, r: None), family)
    assert broken.value.kind == "reward"
    long = Practice(family)
    long.items = [SimpleNamespace(**{**vars(i), "prompt": "who " * 600}) for i in long.items]
    with pytest.raises(JobError) as too_long:
        train(engine, settings(), long, family)
    assert too_long.value.outcome == "context"
    nan = Practice(family, reward=lambda i, r: float("nan"))
    with pytest.raises(JobError) as diverged:
        train(engine, settings(), nan, family)
    assert diverged.value.outcome == "diverged"
    assert engine._adapters == before


def test_rewards_that_fail_now_and_then_are_left_out_and_counted(engine):
    family = families.get("persona")
    flaky = Practice(family, reward=lambda i, r: None if len(set(r)) % 2 else float(r == i.answer))
    job = train(engine, settings(max_steps=2), flaky, family)
    assert job.curve[0]["reward_errors"] > 0
