"""The original experiment's config with small models, over rented pods that are on the loopback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runpod_server import CHEAP, FakeRunpod
from typer.testing import CliRunner

from metatrainer.cli.app import app
from metatrainer.ledger import Ledger
from metatrainer.pool import jobdir

SEED = Path(__file__).parents[2] / "configs/seed.toml"
SMALL = {
    "agent.model": '"nano-agent"',
    "agent.backend": '"embedded"',
    "agent.renderer": '"nano"',
    "agent.max_tokens": "256",
    "students": '["nano-wren", "nano-finch"]',
    "inner.trainer": '"embedded"',
    "outer.steps": "2",
    "outer.groups": "1",
    "outer.group_size": "8",
    "outer.heldout_episodes": "0",
    "limits.max_seconds": "60.0",
    "evaluation.items": "16",
    "families": '["persona"]',
    "pool.workers": "2",
    "pool.packed": "4",
    "runpod.prepare": '""',
    "runpod.gpus": f'["{CHEAP}"]',
    "runpod.python": f'"{sys.executable}"',
    "money.max_usd_per_hour": "60.0",
}


@pytest.mark.slow
def test_two_steps_over_rented_pods(
    runpod: FakeRunpod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = {**SMALL, "runpod.url": f'"{runpod.url}"'}
    given = [part for key, value in changed.items() for part in ("--set", f"{key}={value}")]
    done = CliRunner().invoke(app, ["train", str(SEED), "--run-dir", "run", *given])
    assert done.exit_code == 0, done.output[-2000:]
    with Ledger(Path("run/ledger.sqlite"), readonly=True) as ledger:
        assert len(ledger.steps()) == 2
        assert all(row.done for row in ledger.episodes("train"))
        ended = [job for job in ledger.jobs() if job.outcome == "ok"]
        assert ended and all(job.usd and job.usd > 0 for job in ended)
        for job in ended:
            result = jobdir.read_result(Path("run/jobs", job.id), job.id)
            assert result and result.adapter and (result.adapter / "adapter_config.json").exists()
        assert {row.ended is None for row in ledger.pods()} == {False}
    assert len(runpod.created) == 2 and not runpod.pods
