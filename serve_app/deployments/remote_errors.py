"""Errors that were raised in another replica, as their caller sees them."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayTaskError
from ray.serve.exceptions import RequestCancelledError

from speculative.errors import TruespecError

R = TypeVar("R")


def own_error(error: RayTaskError, otherwise: type[Exception] = ConnectionError) -> Exception:
    """Return what a replica raised: our own exceptions as they are, anything else as work that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else otherwise(f"a replica failed: {cause}")


async def uncancelled(response: Awaitable[R]) -> R:
    """Await another replica's answer; it raises as Ray carries it. Raises RequestCancelledError: Serve cancelled the
    call, which by itself looks as if the caller were cancelled."""
    try:
        return await response
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        raise RequestCancelledError from None


async def answered(response: Awaitable[R]) -> R:
    """Await another replica's answer.

    Raises:
        TruespecError: as it was raised there.
        ConnectionError: the replica failed.
        RequestCancelledError: Serve cancelled the call.
    """
    try:
        return await uncancelled(response)
    except RayTaskError as error:
        raise own_error(error) from error
