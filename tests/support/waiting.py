"""Waiting for what other threads and processes do; the limits are for a machine that is busy with other things."""

import asyncio
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 300.0) -> None:
    """Fail unless it comes true in time."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.002
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.3)


async def until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    """Let other tasks run until it comes true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
