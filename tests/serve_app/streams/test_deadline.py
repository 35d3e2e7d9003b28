"""The deadline of a request: what it interrupts, and what it lets through."""

import asyncio

import pytest

from serve_app.streams.deadline import Deadline
from speculative.errors import RequestTimeout

SOON, FOR_EVER = 0.02, 1000.0  # seconds


async def passed(deadline: Deadline) -> None:
    with pytest.raises(RequestTimeout):
        await deadline.wait(asyncio.Event().wait())


async def test_a_wait_that_is_too_long_ends_and_the_task_may_go_on() -> None:
    ended = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("the wait")

    with Deadline(SOON) as deadline, pytest.raises(RequestTimeout, match=r"longer than the 0\.02 s it had"):
        await deadline.wait(never())
    assert ended == ["the wait"]
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)


async def test_what_has_come_is_given_after_the_deadline_and_what_has_not_is_not_waited_for() -> None:
    arrived: asyncio.Queue[int] = asyncio.Queue()
    with Deadline(SOON) as deadline:
        await passed(deadline)
        arrived.put_nowait(1)
        assert await deadline.wait(arrived.get()) == 1
        await asyncio.sleep(0)  # nothing is left behind that would cancel this
        with pytest.raises(RequestTimeout):
            await deadline.wait(arrived.get())


async def test_a_deadline_interrupts_the_task_that_waits_for_it_whichever_began_and_nobody_else() -> None:
    with Deadline(SOON) as deadline:
        await asyncio.create_task(deadline.wait(asyncio.sleep(0)))
        await asyncio.sleep(3 * SOON)  # as a generator's reader does between two items
        with pytest.raises(RequestTimeout):
            await asyncio.create_task(deadline.wait(asyncio.Event().wait()))
    with Deadline(SOON):
        pass
    await asyncio.sleep(3 * SOON)


async def test_a_task_that_is_cancelled_as_its_deadline_passes_stays_cancelled() -> None:
    async def cancelled_too() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # in the same moment, by somebody else
            raise

    async def work() -> None:
        with Deadline(SOON) as deadline:
            await deadline.wait(cancelled_too())

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
