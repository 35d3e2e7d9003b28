"""Status pages that are open in browsers, fed from one question a second to the referee."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

Status = dict[str, Any]
Ask = Callable[[], Awaitable[Status]]

_EVERY_S = 1.0
_STREAM_S = 30.0  # then the browser asks again: a replica that is to stop need not wait for open pages
_MAX_STREAMS = 32  # each holds one of the requests that a replica may have under way


class StatusFeed:
    """The newest status, asked for once however many pages of this replica show it.

    Args:
        ask: has the referee return it.
        ask_history: has the referee return the last hour's figures.
        clock: seconds.
    """

    def __init__(self, ask: Ask, ask_history: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.status = _Shared(ask, clock)
        self.history = _Shared(ask_history, clock)
        self._clock = clock
        self._num_streams = 0

    @property
    def full(self) -> bool:
        """Return whether no more streams are taken on."""
        return self._num_streams >= _MAX_STREAMS

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one a second: `status`, or `trouble`."""
        self._num_streams += 1
        try:
            yield b"retry: 1000\n\n"
            ends_at = self._clock() + _STREAM_S
            while self._clock() < ends_at:
                try:
                    yield _event("status", await self.status())
                except Exception as error:  # whatever it was, it may be over in a second
                    yield _event("trouble", {"message": f"The referee does not answer ({type(error).__name__})."})
                await asyncio.sleep(_EVERY_S)
        finally:
            self._num_streams -= 1


class _Shared:
    """An answer that is at most a second old."""

    def __init__(self, ask: Ask, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: tuple[float, Status] | None = None  # when it was asked for

    async def __call__(self) -> Status:
        """The answer. Raises what asking for it raises."""
        async with self._lock:
            if self._known is None or self._clock() - self._known[0] >= _EVERY_S:
                self._known = (self._clock(), await self._ask())
            return self._known[1]


def _event(name: str, payload: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(payload, separators=(',', ':'))}\n\n".encode("ascii")
