"""Whole runs on stand-in episodes: to the end, killed with -9, uniform, misconfigured."""

from __future__ import annotations

import itertools
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import standin
import tinker
from tinker_cookbook import tokenizer_utils
from transformers import AutoTokenizer

from metatrainer.engine import Engine
from metatrainer.errors import AgentError, ConfigError
from metatrainer.ledger import Ledger
from metatrainer.progress import Silent
from metatrainer.reward import Terms
from metatrainer.tinker.client import SamplingClient, ServiceClient


class Heard(Silent):
    def __init__(self):
        self.events: list[tuple] = []
        self.episodes: list[str] = []

    def episode_finished(self, id, terms):
        self.episodes.append(id)

    def run_started(self, steps, episodes):
        self.events.append(("run", steps, episodes))

    def phase(self, name, episodes=0):
        self.events.append((name, episodes))

    def step_finished(self, step, mean, terms, seconds):
        self.events.append(("step", step))


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """A run that nothing disturbed, and what it said."""
    run_dir = tmp_path_factory.mktemp("straight")
    heard = Heard()
    standin.run(run_dir, standin.settings_for(model), progress=heard)
    return run_dir, heard.events


def content(run_dir: Path) -> dict:
    """Everything in a run's ledger that does not depend on time."""
    with Ledger(run_dir / "ledger.db", readonly=True) as ledger:
        return {
            "totals": {e.id: e.total for e in ledger.episodes()},
            "steps": [(s.n, s.mean_reward, s.metrics) for s in ledger.steps()],
            "turns": {
                e.id: [(t.tokens, t.logprobs) for t in ledger.turns(e.id)]
                for e in ledger.episodes()
            },
        }


def paid(run_dir: Path) -> list[str]:
    return (run_dir / "paid.log").read_text().splitlines()


def checkpoints(run_dir: Path) -> list[dict]:
    return [json.loads(x) for x in (run_dir / "logs/checkpoints.jsonl").read_text().splitlines()]


def test_a_run_goes_through_its_phases(straight):
    assert straight[1] == [
        ("run", 3, 22),
        ("baselines", 0),
        ("held-out before", 2),
        ("training", 18),
        ("step", 0),
        ("step", 1),
        ("step", 2),
        ("held-out after", 2),
    ]


def test_every_episode_is_played_and_every_step_entered(straight):
    found = content(straight[0])
    assert len(found["totals"]) == 22
    assert None not in found["totals"].values()
    assert [n for n, _, _ in found["steps"]] == [0, 1, 2]
    assert len(paid(straight[0])) == 22 * standin.TURNS


def test_the_untrained_students_are_measured_once_for_every_family(straight, model):
    with Ledger(straight[0] / "ledger.db", readonly=True) as ledger:
        rows = [(row.family, row.student, row.mean) for row in ledger.evals("baseline")]
    assert rows == [("one", "s", 0.5), ("two", "s", 0.5), ("three", "s", 0.5)]
    standin.Baselines.asked.clear()
    standin.run(straight[0], standin.settings_for(model), resume=True)
    assert standin.Baselines.asked == []


def test_every_step_leaves_a_checkpoint(straight):
    assert [c["batch"] for c in checkpoints(straight[0])] == [1, 2, 3, 3]


def test_training_moves_the_agent(straight):
    """The step's log-probabilities are those of the sampler, and the update changes them."""
    lines = (straight[0] / "logs/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    # sampled step by step and evaluated in one pass, in fp32
    assert all(abs(m["optim/kl_sample_train_v1"]) < 1e-4 for m in metrics)
    assert all(m["grad_norm"] > 0 for m in metrics)
    turns = content(straight[0])["turns"]
    assert turns["heldout_before-000-00-00"] != turns["heldout_after-000-00-00"]


def test_the_agent_learns(model, tmp_path):
    settings = standin.settings_for(
        model, steps=16, group_size=12, learning_rate=0.05, heldout_episodes=8
    )
    standin.run(tmp_path, settings)
    totals = content(tmp_path)["totals"]
    before, after = (
        sum(total for id, total in totals.items() if id.startswith(phase)) / 8
        for phase in ("heldout_before", "heldout_after")
    )
    assert after > before + 0.15  # over five seeds the gain was 0.34 to 0.63


def test_the_cookbooks_log_is_a_file_and_the_processs_logging_is_left_alone(straight, capfd):
    assert "Saved checkpoints" in (straight[0] / "logs/train.log").read_text()
    assert logging.getLogger("tinker_cookbook").handlers == []
    assert "Sampling batch" not in capfd.readouterr().err


def killed(run_dir: Path, model: Path, *arguments: str) -> None:
    """The run as a process of its own, which has to die of signal 9."""
    program = [sys.executable, standin.__file__, str(run_dir), str(model), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def test_a_run_that_is_killed_twice_ends_like_one_that_is_not(straight, model, tmp_path):
    """Killed in the middle of step 1's sampling, then while the state after it is written."""
    settings = standin.settings_for(model)
    before = 2 * standin.TURNS + 6 * standin.TURNS
    killed(tmp_path, model, "--kill-after-turns", str(before + 5))
    first = content(tmp_path)["turns"]
    assert [c["batch"] for c in checkpoints(tmp_path)] == [1]

    killed(tmp_path, model, "--resume", "--kill-in-save", "000002")
    assert [c["batch"] for c in checkpoints(tmp_path)] == [1]
    assert [s[0] for s in content(tmp_path)["steps"]] == [0, 1]

    heard = Heard()
    standin.run(tmp_path, settings, resume=True, progress=heard)
    # Step 1 is played again from the record: all of that is old news.
    assert heard.events == [
        ("run", 1, 6 + 2),
        ("baselines", 0),
        ("held-out before", 0),
        ("training", 6),
        ("step", 2),
        ("held-out after", 2),
    ]
    assert len(heard.episodes) == 6 + 2
    found, expected = content(tmp_path), content(straight[0])
    assert all(found["turns"][id][: len(turns)] == turns for id, turns in first.items())
    assert max(Counter(paid(tmp_path)).values()) == 1
    assert sorted(paid(tmp_path)) == sorted(paid(straight[0]))
    assert found["totals"] == expected["totals"]
    assert found["steps"] == expected["steps"]


def test_a_finished_run_has_nothing_left_to_do(straight, model):
    run_dir = straight[0]
    before = content(run_dir), paid(run_dir), checkpoints(run_dir)
    heard = Heard()
    standin.run(run_dir, standin.settings_for(model), resume=True, progress=heard)
    assert (content(run_dir), paid(run_dir), checkpoints(run_dir)) == before
    assert heard.events[0] == ("run", 0, 0)


def test_a_new_run_does_not_go_into_the_folder_of_another(straight, model):
    with pytest.raises(ConfigError, match="resume it"):
        standin.run(straight[0], standin.settings_for(model))


def test_a_checkpoint_record_that_was_torn_by_a_crash_is_dropped(model, tmp_path):
    settings = standin.settings_for(model, steps=1, heldout_episodes=0)
    standin.run(tmp_path, settings)
    with (tmp_path / "logs/checkpoints.jsonl").open("a") as file:
        file.write('{"name": "00000')
    longer = standin.settings_for(model, steps=2, heldout_episodes=0)
    standin.run(tmp_path, longer, resume=True)
    assert [c["batch"] for c in checkpoints(tmp_path)] == [1, 1, 2, 2]


class Uniform(standin.StandIn):
    """Every episode earns the same."""

    async def outcome(self) -> Terms:
        await super().outcome()
        return Terms(0.0, 0.0, 0.0, -0.1, "no_submission")


def test_steps_without_any_spread_of_rewards_do_not_stop_a_run(model, tmp_path):
    settings = standin.settings_for(model, steps=2, heldout_episodes=0)
    standin.run(tmp_path, settings, make=Uniform)
    assert [mean for _, mean, _ in content(tmp_path)["steps"]] == pytest.approx([-0.1, -0.1])
    lines = (tmp_path / "logs/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["grad_norm"] for line in lines] == [0.0, 0.0]


def test_a_hosted_service_that_fails_stops_the_run_to_be_resumed(model, tmp_path, monkeypatch):
    """Nothing is averaged in: what was sampled stays, and the same run comes to its end."""
    settings = standin.settings_for(model, steps=1)
    agent = settings.agent.model_copy(update={"backend": "tinker"})
    hosted = settings.model_copy(update={"agent": agent})
    service = ServiceClient(tmp_path / "hosted", lambda _: Engine(model), settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer_utils.register_tokenizer(agent.model, lambda: tokenizer)
    monkeypatch.setattr("metatrainer.outer.preflight.hosted", lambda: service)
    sample, asked = SamplingClient.sample_async, itertools.count()

    async def fail_once(self, *args, **kwargs):
        if next(asked) == 9:
            raise tinker.TinkerError("overloaded")
        return await sample(self, *args, **kwargs)

    monkeypatch.setattr(SamplingClient, "sample_async", fail_once)
    with pytest.raises(AgentError, match="the Tinker service failed: overloaded"):
        standin.run(tmp_path, hosted)
    before = content(tmp_path)
    assert before["steps"] == [] and sum(map(len, before["turns"].values())) >= 4
    standin.run(tmp_path, hosted, resume=True)
    after = content(tmp_path)
    assert [n for n, _, _ in after["steps"]] == [0]
    assert all(after["turns"][id][: len(turns)] == turns for id, turns in before["turns"].items())
    assert max(Counter(paid(tmp_path)).values()) == 1


def test_hosted_tinker_without_a_key_says_what_to_do(model, tmp_path, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    settings = standin.settings_for(model)
    agent = settings.agent.model_copy(update={"backend": "tinker"})
    with pytest.raises(ConfigError, match=r"TINKER_API_KEY; set it, or use agent\.backend"):
        standin.run(tmp_path, settings.model_copy(update={"agent": agent}))
