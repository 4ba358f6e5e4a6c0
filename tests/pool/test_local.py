from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pool_bodies as bodies
import pytest

from metatrainer.config import LimitSettings, PoolSettings, RunSettings
from metatrainer.errors import PoolError
from metatrainer.pool import jobdir
from metatrainer.pool.base import JobOrder, JobResult, slots_of
from metatrainer.pool.local import LocalPool

STAND_IN = "pool_bodies:StandIn"
FILES = {"job.toml": "", "environment/__init__.py": "x = 1\n"}


def make_order(root: Path, name: str, seed: int = bodies.OK, attempt: int = 1) -> JobOrder:
    order = JobOrder(
        job_id=name,
        attempt=attempt,
        family="persona",
        job_dir=root / name,
        student="nano-wren",
        seed=seed,
    )
    jobdir.create(order, FILES)
    return order


def with_pool(
    action: Callable[[LocalPool], Awaitable[None]],
    workers: int = 1,
    packed: int = 1,
    seconds: float = 30.0,
    body: str = STAND_IN,
) -> None:
    """Run an action on a started pool, and check that no worker outlives it."""
    settings = RunSettings(
        pool=PoolSettings(workers=workers, packed=packed),
        limits=LimitSettings(max_seconds=seconds / 2 / packed),
    )
    pool = LocalPool(
        settings, secret_seed=7, body=body, grace_seconds=seconds / 2, stop_seconds=0.2
    )
    pids: list[int] = []

    async def main() -> None:
        await pool.start()
        pids.extend(pool.pids())
        try:
            await action(pool)
        finally:
            pids.extend(pool.pids())
            await pool.close()

    asyncio.run(main())
    assert len(pids) >= workers
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> list[int]:
    """Pids of everything below a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    direct = [int(c) for t in threads for c in (t / "children").read_text().split()]
    return direct + [pid for child in direct for pid in descendants(child)]


async def gone(pids: list[int]) -> None:
    while any(alive(pid) for pid in pids):
        await asyncio.sleep(0.01)


def runs(order: JobOrder) -> list[int]:
    path = order.job_dir / "runs"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def started(order: JobOrder) -> int:
    """Pid of the worker that has begun the job."""
    while not runs(order):
        await asyncio.sleep(0.01)
    return runs(order)[-1]


def test_jobs_share_the_slots_and_each_runs_once(tmp_path: Path) -> None:
    orders = [make_order(tmp_path, f"job-{i}") for i in range(5)]

    async def action(pool: LocalPool) -> None:
        results = await asyncio.gather(*(pool.run(order) for order in orders))
        assert [r.job_id for r in results] == [o.job_id for o in orders]
        assert {r.outcome for r in results} == {"ok"}

    with_pool(action, workers=2)
    assert [len(runs(order)) for order in orders] == [1] * 5
    assert len({runs(order)[0] for order in orders}) <= 2  # warm: no process for each job


def test_a_result_on_disk_is_collected_and_not_run_again(tmp_path: Path) -> None:
    order, stolen = make_order(tmp_path, "job"), make_order(tmp_path, "stolen")
    kept = JobResult(job_id="job", outcome="timeout", message="too slow")
    for each in (order, stolen):
        jobdir.write_result(each.job_dir, kept)

    async def action(pool: LocalPool) -> None:
        assert await pool.run(order) == kept
        assert (await pool.run(stolen)).outcome == "ok"  # the result there is another job's

    with_pool(action)
    assert (len(runs(order)), len(runs(stolen))) == (0, 1)


FAILURES = {
    bodies.JOB_ERROR: ("diverged", "not a number"),
    bodies.ENV_ERROR: ("env_error", "reward: division by zero"),
    bodies.BUG: ("crashed", "KeyError: 'engine'"),
    bodies.EXIT: ("crashed", "exit code 137; its last words: out of memory"),
    bodies.GARBAGE: ("crashed", "garbage: b'%PDF-1.4\\n'"),
    bodies.PRINT: ("ok", ""),
}


def test_a_job_that_fails_is_a_result_and_the_slot_goes_on(tmp_path: Path) -> None:
    async def action(pool: LocalPool) -> None:
        for seed, (outcome, says) in FAILURES.items():
            order = make_order(tmp_path, f"job-{seed}", seed)
            result = await pool.run(order)
            assert result.outcome == outcome
            assert result.message.endswith(says)
            assert jobdir.read_result(order.job_dir, order.job_id) == result
        assert (await pool.run(make_order(tmp_path, "good"))).outcome == "ok"

    with_pool(action)


def test_a_worker_killed_in_a_job_is_a_crash_and_is_replaced(tmp_path: Path) -> None:
    victim, after = make_order(tmp_path, "victim", bodies.HANG), make_order(tmp_path, "after")

    async def action(pool: LocalPool) -> None:
        running = asyncio.create_task(pool.run(victim))
        os.kill(await started(victim), signal.SIGKILL)
        result = await running
        assert (result.outcome, "signal 9" in result.message) == ("crashed", True)
        assert (await pool.run(after)).outcome == "ok"

    with_pool(action)
    assert runs(after) != runs(victim)


def test_the_sandbox_of_a_worker_goes_with_it(tmp_path: Path) -> None:
    order = make_order(tmp_path, "victim", bodies.HANG)
    families: list[list[int]] = []

    async def action(pool: LocalPool) -> None:
        running = asyncio.create_task(pool.run(order))
        pid = await started(order)
        families.append(descendants(pid))
        os.kill(pid, signal.SIGKILL)
        await running
        await asyncio.wait_for(gone(families[0]), 10)
        await pool.run(make_order(tmp_path, "after"))
        families.append(descendants(pool.pids()[0]))

    with_pool(action, body="pool_bodies:WithSandbox")
    assert all(families)
    asyncio.run(asyncio.wait_for(gone(families[1]), 10))


def test_a_job_past_its_deadline_is_killed(tmp_path: Path) -> None:
    slow, after = make_order(tmp_path, "slow", bodies.HANG), make_order(tmp_path, "after")

    async def action(pool: LocalPool) -> None:
        result = await pool.run(slow)
        assert result.outcome == "timeout"
        assert not alive(runs(slow)[0])
        assert (await pool.run(after)).outcome == "ok"

    with_pool(action, seconds=2.0)


def test_a_result_written_before_the_kill_counts(tmp_path: Path) -> None:
    order = make_order(tmp_path, "job", bodies.DONE_THEN_HANG)

    async def action(pool: LocalPool) -> None:
        running = asyncio.create_task(pool.run(order))
        pid = await started(order)
        while jobdir.read_result(order.job_dir, "job") is None:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert (await running).outcome == "ok"

    with_pool(action)


def test_closing_leaves_a_running_job_open(tmp_path: Path) -> None:
    order = make_order(tmp_path, "job", bodies.HANG)
    waiting = make_order(tmp_path, "waiting")
    tasks: list[asyncio.Task[JobResult]] = []

    async def action(pool: LocalPool) -> None:
        tasks.extend(asyncio.create_task(pool.run(o)) for o in (order, waiting))
        await started(order)
        await pool.close()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, PoolError)

    with_pool(action)
    assert jobdir.read_result(order.job_dir, "job") is None
    assert runs(waiting) == []


def test_a_cancelled_job_does_not_answer_the_next_one(tmp_path: Path) -> None:
    cancelled, after = make_order(tmp_path, "c", bodies.HANG), make_order(tmp_path, "after")

    async def action(pool: LocalPool) -> None:
        running = asyncio.create_task(pool.run(cancelled))
        await started(cancelled)
        running.cancel()
        assert (await pool.run(after)).job_id == "after"

    with_pool(action)
    assert jobdir.read_result(cancelled.job_dir, "c") is None


def test_an_attempt_is_started_once(tmp_path: Path) -> None:
    order = make_order(tmp_path, "job")
    assert jobdir.claim(order)
    again = order.model_copy(update={"attempt": 2})

    async def action(pool: LocalPool) -> None:
        assert "started before" in (await pool.run(order)).message
        assert (await pool.run(again)).outcome == "ok"

    with_pool(action)
    assert len(runs(order)) == 1


def test_baselines_cover_all_students_best_first(tmp_path: Path) -> None:
    async def action(pool: LocalPool) -> None:
        first, second = await asyncio.gather(pool.baselines("persona"), pool.baselines("persona"))
        assert first is second
        assert [s.student for s in first] == ["nano-finch", "nano-wren"]
        with pytest.raises(PoolError, match="no such family"):
            await pool.baselines("broken")
        assert (await pool.run(make_order(tmp_path, "after"))).outcome == "ok"

    with_pool(action)


def test_a_pool_whose_workers_do_not_start_says_why() -> None:
    async def action(_: LocalPool) -> None: ...

    with pytest.raises(PoolError, match="no model on disk"):
        with_pool(action, body="pool_bodies:NeverReady")


def test_workers_get_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")

    async def action(pool: LocalPool) -> None:
        environment = Path(f"/proc/{pool.pids()[0]}/environ").read_bytes()
        assert b"tml-secret" not in environment
        assert b"OMP_NUM_THREADS=1" in environment

    with_pool(action)


def test_each_worker_sees_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch was built for and CUDA may see is stood in for: there is no GPU here."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert slots_of(PoolSettings(packed=3)) == 6

    async def action(pool: LocalPool) -> None:
        orders = [make_order(tmp_path, f"job-{i}", bodies.GPU) for i in range(3)]
        results = await asyncio.gather(*(pool.run(order) for order in orders))
        assert sorted(result.message for result in results) == ["2", "2", "5"]

    with_pool(action, workers=3)


CONTROLLER = """
    import asyncio, json, sys
    from pathlib import Path
    from metatrainer.config import PoolSettings, RunSettings
    from metatrainer.pool.base import JobOrder
    from metatrainer.pool.local import LocalPool

    async def main():
        settings = RunSettings(pool=PoolSettings(workers=2, packed=1))
        pool = LocalPool(settings, 7, body="pool_bodies:StandIn")
        await pool.start()
        orders = [JobOrder.model_validate_json(line) for line in sys.argv[1:]]
        tasks = [asyncio.create_task(pool.run(order)) for order in orders]
        print(json.dumps({"workers": pool.pids(), "done": (await tasks[0]).job_id}), flush=True)
        await asyncio.gather(*tasks)

    asyncio.run(main())
"""


def test_a_controller_killed_mid_job_leaves_no_worker_and_resumes(tmp_path: Path) -> None:
    done, lost = make_order(tmp_path, "done"), make_order(tmp_path, "lost", bodies.HANG)
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONTROLLER)]
        + [order.model_dump_json() for order in (done, lost)],
        stdout=subprocess.PIPE,
    )
    assert controller.stdout
    report = json.loads(controller.stdout.readline())

    async def kill_it() -> None:
        await started(lost)
        controller.kill()
        controller.wait()
        await gone(report["workers"])

    asyncio.run(asyncio.wait_for(kill_it(), 30))
    controller.stdout.close()
    again = lost.model_copy(update={"attempt": 2, "seed": bodies.OK})

    async def action(pool: LocalPool) -> None:
        assert (await pool.run(done)).outcome == "ok"
        assert (await pool.run(again)).attempt == 2

    with_pool(action)
    assert (len(runs(done)), len(runs(lost))) == (1, 2)


def test_one_worker_runs_several_jobs_and_answers_as_they_end(tmp_path: Path) -> None:
    slow, quick = make_order(tmp_path, "slow", bodies.WAIT), make_order(tmp_path, "quick")

    async def action(pool: LocalPool) -> None:
        assert pool.slots == 3
        running = asyncio.create_task(pool.run(slow))
        await started(slow)
        first = await pool.run(quick)  # would never end if it waited for the slow one
        (slow.job_dir / "go").touch()
        second = await running
        assert (first.outcome, second.outcome) == ("ok", "ok")
        assert (first.job_id, second.job_id) == ("quick", "slow")
        assert (first.slot, second.slot) == (1, 0)
        assert first.began and second.began and second.began < first.began
        assert second.seconds > first.seconds > 0

    with_pool(action, packed=3)
    assert runs(slow) == runs(quick)


def test_no_more_jobs_run_at_a_time_than_a_worker_takes(tmp_path: Path) -> None:
    held = [make_order(tmp_path, f"held-{i}", bodies.WAIT) for i in range(2)]
    third = make_order(tmp_path, "third")

    async def action(pool: LocalPool) -> None:
        running = [asyncio.create_task(pool.run(order)) for order in (*held, third)]
        for order in held:
            await started(order)
        await asyncio.sleep(0.1)
        assert runs(third) == []
        (held[1].job_dir / "go").touch()
        assert (await running[2]).slot == 1
        (held[0].job_dir / "go").touch()
        await asyncio.gather(*running)

    with_pool(action, packed=2)


def test_a_job_that_heeds_its_deadline_does_not_harm_its_neighbour(tmp_path: Path) -> None:
    slow, good = make_order(tmp_path, "slow", bodies.HEED), make_order(tmp_path, "g", bodies.WAIT)

    async def action(pool: LocalPool) -> None:
        running = asyncio.create_task(pool.run(slow))
        await started(slow)
        await asyncio.sleep(1.5)
        neighbour = asyncio.create_task(pool.run(good))
        result = await running
        assert result.outcome == "timeout"
        assert jobdir.read_result(slow.job_dir, "slow") == result
        (good.job_dir / "go").touch()
        assert (await neighbour).outcome == "ok"

    with_pool(action, packed=2, seconds=3.0)
    assert runs(slow) == runs(good)  # the worker lived on


def test_a_hung_job_takes_its_neighbours_along_and_they_run_again(tmp_path: Path) -> None:
    hung = make_order(tmp_path, "hung", bodies.HANG)
    good = [make_order(tmp_path, f"good-{i}", bodies.WAIT) for i in range(2)]

    async def action(pool: LocalPool) -> None:
        running = asyncio.create_task(pool.run(hung))
        await started(hung)
        await asyncio.sleep(1.5)
        neighbours = [asyncio.create_task(pool.run(order)) for order in good]
        assert (await running).outcome == "timeout"
        for order, result in zip(good, await asyncio.gather(*neighbours)):
            assert (result.outcome, "another request" in result.message) == ("lost", True)
            assert jobdir.read_result(order.job_dir, order.job_id) is None
            assert result.seconds > 0
            (order.job_dir / "go").touch()
            again = order.model_copy(update={"attempt": 2})
            assert (await pool.run(again)).outcome == "ok"

    with_pool(action, packed=3, seconds=3.0)
    assert [len(runs(order)) for order in (hung, *good)] == [1, 2, 2]


def test_the_jobs_of_a_killed_worker_are_lost_and_then_run_alone(tmp_path: Path) -> None:
    orders = [make_order(tmp_path, f"job-{i}", bodies.WAIT) for i in range(3)]

    async def action(pool: LocalPool) -> None:
        tasks = [asyncio.create_task(pool.run(order)) for order in orders]
        for order in orders:
            pid = await started(order)
        os.kill(pid, signal.SIGKILL)
        for result in await asyncio.gather(*tasks):
            assert (result.outcome, "signal 9" in result.message) == ("lost", True)
        again = [order.model_copy(update={"attempt": 2}) for order in orders]
        tasks = [asyncio.create_task(pool.run(order)) for order in again]
        for order, task in zip(again, tasks):  # one after the other, in the order they came
            while len(runs(order)) < 2:
                await asyncio.sleep(0.01)
            (order.job_dir / "go").touch()
            assert (await task).slot == 0

    with_pool(action, packed=3)
    assert [len(runs(order)) for order in orders] == [2, 2, 2]


def test_a_job_that_kills_its_worker_is_found_out(tmp_path: Path) -> None:
    good, bad = make_order(tmp_path, "good", bodies.WAIT), make_order(tmp_path, "bad", bodies.EXIT)

    async def action(pool: LocalPool) -> None:
        neighbour = asyncio.create_task(pool.run(good))
        await started(good)
        lost = [await pool.run(bad), await neighbour]
        assert [result.outcome for result in lost] == ["lost", "lost"]
        (good.job_dir / "go").touch()
        again = [order.model_copy(update={"attempt": 2}) for order in (bad, good)]
        results = await asyncio.gather(*(pool.run(order) for order in again))
        assert [result.outcome for result in results] == ["crashed", "ok"]
        assert "out of memory" in results[0].message

    with_pool(action, packed=2)


@pytest.mark.parametrize("seed", [bodies.HEED, bodies.HANG])
def test_cancelling_one_job_of_several(tmp_path: Path, seed: int) -> None:
    cancelled = make_order(tmp_path, "cancelled", seed)
    other, after = make_order(tmp_path, "other", bodies.WAIT), make_order(tmp_path, "after")

    async def action(pool: LocalPool) -> None:
        tasks = [asyncio.create_task(pool.run(order)) for order in (cancelled, other)]
        await started(cancelled)
        await started(other)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        (other.job_dir / "go").touch()
        # Only a job that does not stop by itself is worth a worker with others in it.
        assert (await tasks[1]).outcome == ("ok" if seed == bodies.HEED else "lost")
        assert (await pool.run(after)).outcome == "ok"

    with_pool(action, packed=2)
    assert jobdir.read_result(cancelled.job_dir, "cancelled") is None
    assert (runs(after) == runs(cancelled)) == (seed == bodies.HEED)


def test_a_baseline_that_is_lost_with_a_neighbour_is_measured_again(tmp_path: Path) -> None:
    hung = make_order(tmp_path, "hung", bodies.EXIT)

    async def action(pool: LocalPool) -> None:
        measuring = asyncio.create_task(pool.baselines("slow"))
        await asyncio.sleep(0.3)
        assert (await pool.run(hung)).outcome == "lost"
        assert len(await measuring) == 2

    with_pool(action, packed=3)


@pytest.mark.parametrize("seed", [bodies.BUG_IN_EVAL, bodies.EXIT_IN_EVAL])
def test_a_fault_after_the_training_is_not_the_jobs(tmp_path: Path, seed: int) -> None:
    order = make_order(tmp_path, "job", seed)

    async def action(pool: LocalPool) -> None:
        assert (await pool.run(order)).outcome == "lost"
        assert jobdir.read_result(order.job_dir, "job") is None
        assert (await pool.run(order.model_copy(update={"attempt": 2}))).outcome == "ok"

    with_pool(action)


def test_a_worker_that_does_not_start_again_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_order(tmp_path, "bad", bodies.EXIT)
    good = [make_order(tmp_path, f"good-{i}") for i in range(3)]

    async def action(pool: LocalPool) -> None:
        first = pool.pids()[0]
        assert (await pool.run(bad)).outcome == "crashed"
        assert first not in pool.pids()
        monkeypatch.setattr(pool._workers[0], "_factory", "no_such_module:Body")
        for order in good:
            assert (await pool.run(order)).outcome == "ok"
        monkeypatch.setattr(pool._workers[1], "_factory", "no_such_module:Body")
        await pool._workers[1].kill()
        with pytest.raises(PoolError, match="no_such_module"):
            await pool.run(make_order(tmp_path, "after"))

    with_pool(action, workers=2)


def test_a_disk_without_room_for_the_result_does_not_end_the_job(tmp_path: Path) -> None:
    order = make_order(tmp_path, "job")
    blocked = order.job_dir / jobdir.RESULT
    blocked.mkdir()  # no file can take its place

    async def action(pool: LocalPool) -> None:
        result = await pool.run(order)
        assert (result.outcome, "cannot write" in result.message) == ("lost", True)
        blocked.rmdir()
        assert (await pool.run(order.model_copy(update={"attempt": 2}))).outcome == "ok"

    with_pool(action)
    with pytest.raises(PoolError, match=r"cannot write .*resume"):
        jobdir.write_durably(tmp_path / "no" / "folder", "text")
