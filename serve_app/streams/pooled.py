"""A source of tokens for a front end: prefill elsewhere when there is a prefill pool, decode on the local engine.

It knows a local `Backend` and, in a disaggregated service, a function that calls the prefill pool; it does not know how
that function reaches it. A prefill that fails or takes too long is retried, on whichever replica is then available; if
all fails, the local engine computes the prompt itself: the request is slower, but nothing is lost or duplicated.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.backends.base import Backend, Handoff, Prefilled, taken_in
from serve_app.streams.backlog import Backlog
from serve_app.streams.merge import merge
from serve_app.streams.spans import phases
from serve_app.telemetry.metrics import Metrics
from serve_app.telemetry.tracing import Tracing
from speculative.errors import EngineFault, HandoffRefused
from speculative.request import Request, TokenDelta

_logger = logging.getLogger("truespec.handoff")

RemotePrefill = Callable[[Request, bool], Awaitable[Prefilled]]
"""Asks the prefill pool: (request, first_token) -> Prefilled. Cancelling it ends the work there.

Raises PoolFull when the pool accepts nothing more, any other ConnectionError when its replica died, EngineFault when
the replica's engine failed.
"""

TookIn = Callable[[str, str], None]
"""Called when the handoff of a request (its id) from a prefill replica (its name) was accepted."""

Deltas = AsyncGenerator[TokenDelta, None]


class PoolFull(ConnectionError):
    """The prefill pool accepts nothing more for now."""


_MARGIN = 2.0  # by which an attempt may take longer than estimated


@dataclass(frozen=True, slots=True)
class PrefillPatience:
    """Patience with the prefill pool: how long and how often it is asked before the local engine does the work."""

    timeout_s: float = 60.0  # of one attempt, on top of twice what its tokens and those ahead are estimated to take
    retries: int = 2  # attempts after the first
    first_pace: float = 32.0  # prompt tokens a second, until a prompt has been measured: slower than a busy core

    def attempt_s(self, backlog: Backlog) -> float:
        """The longest that an attempt may take which has just joined the backlog."""
        wait_s = backlog.wait_s()
        return self.timeout_s + _MARGIN * (backlog.num_tokens() / self.first_pace if wait_s is None else wait_s)


@dataclass(slots=True)
class HandoffRoom:
    """The part of Ray's object store that handoffs may take until an engine has copied them into its cache.

    Ray spills what does not fit to a disk whose limit it does not know, and Kubernetes then ends the pod. So prompts
    wait for room, in order, before the prefill pool is asked for them. The first handoff shows how large they are; till
    then one is on its way at a time, as is one that is larger than all of the room.
    """

    most_bytes: int | None = None  # of all of them together; None = any number
    _token_bytes: float = 0.0  # of a prompt's token, the most that was seen
    _held: dict[str, int] = field(default_factory=dict)
    _waiting: deque[tuple[str, int, asyncio.Future[None]]] = field(default_factory=deque)

    async def take(self, name: str, num_tokens: int) -> None:
        """Wait until there is room for the handoff of a prompt, and hold it."""
        if self.most_bytes is None:
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, num_tokens, ready))
        self._admit()
        try:
            if not ready.done():
                _logger.info("%s waits for room for its handoff: %d bytes are held", name, sum(self._held.values()))
            await ready
        except asyncio.CancelledError:
            self._waiting = deque(one for one in self._waiting if one[2] is not ready)
            self.leave(name)
            raise

    def arrived(self, name: str, num_tokens: int, handoff: Handoff) -> None:
        """Hold what a handoff really takes, for as long as anything refers to it."""
        if self.most_bytes is None:
            return
        self._held[name] = handoff.nbytes
        self._token_bytes = max(self._token_bytes, handoff.nbytes / num_tokens)
        # The last reference may be the engine thread's.
        loop = asyncio.get_running_loop()
        weakref.finalize(handoff, _call_soon, loop, functools.partial(self.leave, name)).atexit = False
        self._admit()

    def leave(self, name: str) -> None:
        """It holds nothing any more."""
        self._held.pop(name, None)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            name, num_tokens, ready = self._waiting.popleft()
            if not ready.done():
                self._held[name] = int(self._token_bytes * num_tokens)
                ready.set_result(None)

    def _fits(self, num_tokens: int) -> bool:
        assert self.most_bytes is not None
        expected = int(self._token_bytes * num_tokens)
        return not self._held or (expected > 0 and sum(self._held.values()) + expected <= self.most_bytes)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
        loop.call_soon_threadsafe(function)


@dataclass(slots=True)
class PooledTokenSource:
    """Streams tokens for the choices of one prompt: one prefill, one decode per choice."""

    backend: Backend  # the local engine
    metrics: Metrics  # counts handoffs and failed prefills
    remote_prefill: RemotePrefill | None = None  # None = prefill on the local engine too
    took_in: TookIn | None = None  # called before the first delta from a handoff
    patience: PrefillPatience = field(default_factory=PrefillPatience)  # with the prefill pool
    tracing: Tracing = field(default_factory=Tracing)  # of the replica
    room: HandoffRoom = field(default_factory=HandoffRoom)  # for handoffs
    _backlog: Backlog = field(default_factory=Backlog)  # prompts that the prefill pool computes for this replica

    def stream(self, requests: Sequence[Request]) -> Deltas:
        """Generate for requests that share one prompt; their deltas come interleaved. Closing it aborts them all."""
        return self._choice(requests[0], asks=True) if len(requests) == 1 else self._choices(requests)

    def go_on(self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]]) -> Deltas:
        """Generate for requests that another replica has begun; `emitted` has each one's tokens up to now, by its id.

        The local engine recomputes prompts and tokens, and the deltas continue after them.
        """
        return merge([self._choice(one, emitted=emitted[one.request_id]) for one in requests])

    async def abort(self, request_id: str) -> None:
        """End one of several choices; the others continue."""
        self.backend.abort(request_id)

    async def _choices(self, requests: Sequence[Request]) -> Deltas:
        """Each choice samples its own first token, so what is handed off has the last prompt token pending.

        What the prefill reported of the prompt belongs to the first choice, in whose name it was requested.
        """
        await self.backend.check(requests[0])
        yield taken_in(requests[0].request_id)
        prefilled = await self._prefill(requests[0], first_token=False)
        if prefilled is None or prefilled.handoff is None:
            streams = [self._choice(request) for request in requests]
        else:
            others = dataclasses.replace(prefilled, deltas=())
            streams = [self._choice(request, others if index else prefilled) for index, request in enumerate(requests)]
            del others
        del prefilled  # its handoff is the choices' now
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def _choice(
        self, request: Request, prefilled: Prefilled | None = None, *, asks: bool = False, emitted: Sequence[int] = ()
    ) -> Deltas:
        """Return what the prefill emitted, then what the local engine adds: from the handoff, or from the tokens alone
        where there is none, or the engine refuses it. With `asks`, the prefill pool is asked first."""
        if asks:
            await self.backend.check(request)
            yield taken_in(request.request_id)
            prefilled = await self._prefill(request, first_token=True)
        handoff, replica = None, ""
        # Of a prompt that was computed before, what is cached is this request's own work, and no cache hit.
        uncounted: dict[str, Any] = (
            {"num_cached_tokens": 0} if emitted or (prefilled is not None and prefilled.attempt) else {}
        )
        if prefilled is not None:
            for delta in prefilled.deltas:
                yield delta._replace(**uncounted) if uncounted else delta
            if prefilled.handoff is None:
                return
            if any(delta.prompt_logprobs is not None for delta in prefilled.deltas):  # they are not returned twice
                request = dataclasses.replace(request, params=dataclasses.replace(request.params, prompt_logprobs=None))
            emitted = [token for delta in prefilled.deltas for token in delta.token_ids]
            handoff, replica = prefilled.handoff, prefilled.replica
        while True:
            engine = self.backend
            deltas = engine.generate(request, emitted) if handoff is None else engine.resume(request, handoff)
            num_bytes = unaccepted = None if handoff is None else handoff.nbytes
            prefilled = handoff = None  # the engine's alone: while anything refers to it, it stays in the object store
            try:
                async with contextlib.aclosing(deltas):
                    with phases(self.tracing, request, num_bytes) as see:
                        async for delta in deltas:
                            if unaccepted is not None:  # until the first delta shows that it was
                                self.metrics.count("truespec_handoffs_total", result="ok")
                                self.metrics.count("truespec_handoff_bytes_total", unaccepted)
                                if self.took_in is not None:
                                    self.took_in(request.request_id, replica)
                                unaccepted = None
                            see(delta)
                            yield delta._replace(**uncounted) if uncounted else delta
                return
            except HandoffRefused as error:
                if num_bytes is None:
                    raise
                self.metrics.count("truespec_handoffs_total", result="refused")
                self.metrics.count("truespec_handoff_refusals_total", reason=error.reason)
                refused = "the handoff of %s was refused; its prompt is computed here: %s"
                _logger.warning(refused, request.request_id, error)

    async def _prefill(self, request: Request, *, first_token: bool) -> Prefilled | None:
        """Ask the prefill pool; None when the local engine is to do it.

        A teacher-forced request has nothing to hand off: the local engine computes it whole.
        """
        if self.remote_prefill is None or request.score_from is not None:
            return None
        for attempt in range(self.patience.retries + 1):
            began = time.monotonic()
            try:
                prefilled = await self._ask(self.remote_prefill, request, first_token, attempt)
            except (ConnectionError, TimeoutError, EngineFault) as error:
                self.metrics.count("truespec_prefill_failures_total", reason=_reason(error))
                # As a text: a record that somebody keeps would keep the handoff of the next attempt with it.
                _logger.warning("prefill of %s failed: %s", request.request_id, str(error) or "it took too long")
                if isinstance(error, PoolFull):
                    break
                continue
            self.metrics.count("truespec_handoff_seconds_total", time.monotonic() - began, phase="prefill")
            return prefilled
        self.metrics.count("truespec_handoffs_total", result="failed")
        _logger.warning("the prompt of %s is computed here", request.request_id)
        return None

    async def _ask(self, ask: RemotePrefill, request: Request, first_token: bool, attempt: int) -> Prefilled:
        """One attempt, under its own name: the engine asked before may still hold the request."""
        named = request if attempt == 0 else dataclasses.replace(request, request_id=f"{request.request_id}~{attempt}")
        num_tokens = len(request.prompt_token_ids)
        try:
            async with asyncio.timeout(self.patience.attempt_s(self._backlog)):
                await self.room.take(named.request_id, num_tokens)
        except TimeoutError as error:
            raise PoolFull("the object store has no room for its handoff") from error
        ticket, prefilled = self._backlog.join(num_tokens), None
        try:
            async with asyncio.timeout(self.patience.attempt_s(self._backlog)):
                prefilled = await ask(named, first_token)
        finally:
            ticket.close(served=prefilled is not None)
            if prefilled is None or prefilled.handoff is None:
                self.room.leave(named.request_id)
            else:
                self.room.arrived(named.request_id, num_tokens, prefilled.handoff)
        own, replica = request.request_id, prefilled.replica
        deltas = tuple(delta._replace(request_id=own, prefilled_by=replica) for delta in prefilled.deltas)
        return dataclasses.replace(prefilled, deltas=deltas, attempt=attempt)


def _reason(error: Exception) -> str:
    """Return the label of `truespec_prefill_failures_total` for an error."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, PoolFull):
        return "full"
    return "engine" if isinstance(error, EngineFault) else "died"
