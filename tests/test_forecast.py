"""What a run would do and cost, told without an account and without beginning anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metatrainer.cli.app import app
from metatrainer.config import load_config, parse_config
from metatrainer.errors import ConfigError
from metatrainer.forecast import forecast

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("TINKER_API_KEY", "RUNPOD_API_KEY", "RAY_ADDRESS"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.chdir(tmp_path)


def dry_run(*given: str) -> Any:
    done = CliRunner().invoke(app, ["train", *given, "--dry-run", "--json"], catch_exceptions=False)
    assert done.exit_code == 0 and not list(Path.cwd().iterdir())
    return json.loads(done.stdout)


def test_the_original_experiment_is_planned_without_an_account() -> None:
    plan = dry_run(str(CONFIGS / "seed.toml"))
    assert plan["episodes"] == {"heldout_before": 16, "train": 54 * 5 * 8, "after": 16}
    assert [student["from"] for student in plan["students"]] == [
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
    ]
    assert (plan["pool"]["kind"], plan["pool"]["slots"], len(plan["pool"]["gpus"])) == (
        "runpod",
        16,
        4,
    )
    assert plan["caps"] == {"max_usd": 1500.0, "max_usd_per_hour": 55.0, "max_pods": 16}
    # What the original says it cost, agent and pods, lies in the range.
    assert plan["usd"]["total"]["low"] < 1300 < plan["usd"]["total"]["high"]
    commands = {command["what"]: command for command in plan["commands"]}
    assert commands["rent a pod"]["command"] == "POST https://api.runpod.io/v2/pods"
    assert json.loads(commands["rent a pod"]["body"])["ports"] == ["22/tcp"]
    assert commands["a script on it"]["command"].startswith("ssh -F /dev/null")
    assert commands["the run"]["command"].endswith("/opt/prime-rl/.venv/bin/rl @ JOB/rl.toml")
    assert 'name = "Qwen/Qwen3-0.6B"' in commands["the run"]["body"]


def test_the_numbers_are_the_originals() -> None:
    settings = load_config(CONFIGS / "seed.toml")
    agent, outer, reward = settings.agent, settings.outer, settings.reward
    assert (agent.model, agent.lora_rank) == ("Qwen/Qwen3.6-35B-A3B", 8)
    assert (outer.learning_rate, outer.groups, outer.group_size, outer.steps) == (4e-5, 5, 8, 54)
    assert (reward.validation, reward.quality, reward.speed) == (0.35, 0.60, 0.05)
    assert (reward.uplift, reward.absolute, reward.no_submission) == (0.75, 0.25, -0.1)
    assert settings.heldout == ("triage",) and len(settings.families) == 5


def test_every_number_is_the_sum_of_its_parts() -> None:
    settings = load_config(CONFIGS / "seed.toml")
    plan = forecast(settings)
    parts = [usd for kind, usd in plan.usd.items() if kind != "total"]
    for end in ("low", "high"):
        assert getattr(plan.usd["total"], end) == pytest.approx(sum(getattr(p, end) for p in parts))
    slot = plan.jobs.high * plan.job_seconds.high * settings.money.usd_per_slot_hour / 3600 / 0.6
    assert plan.usd["slots"].high == pytest.approx(slot)
    doubled = forecast(load_config(CONFIGS / "seed.toml", ["outer.steps=108"]))
    ratio = doubled.tokens["sampled"].high / plan.tokens["sampled"].high
    assert math.isclose(ratio, (108 * 40 + 32) / (54 * 40 + 32))


def test_a_free_run_here_and_one_on_a_cluster_are_planned_too() -> None:
    nano = dry_run(str(CONFIGS / "nano.toml"))
    assert nano["usd"]["total"] == {"low": 0.0, "high": 0.0} and nano["commands"] == []
    ray = dry_run(
        str(CONFIGS / "nano.toml"),
        *("--set", "pool.kind=ray", "--set", "pool.workers=6", "--set", "pool.packed=2"),
    )
    assert (ray["pool"]["slots"], ray["pool"]["address"]) == (12, "RAY_ADDRESS")


def test_what_a_run_would_refuse_is_refused() -> None:
    for key, value, said in (
        ("students", '["qwen3-0.6"]', "unknown student 'qwen3-0.6'; did you mean 'qwen3-0.6b'"),
        ("money.max_pods", "8", "money.max_pods is 8 and pool.workers 16"),
        ("money.usd_per_slot_hour", "9", "16 slots cost 144 an hour"),
        ("evaluation.max_tokens", "512", "max_completion_tokens 512 leaves no room"),
    ):
        given = ["train", str(CONFIGS / "seed.toml"), "--dry-run", "--set", f"{key}={value}"]
        done = CliRunner().invoke(app, given)
        assert isinstance(done.exception, ConfigError) and said in str(done.exception)
    with pytest.raises(ConfigError, match="needs workers: how many pods"):
        parse_config({"pool": {"kind": "runpod"}})
    with pytest.raises(ConfigError, match=r"needs runpod\.gpus"):
        parse_config({"pool": {"kind": "runpod", "workers": 2}})
