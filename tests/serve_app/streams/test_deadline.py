"""The deadline of a request: what it interrupts, what it lets through, and that it takes one timer."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from serve_app.streams.deadline import Deadline
from speculative.errors import RequestTimeout

SOON, FOR_EVER = 0.02, 1000.0  # seconds


async def passed(deadline: Deadline) -> None:
    """Wait until a deadline has passed."""
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


async def test_a_deadline_interrupts_nobody_who_does_not_wait_for_it() -> None:
    with Deadline(SOON) as deadline:
        await deadline.wait(asyncio.sleep(0))
        await asyncio.sleep(3 * SOON)  # as a generator's reader does between two items
    with Deadline(SOON):
        pass
    await asyncio.sleep(3 * SOON)


async def test_the_task_that_waits_is_interrupted_whichever_began() -> None:
    with Deadline(SOON) as deadline:
        await asyncio.create_task(deadline.wait(asyncio.sleep(0)))
        with pytest.raises(RequestTimeout):
            await asyncio.create_task(deadline.wait(asyncio.Event().wait()))


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


async def test_a_cancelled_task_does_not_say_that_it_was_late() -> None:
    async def work() -> None:
        with Deadline(FOR_EVER) as deadline:
            await deadline.wait(asyncio.Event().wait())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_all_waits_of_a_request_take_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def items() -> AsyncGenerator[int, None]:
        for number in range(50):
            await asyncio.sleep(0)
            yield number

    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_at: Callable[..., asyncio.TimerHandle] = loop.call_at

    def counted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        timers.append(call_at(*args, **kwargs))
        return timers[-1]

    monkeypatch.setattr(loop, "call_at", counted)
    taken, numbers = [], items()
    with Deadline(FOR_EVER) as deadline:
        while (number := await deadline.wait(anext(numbers, None))) is not None:
            taken.append(number)
    assert taken == list(range(50))
    assert [timer.cancelled() for timer in timers] == [True]
