"""What a caller sees of an error that was raised in another replica."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayTaskError

from speculative.errors import TruespecError

R = TypeVar("R")


def own_error(error: RayTaskError, otherwise: type[Exception] = ConnectionError) -> Exception:
    """What a replica raised: our own exceptions as they are, anything else as work that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else otherwise(f"a replica failed: {cause}")


async def answered(response: Awaitable[R]) -> R:
    """What another replica answered.

    Raises:
        TruespecError: as it was raised there.
        ConnectionError: the replica failed; or Serve cancelled the call, which looks as if the caller were cancelled.
    """
    try:
        return await response
    except RayTaskError as error:
        raise own_error(error) from error
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        raise ConnectionError("Ray Serve cancelled the call") from None
