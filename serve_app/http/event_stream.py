"""Server-sent events that end when their client leaves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from serve_app.backends.base import Pace

T = TypeVar("T")

logger = logging.getLogger(__name__)

_EARLY = 0.1  # of an interval, by which a source may be early that gathers for the same interval
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip


class EventStream(Response):
    """A stream of server-sent events that ends at once when the client leaves.

    Starlette's own streaming response notices a client's leaving only at the next event, and leaves the generator to
    the garbage collector; here the generator is cancelled and closed, so that the engine frees what the request held.
    A client that takes nothing for `patience_s` has left, too.

    A message costs much the same whatever it holds (Ray and its proxy pass on each), so events that come soon after one
    another may go together; the first goes at once, and nothing waits that the last ones are there for.

    Args:
        first: the first event; empty = only the headers are sent at once.
        rest: the others.
        closed: called at the end, whatever it was.
        patience_s: for the client to take a message.
        pace: of its messages; None = one for each event.
        keep_alive_s: after which a silent stream is sent a comment, as proxies end what is silent; 0 = never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        closed: Callable[[], object] = lambda: None,
        patience_s: float = 60.0,
        pace: Pace | None = None,
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._closed = closed
        self._patience_s = patience_s
        self._pace = pace or Pace()
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        self._pace.num_streams += 1
        try:
            await unless_disconnected(receive, self._send_all(send, has_body=scope.get("method") != "HEAD"))
        except (ClientDisconnect, OSError):  # OSError: the server noticed while sending, or patience ended
            logger.info("%s: the client left", scope.get("path"))
        finally:
            self._pace.num_streams -= 1
            try:
                await self._rest.aclose()
            finally:
                self._closed()

    async def _send_all(self, send: Send, *, has_body: bool) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if has_body and self._first:
            await self._send(send, self._first)
        if has_body:
            await self._send_rest(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: bytes) -> None:
        async with asyncio.timeout(self._patience_s):
            await send({"type": "http.response.body", "body": message, "more_body": True})

    async def _send_rest(self, send: Send) -> None:
        """Send the other events, those together that came within one interval, and a comment after each long silence.

        A message goes out as an event comes, so that the loop need not wake for it alone; where the source falls
        silent, nothing waits until more than two intervals after the last message.
        """
        loop = asyncio.get_running_loop()
        events: list[bytes] = []
        due = asyncio.Event()
        sent_at = loop.time()
        interval_s = self._pace.interval_s if self._first else 0.0  # if nothing was sent, the first event does not wait
        in_silence: asyncio.TimerHandle | None = None

        async def collect() -> None:
            nonlocal in_silence
            try:
                async for event in self._rest:
                    events.append(event)
                    if loop.time() >= sent_at + (1 - _EARLY) * interval_s:
                        due.set()
                    elif in_silence is None:
                        in_silence = loop.call_at(sent_at + 2 * interval_s, due.set)
            finally:
                due.set()

        async def break_silence() -> None:
            while self._keep_alive_s:
                left_s = sent_at + self._keep_alive_s - loop.time()
                if left_s <= 0 and not events:
                    events.append(_KEEP_ALIVE)
                    due.set()
                await asyncio.sleep(left_s if left_s > 0 else self._keep_alive_s)

        collecting, keeping = asyncio.create_task(collect()), asyncio.create_task(break_silence())
        try:
            while not collecting.done() or events:
                await due.wait()
                due.clear()
                if in_silence is not None:
                    in_silence.cancel()
                    in_silence = None
                if events:
                    sent_at, interval_s = loop.time(), self._pace.interval_s
                messages = [b"".join(events)] if self._pace.interval_s else events[:]
                events.clear()
                for message in filter(None, messages):
                    await self._send(send, message)
            collecting.result()
        finally:
            if in_silence is not None:
                in_silence.cancel()
            for task in (collecting, keeping):
                task.cancel()
            await asyncio.gather(collecting, keeping, return_exceptions=True)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work, but stop it when the client leaves. The body must have been read. Raises ClientDisconnect: the
    client left; the work was cancelled and has ended."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
