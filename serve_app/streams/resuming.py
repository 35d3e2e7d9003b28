"""Streams that outlive the replica that decodes them.

The source remembers every token that it has passed on. When the replica is lost, another one recomputes prompt and
tokens, and continues after them: no token is duplicated or lost. Random numbers are keyed by seed and position, so a
reproducible request continues with the text that it would have had; for any other the distribution is preserved.

A replica that hangs is not dead, and reports nothing. Therefore replicas send signs of life while they have nothing to
report, and one that is silent for longer counts as lost.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from serve_app.errors import RequestAborted
from serve_app.integrity.replays import Records
from serve_app.streams.backlog import Clock
from serve_app.telemetry.metrics import Metrics
from speculative.errors import EngineFault, EngineOverloaded
from speculative.request import FinishReason, Request, TokenDelta

_logger = logging.getLogger("truespec.resume")

_PAUSE_S = 0.25  # before the second resume, twice as long before each further one
_PARTS = 4  # parts of the time after which a replica counts as silent
_AVOIDED_S = 60.0  # how long others are preferred to a replica that was silent

T = TypeVar("T")


class ReplicaLost(ConnectionError):
    """The replica died, or could no longer be reached."""


class ReplicaSilent(ReplicaLost):
    """The replica gave no sign of life for too long."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A delta on its way from the replica that emitted it, or a sign of life while there is none."""

    delta: TokenDelta | None
    replica: str
    prefilled_by: str | None = None  # with the first delta that comes of a handoff: the prefill replica
    fingerprint: str = ""  # of what the replica serves


class ReplicaPool(Protocol):
    """Replicas that decode; each call goes to one of them, whichever the pool's own routing chooses."""

    def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        """Generate for requests that share one prompt; with `emitted` (by id), continue after those tokens. Replicas to
        `avoid` are asked last.

        Raises:
            ReplicaLost: the replica died, or none could be reached.
            EngineFault: its engine failed.
            EngineOverloaded: there is no room for them now.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one of several requests, wherever it runs."""
        ...


async def with_signs_of_life(
    items: AsyncGenerator[T, None], every_s: float | None, check: Callable[[], None]
) -> AsyncGenerator[T | None, None]:
    """The items, and None whenever none came this long. `check` is called before that, and may raise. Closes them."""
    waiting: asyncio.Future[T | None] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(anext(items, None))
            while not (await asyncio.wait((waiting,), timeout=every_s))[0]:
                check()
                yield None
            item = waiting.result()
            if item is None:
                return
            yield item
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()
            await asyncio.wait((waiting,))
        await items.aclose()


async def _unless_silent(items: AsyncGenerator[T, None], limit_s: float | None) -> AsyncGenerator[T, None]:
    """The items.

    Raises:
        ReplicaSilent: none came for this long. The wait is split into parts: if this process itself was stalled, what
            arrived meanwhile is seen before the next part.
    """
    num_silent = 0

    def count() -> None:
        nonlocal num_silent
        num_silent += 1
        if num_silent == _PARTS:
            raise ReplicaSilent(f"no sign of life for {limit_s:g} s")

    every_s = None if limit_s is None else limit_s / _PARTS
    async with contextlib.aclosing(with_signs_of_life(items, every_s, count)) as reported:
        async for item in reported:
            if item is not None:
                num_silent = 0
                yield item


def own_name(name: str) -> str:
    """The id of a request, from its name on a replica."""
    return name.partition("~")[0]


@dataclass(slots=True)
class _Progress:
    """One request, and what has been passed on of it."""

    request: Request
    emitted: list[int] = field(default_factory=list)
    returned_prompt: bool = False  # its prompt's logprobs
    ended: bool = False
    num_lost: int = 0  # lost replicas that had begun it; after the first, also attempts that found no room
    num_asked: int = 1  # replicas

    @property
    def name(self) -> str:
        """Its name on the replica: a new one each time, as an abandoned replica may still hold the old one."""
        return f"{self.request.request_id}~{self.num_asked - 1}" if self.num_asked > 1 else self.request.request_id

    def rest(self) -> Request:
        """The request, for the replica that continues it."""
        params = self.request.params
        if self.returned_prompt:
            params = dataclasses.replace(params, prompt_logprobs=None)
        return dataclasses.replace(self.request, request_id=self.name, params=params)

    def take(self, delta: TokenDelta) -> TokenDelta:
        """Record a delta, and restore the request's own id in it."""
        self.emitted += delta.token_ids
        self.returned_prompt = self.returned_prompt or delta.prompt_logprobs is not None
        self.ended = delta.finished
        return delta.replace(request_id=self.request.request_id, preempted=delta.preempted or self.num_lost > 0)


class ResumingSource:
    """A source of tokens over replicas that may die.

    Requests without `Request.resume` end with their replica.

    Args:
        pool: the replicas.
        metrics: counts requests that were resumed.
        records: is notified which replica answers a request.
        most_resumes: of one request; then it fails.
        pause_s: before the second resume of a request, doubled for each further one.
        silence_s: a replica that sends nothing for this long, not even a sign of life, is lost; None = never.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        metrics: Metrics,
        records: Records,
        *,
        most_resumes: int,
        pause_s: float = _PAUSE_S,
        silence_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._records = records
        self._most_resumes = most_resumes
        self._pause_s = pause_s
        self._silence_s = silence_s
        self._clock = clock
        self._silent: dict[str, float] = {}  # silent replicas, and when they were found so
        self._live: dict[str, _Progress] = {}

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        """Generate for requests that share one prompt; their deltas come interleaved. Closing it aborts them all.

        Raises:
            RequestAborted: a replica died, and the request may not be resumed, or was resumed too often.
            EngineOverloaded: there is no room for it, and nothing of it was lost or too many attempts found none.
        """
        group = {one.request_id: _Progress(one) for one in requests}
        self._live |= group
        try:
            while left := [one for one in group.values() if not one.ended]:
                async with contextlib.aclosing(self._passed_on(left)) as deltas:
                    async for delta in deltas:
                        yield delta
        finally:
            for request_id in group:
                del self._live[request_id]

    async def abort(self, request_id: str) -> None:
        """End one of several choices; the others continue."""
        progress = self._live.get(request_id)
        if progress is not None and not progress.ended:
            progress.ended = True
            await self._pool.abort(progress.name)

    async def _passed_on(self, left: Sequence[_Progress]) -> AsyncGenerator[TokenDelta, None]:
        """One replica's deltas of these requests, until all have ended, or it is lost and they must go elsewhere."""
        named = {one.name: one for one in left}
        emitted = {one.name: tuple(one.emitted) for one in left} if any(one.num_lost for one in left) else {}
        asked = self._pool.stream([one.rest() for one in left], emitted, self._to_avoid())
        replica = ""
        try:
            async with contextlib.aclosing(_unless_silent(asked, self._silence_s)) as stream:
                async for streamed in stream:
                    replica, delta = streamed.replica, streamed.delta
                    if delta is None:
                        continue
                    one = named[delta.request_id]
                    if one.ended or self._failed_there(one, delta):
                        continue
                    self._note(one, streamed)
                    yield one.take(delta)
            lost: Exception = ReplicaLost("the stream ended before the request did")
        except (ReplicaLost, EngineFault) as error:
            lost = error
        except EngineOverloaded as error:
            if not any(one.num_lost for one in left):
                raise
            lost = error
        unfinished = [one for one in left if not one.ended]
        for one in unfinished:
            one.num_asked += 1
        if isinstance(lost, ReplicaSilent):
            if not replica:  # no replica has begun it: it was sent to one that hangs, or there is none now
                return
            self._silent[replica] = self._clock()
        await self._resume(unfinished, lost)

    def _to_avoid(self) -> tuple[str, ...]:
        """Replicas that were recently silent."""
        self._silent = {name: at for name, at in self._silent.items() if self._clock() < at + _AVOIDED_S}
        return tuple(self._silent)

    def _failed_there(self, one: _Progress, delta: TokenDelta) -> bool:
        """Whether an engine failed the request in a way another may recover; that delta is not passed on."""
        gave_up = delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        return gave_up and one.request.resume and one.num_lost < self._most_resumes

    def _note(self, one: _Progress, streamed: Streamed) -> None:
        request_id = one.request.request_id
        self._records.answered_by(request_id, streamed.replica)
        if streamed.prefilled_by is not None:
            self._records.handed_off(request_id, streamed.prefilled_by)

    async def _resume(self, left: Sequence[_Progress], lost: Exception) -> None:
        """Resume requests whose replica was lost.

        Raises:
            RequestAborted: one of them may not be resumed.
            EngineFault, EngineOverloaded: likewise, and it was the engine that failed, or none had room.
        """
        for one in left:
            resumes = one.request.resume and one.num_lost < self._most_resumes
            self._metrics.count("truespec_resumes_total", result="resumed" if resumes else "failed")
            if not resumes and isinstance(lost, EngineFault | EngineOverloaded):
                raise lost
            if not resumes:
                raise RequestAborted(f"{one.request.request_id} ended with its replica: {lost}")
            one.num_lost += 1
            _logger.warning("%s continues on another replica after %d tokens: %s", one.name, len(one.emitted), lost)
        earlier = max((one.num_lost for one in left), default=1) - 1
        if earlier:
            await asyncio.sleep(self._pause_s * 2 ** (earlier - 1))
