"""The Ray back end on a real cluster of several nodes, whose processes are killed mid-job."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metatrainer.config import parse_config
from metatrainer.errors import ConfigError
from metatrainer.pool.kinds import make_pool
from metatrainer.pool.ray import RayPool

SCENARIO = Path(__file__).with_name("ray_scenario.py")
OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Ray finds its own address by the network that it sees; on a bare loopback it always works."""


def possible() -> bool:
    if importlib.util.find_spec("ray") is None:
        return False
    return subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not possible():
        pytest.skip("needs Ray and the right to make a network namespace")
    command = [*OWN_NETWORK, sys.executable, str(SCENARIO), str(tmp_path_factory.mktemp("run"))]
    # Nodes, and the actors on them, import what this process can.
    path = os.pathsep.join([str(SCENARIO.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("REPORT"))


@pytest.mark.slow
def test_a_cluster_that_is_not_there_or_too_small_is_one_clear_message(
    report: dict[str, Any],
) -> None:
    assert "take 3 by their resource" in report["refused"]["few"]
    assert "no Ray cluster at 127.0.0.1:1" in report["refused"]["none"]
    assert "ray start --head" in report["refused"]["none"]


@pytest.mark.slow
def test_every_job_runs_once_in_warm_actors(report: dict[str, Any]) -> None:
    batch = report["batch"]
    assert (batch["outcomes"], batch["runs"]) == (["ok"], [1] * 12)
    assert batch["processes"] <= 3


@pytest.mark.slow
def test_a_job_outlives_its_controller_and_the_next_one_collects_it(
    report: dict[str, Any],
) -> None:
    expected = {"held": True, "alive": True, "outcomes": ["ok", "ok"], "runs": True}
    assert report["restart"] == expected


@pytest.mark.slow
def test_a_job_that_is_cancelled_stops_by_itself_or_with_its_actor(
    report: dict[str, Any],
) -> None:
    hung = report["hung"]
    assert (hung["hung_alive"], hung["heeding_alive"]) == (False, True)
    assert (hung["open"], hung["after"]) == ([True, True], "ok")


@pytest.mark.slow
def test_nodes_that_die_cost_attempts_and_no_job(report: dict[str, Any]) -> None:
    nodes = report["nodes"]
    assert nodes["outcomes"] == ["ok"]
    assert nodes["attempts"] >= 4  # two jobs on each node that died
    assert nodes["twice"] == [0] * 6


def test_the_settings_name_the_pool() -> None:
    with pytest.raises(ConfigError, match="needs workers"):
        parse_config({"pool": {"kind": "ray"}})
    settings = parse_config({"pool": {"kind": "ray", "workers": 3, "packed": 2}})
    pool = make_pool(settings, 7)
    assert isinstance(pool, RayPool) and pool.slots == 6


def test_without_an_address_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pool = make_pool(parse_config({"pool": {"kind": "ray", "workers": 1}}), 7)
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        asyncio.run(pool.start())


def test_a_run_on_a_cluster_that_is_not_there_creates_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    text = '[pool]\nkind = "ray"\naddress = "127.0.0.1:1"\nworkers = 1\n'
    (tmp_path / "run.toml").write_text(text)
    command = [sys.executable, "-m", "metatrainer", "train", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
