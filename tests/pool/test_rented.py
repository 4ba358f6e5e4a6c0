"""What must not cost anything, what must not be left, and `metatrainer pool`."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from runpod_server import CHEAP, DEAR, RARE, FakeRunpod
from test_kill import CONTROLLER, EPISODES, PRICE, check
from test_local import make_order
from test_runpod import SEED, make, open_ledger, settings, with_pool
from typer.testing import CliRunner

from metatrainer.cli.app import app
from metatrainer.config import check_names
from metatrainer.errors import BudgetError, ConfigError, PoolError
from metatrainer.ledger import Ledger
from metatrainer.pool import kinds
from metatrainer.pool.pods import fleet_name
from metatrainer.pool.runpod import RunpodPool


def refused(fake: FakeRunpod, folder: Path, **more: Any) -> str:
    """What a pool that cannot be had says. It leaves nothing behind."""

    async def main() -> None:
        chosen = settings(fake, **more)
        with open_ledger(folder, chosen) as ledger:
            await make(chosen, ledger).start()

    with pytest.raises((ConfigError, PoolError, BudgetError)) as raised:
        asyncio.run(main())
    assert not fake.pods
    return str(raised.value)


def test_what_cannot_be_had_costs_nothing(
    runpod: FakeRunpod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(runpod, tmp_path, runpod={"gpus": ["NVIDIA A400"]})
    assert said == "runpod.gpus: unknown 'NVIDIA A400'; did you mean 'NVIDIA A40'?"
    said = refused(runpod, tmp_path, money={"usd_per_slot_hour": 0.4})
    assert "allows 0.4 an hour for a pod, and the cheapest of runpod.gpus, NVIDIA A40" in said
    assert "no GPU for" in refused(runpod, tmp_path, runpod={"gpus": [RARE]})
    assert "max_usd_per_hour is 0.4" in refused(runpod, tmp_path, money={"max_usd_per_hour": 0.4})
    assert "money.max_usd is" in refused(runpod, tmp_path, money={"max_usd": 0.01, "max_pods": 1})
    runpod.no_stock = {CHEAP, DEAR}
    assert "no GPU for" in refused(runpod, tmp_path)
    runpod.no_stock, runpod.credit = set(), False
    assert "has no credit (Your account balance is too low)" in refused(runpod, tmp_path)
    runpod.credit = True
    monkeypatch.setenv("RUNPOD_API_KEY", "stolen")
    assert "refuses the key in RUNPOD_API_KEY" in refused(runpod, tmp_path)
    assert not runpod.created
    monkeypatch.delenv("RUNPOD_API_KEY")
    with pytest.raises(ConfigError, match="needs an API key in RUNPOD_API_KEY"):
        check_names(settings(runpod))


def test_a_pod_that_is_no_good_is_ended(runpod: FakeRunpod, tmp_path: Path) -> None:
    name = f"{fleet_name('run', SEED)}-slot-00"
    said = refused(runpod, tmp_path, runpod={"python": "no-such-python"})
    assert "no-such-python" in said
    said = refused(runpod, tmp_path, runpod={"prepare": "echo no network >&2; exit 3"})
    assert "ended with 3: no network" in said
    runpod.pod_keys = False  # nothing would end it if its controller were gone
    assert "no RUNPOD_POD_ID and RUNPOD_API_KEY" in refused(runpod, tmp_path)
    runpod.pod_keys = True
    runpod.stuck.add(name)
    said = refused(runpod, tmp_path, runpod={"boot_seconds": 0.3})
    assert "did not answer in 0.3 s (it is PROVISIONING); it was ended" in said
    assert len(runpod.created) == 4


def test_a_host_key_that_changes_is_refused(runpod: FakeRunpod, tmp_path: Path) -> None:
    order = make_order(tmp_path, "job")

    async def action(pool: RunpodPool, ledger: Ledger) -> None:
        await pool._pods[0].close()
        pool._pods[0]._up = True
        await asyncio.to_thread(runpod.move, runpod.by_name("slot-00"), new_key=True)
        await pool._pods[0]._answers((await pool.fleet._mine())[0])

    with pytest.raises(PoolError, match=r"the host key of .* is not the one it had at first"):
        with_pool(runpod, tmp_path, action)
    assert not (order.job_dir / "attempt-1").exists() and not runpod.pods


def play_on(folder: Path, fake: FakeRunpod, seconds: float | None) -> bool:
    """Let a controller go on with the run, and kill it after a while. True: it came to the end."""
    command = [sys.executable, str(CONTROLLER), str(folder), str(EPISODES), str(PRICE), fake.url]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert controller.stdout and controller.stdout.readline()
    if seconds is not None:
        time.sleep(seconds)
        controller.kill()
    _, errors = controller.communicate(timeout=90)
    assert controller.returncode in (0, -signal.SIGKILL), errors.decode()[-3000:]
    return controller.returncode == 0


@pytest.mark.parametrize(("seed", "kills"), [(0, 4), pytest.param(1, 30, marks=pytest.mark.slow)])
def test_kills_of_the_controller_lose_nothing_and_leave_no_pod(
    runpod: FakeRunpod, tmp_path: Path, seed: int, kills: int
) -> None:
    rng = random.Random(seed)
    done = runs = 0
    while done < kills:
        folder = tmp_path / f"run-{runs}"
        runpod.variables["SIGNALS"] = str(folder / "jobs")
        runs += 1
        while done < kills and not play_on(folder, runpod, rng.uniform(0.0, 4.0)):
            done += 1
            if rng.random() < 0.3 and runpod.pods:
                runpod.vanish(rng.choice(list(runpod.pods.values())))
        done += 1
        assert play_on(folder, runpod, None)
        assert not runpod.pods
        check(folder)
        with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
            assert all(row.ended is not None for row in ledger.pods())


def command(*given: str) -> Result:
    return CliRunner().invoke(app, list(given))


def test_the_command_line_rents_shows_compares_and_ends(
    runpod: FakeRunpod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(kinds.BODIES, "embedded", "pool_bodies:OnPod")
    text = f"""
        [pool]
        kind = "runpod"
        workers = 2
        packed = 1
        [runpod]
        gpus = ["{CHEAP}"]
        url = "{runpod.url}"
        python = "{sys.executable}"
        [money]
        usd_per_slot_hour = 1.0
    """
    (tmp_path / "run.toml").write_text(text)
    dry = command("pool", "up", "run.toml", "--dry-run", "--json")
    asked = json.loads(dry.stdout)
    assert (asked["pods"], asked["body"]["gpu"]) == (2, {"id": CHEAP, "count": 1})
    assert not runpod.calls and not (tmp_path / "runs").exists()

    up = command("pool", "up", "run.toml", "--run-dir", "runs/one", "--json")
    assert up.exit_code == 0, up.stderr
    assert "train --resume runs/one" in up.stderr
    rows = json.loads(up.stdout)
    assert [(row["status"], row["state"]) for row in rows] == [("RUNNING", "dead")] * 2
    shown = command("pool", "status", "one", "--json")
    assert json.loads(shown.stdout) == rows

    bill = json.loads(command("pool", "cost", "one", "--json").stdout)
    assert [row["billed"] for row in bill] == [0.5, 0.5]
    assert all(0 < row["counted"] < 0.1 for row in bill)
    with Ledger(tmp_path / "runs/one/ledger.sqlite") as ledger:
        assert [row.billed for row in ledger.pods()] == [0.5, 0.5]
        # As long as somebody has the ledger, the run lives.
        live = command("pool", "down", "one")
        assert isinstance(live.exception, ConfigError) and "is going on" in str(live.exception)
        swept = command("pool", "sweep", "--config", "run.toml")
        assert "0 were ended" in swept.stdout and len(runpod.pods) == 2

    dry = command("pool", "sweep", "--config", "run.toml", "--dry-run")
    assert "2 would be ended" in dry.stdout and len(runpod.pods) == 2
    away = tmp_path / "away"
    away.mkdir()
    (away / "run.toml").write_text(text)
    monkeypatch.chdir(away)
    swept = command("pool", "sweep", "--config", "run.toml")
    assert "0 were ended" in swept.stdout and len(runpod.pods) == 2
    monkeypatch.chdir(tmp_path)
    down = command("pool", "down", "one")
    assert "2 were ended" in down.stdout and not runpod.pods
    with Ledger(tmp_path / "runs/one/ledger.sqlite", readonly=True) as ledger:
        assert all(row.ended is not None for row in ledger.pods())
