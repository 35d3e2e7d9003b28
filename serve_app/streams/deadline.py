"""The time by which a request must have ended."""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, TypeVar

from speculative.errors import RequestTimeout

T = TypeVar("T")


class Deadline:
    """Ends the waits of one request when its time is over, with one timer for all of them.

    It begins where it is entered (`with`). `asyncio.timeout` would have to be entered for each wait: it belongs to one
    task, and those that ask a generator for its items may be several, one after the other.

    Args:
        limit_s: the time that the request has.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._passed = False
        self._waiting: asyncio.Task[Any] | None = None  # the task that waits
        self._interrupted = False  # whether its wait was ended here

    def __enter__(self) -> "Deadline":
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle = self._loop.call_later(self._limit_s, self._pass)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """The result of an awaitable, which is cancelled when the time is over. What is there already is returned
        however late it is. Raises RequestTimeout: the time is over."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        cancelled = task.cancelling()
        self._waiting, self._interrupted = task, False
        if self._passed:
            self._timer = self._loop.call_soon(self._pass)
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            if self._interrupted and task.cancelling() == cancelled + 1:
                raise RequestTimeout(
                    f"The request took longer than the {self._limit_s:g} s it had; ask for fewer tokens, or for more "
                    "time where the server allows it."
                ) from error
            raise
        finally:
            self._waiting = None
            if self._passed:
                self._timer.cancel()
            if self._interrupted:
                task.uncancel()

    def _pass(self) -> None:
        self._passed = True
        if self._waiting is not None:
            self._interrupted = True
            self._waiting.cancel()
