"""Watches a token source from outside: admission, latencies, outcomes, the deadline, and what is to be checked."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.metrics import Metrics
from serve_app.replays import Record, Records, ReplayJob
from speculative.errors import EngineOverloaded, InvalidRequest, RequestTimeout
from speculative.request import FinishReason, Request, TokenDelta


class TokenSource(Protocol):
    """What is watched."""

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of all requests, interleaved."""
        ...

    async def abort(self, request_id: str) -> None:
        """End one of them."""
        ...


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """What one replica takes on."""

    max_running: int  # requests at once; a request with n choices counts n times
    timeout_s: float  # the longest a request may take


@dataclass(slots=True)
class _Watched:
    """One request on its way."""

    request: Request
    record: Record
    replayed: bool
    began_at: float
    last_at: float
    outcome: str = "abort"  # unless it comes to an end of its own
    waiting: bool = True  # for its first token


class ObservedSource:
    """A token source that measures, and tells of finished requests.

    Args:
        source: where the tokens come from.
        metrics: latencies and outcomes are recorded here.
        records: what is served, request by request.
        choose: whether a request, by its id, is to be replayed.
        ended: told of each request that came to an end: the record of it, and what is to be replayed of it, if
            anything is; must not block.
        limits: how many requests may run at once, and how long each.
    """

    def __init__(
        self,
        source: TokenSource,
        metrics: Metrics,
        records: Records,
        *,
        choose: Callable[[str], bool],
        ended: Callable[[Record, ReplayJob | None], None],
        limits: SourceLimits,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._records = records
        self._choose = choose
        self._ended = ended
        self._limits = limits
        self._mean_duration_s = 1.0  # of the last requests, for an honest Retry-After
        self._watched: dict[str, _Watched] = {}

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        """Deltas as the source gives them; what only the referee asked for is taken out again.

        Raises:
            EngineOverloaded: too many requests are running.
            RequestTimeout: it took too long.
        """
        self._admit(len(requests))
        now = time.monotonic()
        watched = {
            one.request_id: _Watched(one, self._records.begin(one), self._choose(one.request_id), now, now)
            for one in requests
        }
        self._watched |= watched
        asked = [_with_logprobs(entry.request) if entry.replayed else entry.request for entry in watched.values()]
        try:
            async with contextlib.aclosing(self._source.stream(asked)) as deltas:
                async for delta in _until(deltas, asyncio.get_running_loop().time() + self._limits.timeout_s):
                    entry = watched[delta.request_id]
                    self._see(entry, delta)
                    yield delta if _asked_for_logprobs(entry.request) else delta.replace(logprobs=None)
        except Exception:
            for entry in watched.values():
                entry.outcome = "error" if entry.outcome == "abort" else entry.outcome
            raise
        finally:
            for request_id, entry in watched.items():
                del self._watched[request_id]
                self._end(entry)

    async def abort(self, request_id: str) -> None:
        """End one request early: its front end has seen its stop string."""
        if request_id in self._watched:
            self._watched[request_id].outcome = "stop"
        await self._source.abort(request_id)

    def _admit(self, count: int) -> None:
        limit = self._limits.max_running
        if len(self._watched) + count <= limit:
            return
        for _ in range(count):
            self._metrics.count("truespec_requests_total", outcome="rejected")
        if count > limit:
            raise InvalidRequest("n", f"n asks for {count} choices; this server runs at most {limit} at once.")
        freed = len(self._watched) + count - limit
        raise EngineOverloaded(
            f"{len(self._watched)} requests are running here, and the limit is {limit}; try again soon.",
            retry_after_s=self._mean_duration_s * freed / limit,
        )

    def _see(self, entry: _Watched, delta: TokenDelta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            elapsed = now - entry.last_at
            if entry.waiting:
                self._metrics.observe("truespec_time_to_first_token_seconds", elapsed)
                self._metrics.observe("truespec_queue_time_seconds", delta.queue_s)
            else:
                self._metrics.observe("truespec_inter_token_latency_seconds", elapsed / len(delta.token_ids))
            entry.last_at, entry.waiting = now, False
        if delta.finish_reason not in (None, FinishReason.ABORT):
            entry.outcome = str(delta.finish_reason)
        if entry.replayed:
            entry.record.take(delta)

    def _end(self, entry: _Watched) -> None:
        self._mean_duration_s += 0.1 * (time.monotonic() - entry.began_at - self._mean_duration_s)
        self._metrics.count("truespec_requests_total", outcome=entry.outcome)
        self._records.end(entry.request.request_id)
        if entry.outcome != FinishReason.ERROR and entry.request.score_from is None:
            self._ended(entry.record, entry.record.job() if entry.replayed else None)


def _asked_for_logprobs(request: Request) -> bool:
    return request.params.tells_logprobs or request.score_from is not None


def _with_logprobs(request: Request) -> Request:
    if _asked_for_logprobs(request):
        return request
    return dataclasses.replace(request, params=dataclasses.replace(request.params, logprobs=0))


async def _until(deltas: AsyncGenerator[TokenDelta, None], deadline: float) -> AsyncIterator[TokenDelta]:
    """The deltas that come before the deadline (the loop's time).

    Raises:
        RequestTimeout: it passed.
    """
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                delta = await anext(deltas)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise RequestTimeout("The request took longer than the server allows; ask for fewer tokens.") from error
        yield delta
