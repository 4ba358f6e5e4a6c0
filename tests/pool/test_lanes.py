from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from metatrainer.errors import PoolError
from metatrainer.pool.lanes import COOL_SECONDS, ONE_FAULT_SECONDS, Lane, Lanes


def with_lanes(action: Callable[[Lanes], Awaitable[None]], workers: int, packed: int) -> None:
    async def main() -> None:
        await action(Lanes(workers, packed))

    asyncio.run(asyncio.wait_for(main(), 100))


async def settled(task: asyncio.Task[Lane]) -> bool:
    """Whether a lane is given without anybody giving one back."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task.done()


def test_idle_workers_come_first_then_those_of_the_same_base() -> None:
    async def action(lanes: Lanes) -> None:
        bases = "wren", "finch", "finch", "finch", "finch", "wren"
        taken = [await lanes.take(base) for base in bases]
        # The fourth finch finds the others' worker full and goes to the one of the wrens.
        assert [lane.worker for lane in taken] == [0, 1, 1, 1, 0, 0]
        assert [lane.slot for lane in taken] == [0, 3, 4, 5, 1, 2]

    with_lanes(action, workers=2, packed=3)


def test_jobs_of_one_base_are_spread_evenly_over_the_workers() -> None:
    async def action(lanes: Lanes) -> None:
        taken = [(await lanes.take("wren")).worker for _ in range(6)]
        assert sorted(taken) == [0, 0, 0, 1, 1, 1]

    with_lanes(action, workers=2, packed=4)


def test_who_came_first_is_served_first_and_a_lane_is_used_again() -> None:
    async def action(lanes: Lanes) -> None:
        lane = await lanes.take("wren")
        tasks = [asyncio.create_task(lanes.take("wren")) for _ in range(2)]
        assert not await settled(tasks[0])
        lanes.give_back(lane)
        assert await tasks[0] == lane
        assert not await settled(tasks[1])

    with_lanes(action, workers=1, packed=1)


def test_a_job_that_wants_a_worker_to_itself_is_not_starved() -> None:
    async def action(lanes: Lanes) -> None:
        first, second = await lanes.take("wren"), await lanes.take("wren")
        alone = asyncio.create_task(lanes.take("wren", alone=True))
        late = asyncio.create_task(lanes.take("wren"))
        assert not await settled(late)  # there is room, but it is kept free
        lanes.give_back(first)
        assert not await settled(alone)
        lanes.give_back(second)
        lane = await alone
        assert not await settled(late)  # nobody joins it
        lanes.give_back(lane)
        assert await late

    with_lanes(action, workers=1, packed=3)


def test_other_workers_go_on_while_one_is_emptied() -> None:
    async def action(lanes: Lanes) -> None:
        for _ in range(2):
            await lanes.take("wren")
        alone = asyncio.create_task(lanes.take("wren", alone=True))
        assert not await settled(alone)
        assert [(await lanes.take("wren")).worker for _ in range(2)] == [1, 1]

    with_lanes(action, workers=2, packed=3)


@pytest.mark.parametrize("given", [False, True])
def test_a_lane_is_not_lost_when_its_taker_is_cancelled(given: bool) -> None:
    async def action(lanes: Lanes) -> None:
        lane = await lanes.take("wren")
        waiting = asyncio.create_task(lanes.take("wren"))
        await settled(waiting)
        if given:  # it gets the lane and is cancelled before it can use it
            lanes.give_back(lane)
        waiting.cancel()
        if not given:
            lanes.give_back(lane)
        assert await lanes.take("wren") == lane

    with_lanes(action, workers=1, packed=1)


def test_those_in_line_are_told_when_the_pool_closes() -> None:
    async def action(lanes: Lanes) -> None:
        await lanes.take("wren")
        waiting = asyncio.create_task(lanes.take("wren"))
        await settled(waiting)
        lanes.close()
        for task in (waiting, lanes.take("wren")):
            with pytest.raises(PoolError, match="closed"):
                await task

    with_lanes(action, workers=1, packed=1)


def test_the_longest_of_those_in_line_goes_first() -> None:
    async def action(lanes: Lanes) -> None:
        lane = await lanes.take("wren")
        served: list[float] = []

        async def job(expected: float) -> None:
            lane = await lanes.take("wren", expected=expected)
            served.append(expected)
            lanes.give_back(lane)

        tasks = [asyncio.create_task(job(seconds)) for seconds in (3, 9, 1, 7)]
        await asyncio.sleep(0)
        lanes.give_back(lane)
        await asyncio.gather(*tasks)
        assert served == [9, 7, 3, 1]

    with_lanes(action, workers=1, packed=1)


async def fail(lanes: Lanes, worker: int, jobs: int = 1) -> None:
    """Have jobs of a worker end because it failed; the other one is full meanwhile."""
    taken = [await lanes.take("wren") for _ in range(2 * jobs)]
    for lane in taken:
        lane.faulty = lane.worker == worker
        lanes.give_back(lane)


def test_a_worker_that_fails_again_and_again_rests_while_another_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def action(lanes: Lanes) -> None:
        now = asyncio.get_running_loop().time()
        clock = [now]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock[0])
        await fail(lanes, worker=0, jobs=2)  # both go down with it: one failure
        assert {(await lanes.take("wren")).worker for _ in range(2)} == {0, 1}
        lanes = Lanes(2, 1)
        for _ in range(2):
            await fail(lanes, worker=0)
            clock[0] += 2 * ONE_FAULT_SECONDS
        assert (await lanes.take("wren")).worker == 1
        waiting = asyncio.create_task(lanes.take("wren"))
        assert not await settled(waiting)  # the other one is worth waiting for
        clock[0] += COOL_SECONDS
        assert (await waiting).worker == 0

    with_lanes(action, workers=2, packed=2)


def test_the_only_worker_does_not_rest() -> None:
    async def action(lanes: Lanes) -> None:
        for _ in range(3):
            lane = await lanes.take("wren")
            lane.faulty = True
            lanes.give_back(lane)

    with_lanes(action, workers=1, packed=1)


def test_a_lane_of_a_job_that_was_found_running_is_taken() -> None:
    async def action(lanes: Lanes) -> None:
        found = lanes.occupy(1)
        taken = [await lanes.take("wren") for _ in range(3)]
        assert sorted(lane.slot for lane in (found, *taken)) == [0, 1, 2, 3]
        lanes.give_back(found)
        assert (await lanes.take("wren")).slot == found.slot

    with_lanes(action, workers=2, packed=2)
