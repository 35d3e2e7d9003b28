"""Long work on requests, beside the event loop: streams and health checks go on meanwhile."""

import asyncio
import ctypes
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")

CALLER: ContextVar[str] = ContextVar("CALLER", default="")
"""The id of the key whose request is worked on."""

_LONG, _HUGE = 4096, 2**16  # characters and values of a request; more leave the event loop, or take turns
_MUCH_S = 0.2  # of work, which may have needed much memory
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


async def off_loop(subject: Any, work: Callable[[], T]) -> T:
    """Do work on a request, or a part of it, on a thread where that is long, and at once where it is not.

    Huge requests of a key take turns: they neither compete with the event loop for Python's lock nor hold memory all at
    once. If the client leaves before its turn comes, the work is not done.
    """
    size = _size(subject)
    if size <= _LONG:
        return work()
    thread, context = _thread_of(CALLER.get()) if size > _HUGE else None, copy_context()
    return await asyncio.get_running_loop().run_in_executor(thread, lambda: context.run(_tidied, work))


@functools.cache
def _thread_of(key: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "huge-requests")


def _tidied(work: Callable[[], T]) -> T:
    """Do work, and give its memory back to the system, which glibc would keep."""
    begun_s = time.monotonic()
    try:
        return work()
    finally:
        if _trim is not None and time.monotonic() - begun_s > _MUCH_S:
            _trim(0)


def _size(subject: Any) -> int:
    """Characters and values of a request, counted only until they are huge."""
    size, waiting = 0, [subject]
    while waiting and size <= _HUGE:
        one = waiting.pop()
        one = one.__dict__ if isinstance(one, BaseModel) else one
        one = [*one, *one.values()] if isinstance(one, dict) else one
        waiting += one if isinstance(one, list) else ()
        size += len(one) if isinstance(one, str | bytes | list) else 1
    return size
