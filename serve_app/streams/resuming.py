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
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar

from serve_app.backends.base import is_taken_in, taken_in
from serve_app.errors import RequestAborted
from serve_app.referee.records.records import Records
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


async def with_signs_of_life(items: AsyncGenerator[T, None], every_s: float | None) -> AsyncGenerator[T | None, None]:
    """The items of an async generator, and None whenever none came for `every_s` (None = never). Closing closes it."""
    async with contextlib.aclosing(items):
        while True:
            waiting = asyncio.ensure_future(anext(items, None))
            try:
                while not (await asyncio.wait((waiting,), timeout=every_s))[0]:
                    yield None
            finally:
                if not waiting.done():
                    waiting.cancel()
                    await asyncio.wait((waiting,))
            if (item := waiting.result()) is None:
                return
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
        if self.num_asked == 1:  # nothing differs from what the replica sent
            return delta
        return delta._replace(request_id=self.request.request_id, preempted=delta.preempted or self.num_lost > 0)


@dataclass(slots=True)
class ResumingSource:
    """A source of tokens over replicas that may die.

    Requests without `Request.resume` end with their replica.
    """

    pool: ReplicaPool  # the replicas
    metrics: Metrics  # counts requests that were resumed
    records: Records  # is notified which replica answers a request
    _: KW_ONLY
    most_resumes: int  # of one request; then it fails
    pause_s: float = _PAUSE_S  # before the second resume of a request, doubled for each further one
    silence_s: float | None = None  # without even a sign of life, after which a replica is lost; None = any time
    clock: Clock = time.monotonic  # seconds, monotonic
    _silent: dict[str, float] = field(default_factory=dict)  # silent replicas, and when they were found so
    _live: dict[str, _Progress] = field(default_factory=dict)

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
                replica, num_silent = "", 0
                lost: Exception = ReplicaLost("the stream ended before the request did")
                try:
                    async with contextlib.aclosing(self._ask(left)) as stream:
                        async for streamed in stream:
                            num_silent = 0 if streamed is not None else num_silent + 1
                            if num_silent == _PARTS:
                                raise ReplicaSilent(f"no sign of life for {self.silence_s:g} s")
                            replica = replica if streamed is None else streamed.replica
                            if (delta := self._take(left, streamed)) is not None:
                                yield delta
                except (ReplicaLost, EngineFault, EngineOverloaded) as error:
                    lost = error
                await self._move(left, replica, lost)
        finally:
            for request_id in group:
                del self._live[request_id]

    async def abort(self, request_id: str) -> None:
        """End one of several choices; the others continue."""
        progress = self._live.get(request_id)
        if progress is not None and not progress.ended:
            progress.ended = True
            await self.pool.abort(progress.name)

    def _ask(self, left: Sequence[_Progress]) -> AsyncGenerator[Streamed | None, None]:
        """One replica's deltas of these requests. Its time is split into parts: if this process itself was stalled,
        what arrived meanwhile is seen before the next part."""
        emitted = {one.name: tuple(one.emitted) for one in left} if any(one.num_lost for one in left) else {}
        asked = self.pool.stream([one.rest() for one in left], emitted, self._to_avoid())
        return with_signs_of_life(asked, None if self.silence_s is None else self.silence_s / _PARTS)

    def _take(self, left: Sequence[_Progress], streamed: Streamed | None) -> TokenDelta | None:
        """Record what came; returns what is to be passed on of it."""
        if streamed is None or streamed.delta is None:
            return None
        one = next(one for one in left if one.name == streamed.delta.request_id)
        gave_up = streamed.delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        if one.ended or (gave_up and one.request.resume and one.num_lost < self.most_resumes):  # another may do it
            return None
        self.records.answered_by(one.request.request_id, streamed.replica)
        if streamed.prefilled_by is not None:
            self.records.handed_off(one.request.request_id, streamed.prefilled_by)
        if is_taken_in(streamed.delta):
            return taken_in(one.request.request_id)
        return one.take(streamed.delta)

    async def _move(self, left: Sequence[_Progress], replica: str, lost: Exception) -> None:
        """Prepare what has not ended for another replica, or for the same one if none had begun it.

        Raises:
            RequestAborted: one of them may not be resumed.
            EngineFault, EngineOverloaded: likewise, and it was the engine that failed, or none had room.
        """
        if isinstance(lost, EngineOverloaded) and not any(one.num_lost for one in left):
            raise lost
        unfinished = [one for one in left if not one.ended]
        for one in unfinished:
            one.num_asked += 1
        if isinstance(lost, ReplicaSilent):
            if not replica:  # no replica has begun it: it was sent to one that hangs, or there is none now
                return
            self._silent[replica] = self.clock()
        for one in unfinished:
            resumes = one.request.resume and one.num_lost < self.most_resumes
            self.metrics.count("truespec_resumes_total", result="resumed" if resumes else "failed")
            if not resumes and isinstance(lost, EngineFault | EngineOverloaded):
                raise lost
            if not resumes:
                raise RequestAborted(f"{one.request.request_id} ended with its replica: {lost}")
            one.num_lost += 1
            _logger.warning("%s continues on another replica after %d tokens: %s", one.name, len(one.emitted), lost)
        earlier = max((one.num_lost for one in unfinished), default=1) - 1
        if earlier:
            await asyncio.sleep(self.pause_s * 2 ** (earlier - 1))

    def _to_avoid(self) -> tuple[str, ...]:
        """Replicas that were recently silent."""
        self._silent = {name: at for name, at in self._silent.items() if self.clock() < at + _AVOIDED_S}
        return tuple(self._silent)
