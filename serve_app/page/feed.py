"""Status pages that are open in browsers, fed from one question a second to the referee."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

Status = dict[str, Any]

_EVERY_S = 1.0
_STREAM_S = 30.0  # then the browser asks again: a replica that is to stop need not wait for open pages
_MAX_STREAMS = 32  # each holds one of the requests that a replica may have under way


class StatusFeed:
    """The newest status, asked for once however many pages of this replica show it.

    Args:
        ask: has the referee tell it.
        clock: seconds.
    """

    def __init__(self, ask: Callable[[], Awaitable[Status]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: tuple[float, Status] | None = None  # when it was asked for
        self._num_streams = 0

    @property
    def full(self) -> bool:
        """Whether no more streams are taken on."""
        return self._num_streams >= _MAX_STREAMS

    async def status(self) -> Status:
        """The status, at most a second old. Raises what asking for it raises."""
        async with self._lock:
            if self._known is None or self._clock() - self._known[0] >= _EVERY_S:
                self._known = (self._clock(), await self._ask())
            return self._known[1]

    async def events(self, last_event_id: str = "") -> AsyncGenerator[bytes, None]:
        """Server-sent events, one a second: `status`, whose history goes on after that of the last one, or `trouble`.

        Args:
            last_event_id: as a browser sends it that comes back.
        """
        reported_until = 0.0
        with suppress(ValueError):
            reported_until = float(last_event_id)
        self._num_streams += 1
        try:
            yield b"retry: 1000\n\n"
            ends_at = self._clock() + _STREAM_S
            while self._clock() < ends_at:
                try:
                    status = await self.status()
                except Exception as error:  # whatever it was, it may be over in a second
                    yield _event("trouble", {"message": f"The referee does not answer ({type(error).__name__})."})
                else:
                    fresh = [point for point in status["history"] if point["at"] > reported_until]
                    reported_until = max((point["at"] for point in fresh), default=reported_until)
                    yield _event("status", status | {"history": fresh}, f"{reported_until:.6f}")
                await asyncio.sleep(_EVERY_S)
        finally:
            self._num_streams -= 1


def _event(name: str, payload: dict[str, Any], event_id: str = "") -> bytes:
    identity = f"id: {event_id}\n" if event_id else ""
    return f"event: {name}\n{identity}data: {json.dumps(payload, separators=(',', ':'))}\n\n".encode("ascii")
