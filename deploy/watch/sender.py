"""Sends exchanges to the referee, and nobody waits for it: what does not fit into the queue is dropped and counted."""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator

import aiohttp

from serve_app.referee.wire.exchange import Exchange, ExchangeBatch

_LOG = logging.getLogger(__name__)
_COUNTS_EVERY_S = 1.0
_BATCH_EXCHANGES, _BATCH_BYTES = 32, 256 * 1024  # small: to pack a batch holds up the streams that pass
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_ANSWER_WITHIN_S, _LAST_WORD_WITHIN_S = 30.0, 2.0
_TRY_AGAIN = (408, 425, 429)


class Sender:
    """A queue of exchanges, and counters by result that go with the next batch.

    referee: its URL; None = exchanges are counted only. max_exchanges, max_bytes: of the queue.
    """

    def __init__(self, referee: str | None, max_exchanges: int, max_bytes: int) -> None:
        self._url = None if referee is None else f"{referee.rstrip('/')}/v1/exchanges"
        self._max_exchanges, self._max_bytes = max_exchanges, max_bytes
        self._queue: deque[Exchange] = deque()
        self._bytes = 0
        self._unsent: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self._ending = False
        self.totals: Counter[str] = Counter()
        """Since the start, by result."""

    def count(self, result: str, number: int = 1) -> None:
        """Count something that happened."""
        self.totals[result] += number
        self._unsent[result] += number

    def offer(self, exchange: Exchange) -> None:
        """Take an exchange for the referee, or drop it if the queue is full."""
        size = _size(exchange)
        if len(self._queue) >= self._max_exchanges or self._bytes + size > self._max_bytes:
            self.count("dropped")
            return
        self.count("captured")
        if self._url is not None:
            self._queue.append(exchange)
            self._bytes += size
            self._wake.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Sender"]:
        """Send in the background until the block ends, and what is left then if the referee answers at once."""
        if self._url is None:
            yield self
            return
        async with aiohttp.ClientSession(
            # Each batch has a connection of its own: one that met the closing of an idle one could not be sent again.
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_WITHIN_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            task = asyncio.create_task(self._run(session, self._url))
            try:
                yield self
            finally:
                self._ending = True
                self._wake.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(task, _LAST_WORD_WITHIN_S)

    async def _run(self, session: aiohttp.ClientSession, url: str) -> None:
        pause_s = _FIRST_PAUSE_S
        while not (self._ending and not self._queue and not self._unsent):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _COUNTS_EVERY_S)
            self._wake.clear()
            while self._queue or self._unsent:
                if await self._send_batch(session, url):
                    pause_s = _FIRST_PAUSE_S
                    if not self._queue and not self._ending:
                        break  # counts alone wait for their time
                elif self._ending:
                    return
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _send_batch(self, session: aiohttp.ClientSession, url: str) -> bool:
        """Return whether the queue goes on; if not, the batch stays in it."""
        taken: list[Exchange] = []
        size = 0
        for exchange in self._queue:
            size += _size(exchange)
            if taken and (size > _BATCH_BYTES or len(taken) >= _BATCH_EXCHANGES):
                break
            taken.append(exchange)
        counts, self._unsent = self._unsent, Counter()
        problem, again = await self._sent(session, url, ExchangeBatch(tuple(taken), dict(counts)))
        if again:
            _LOG.warning("The referee at %s takes no exchanges (%s); trying again.", url, problem)
            self._unsent.update(counts)
            return False
        for exchange in taken:
            self._queue.popleft()
            self._bytes -= _size(exchange)
        if problem:
            _LOG.warning("%d exchanges for the referee at %s are lost (%s).", len(taken), url, problem)
            self.count("failed", len(taken))
        return not problem or bool(taken)

    async def _sent(self, session: aiohttp.ClientSession, url: str, batch: ExchangeBatch) -> tuple[str, bool]:
        """Return what went wrong, and whether to try again: only where the referee cannot have taken the batch, which
        would count its exchanges twice.
        """
        try:
            body = await asyncio.to_thread(batch.to_wire)
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
                bad = reply.status >= 300
                return f"status {reply.status}" if bad else "", reply.status >= 500 or reply.status in _TRY_AGAIN
        except aiohttp.ClientConnectorError as error:
            return type(error).__name__, True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__, False


def _size(exchange: Exchange) -> int:
    return len(exchange.request) + len(exchange.reply)
