"""A source of tokens for a front end: prefill elsewhere when there is a prefill pool, decode on the local engine.

It knows a local `Backend` and, in a disaggregated service, a function that calls the prefill pool; it does not know how
that function reaches it. A prefill that fails or takes too long is retried, on whichever replica is then available; if
all fails, the local engine computes the prompt itself: the request is slower, but nothing is lost or duplicated.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.backends.base import Backend, Prefilled
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


class PooledTokenSource:
    """Streams tokens for the choices of one prompt: one prefill, one decode per choice.

    Args:
        backend: the local engine.
        metrics: counts handoffs and failed prefills.
        remote_prefill: None = prefill on the local engine too.
        took_in: called before the first delta from a handoff.
        patience: with the prefill pool.
        tracing: of the replica; None = no spans.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        remote_prefill: RemotePrefill | None = None,
        took_in: TookIn | None = None,
        patience: PrefillPatience | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._remote_prefill = remote_prefill
        self._took_in = took_in
        self._patience = patience or PrefillPatience()
        self._backlog = Backlog()  # prompts that the prefill pool computes for this replica
        self._tracing = tracing or Tracing()

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
        self._backend.abort(request_id)

    async def _choices(self, requests: Sequence[Request]) -> Deltas:
        """Each choice samples its own first token, so what is handed off has the last prompt token pending.

        What the prefill reported of the prompt belongs to the first choice, in whose name it was requested.
        """
        prefilled = await self._prefill(requests[0], first_token=False)
        if prefilled is None or prefilled.handoff is None:
            streams = [self._choice(request) for request in requests]
        else:
            others = dataclasses.replace(prefilled, deltas=())
            streams = [self._choice(request, others if index else prefilled) for index, request in enumerate(requests)]
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def _choice(
        self, request: Request, prefilled: Prefilled | None = None, *, asks: bool = False, emitted: Sequence[int] = ()
    ) -> Deltas:
        """Return what the prefill emitted, then what the local engine adds: from the handoff, or from the tokens alone
        where there is none, or the engine refuses it. With `asks`, the prefill pool is asked first."""
        if asks:
            prefilled = await self._prefill(request, first_token=True)
        handoff, replica = None, ""
        # Of a prompt that was computed before, what is cached is this request's own work, and no cache hit.
        uncounted = {"num_cached_tokens": 0} if emitted or (prefilled is not None and prefilled.attempt) else {}
        if prefilled is not None:
            for delta in prefilled.deltas:
                yield delta.replace(**uncounted) if uncounted else delta
            if prefilled.handoff is None:
                return
            request, emitted = _after(request, prefilled.deltas)
            handoff, replica = prefilled.handoff, prefilled.replica
        while True:
            engine, unaccepted = self._backend, handoff
            deltas = engine.generate(request, emitted) if handoff is None else engine.resume(request, handoff)
            try:
                async with contextlib.aclosing(deltas):
                    with phases(self._tracing, request, handoff) as see:
                        async for delta in deltas:
                            if unaccepted is not None:  # until the first delta shows that it was
                                self._count_handoff(request.request_id, unaccepted.nbytes, replica)
                                unaccepted = None
                            see(delta)
                            yield delta.replace(**uncounted) if uncounted else delta
                return
            except HandoffRefused as error:
                if handoff is None:
                    raise
                self._count_refusal(request.request_id, error)
                handoff = None

    async def _prefill(self, request: Request, *, first_token: bool) -> Prefilled | None:
        """Ask the prefill pool; None when the local engine is to do it.

        A teacher-forced request has nothing to hand off: the local engine computes it whole.
        """
        if self._remote_prefill is None or request.score_from is not None:
            return None
        for attempt in range(self._patience.retries + 1):
            began = time.monotonic()
            try:
                prefilled = await self._ask(self._remote_prefill, request, first_token, attempt)
            except (ConnectionError, TimeoutError, EngineFault) as error:
                self._metrics.count("truespec_prefill_failures_total", reason=_reason(error))
                _logger.warning("prefill of %s failed: %s", request.request_id, error or "it took too long")
                if isinstance(error, PoolFull):
                    break
                continue
            self._metrics.count("truespec_handoff_seconds_total", time.monotonic() - began, phase="prefill")
            return prefilled
        self._metrics.count("truespec_handoffs_total", result="failed")
        _logger.warning("the prompt of %s is computed here", request.request_id)
        return None

    async def _ask(self, ask: RemotePrefill, request: Request, first_token: bool, attempt: int) -> Prefilled:
        """One attempt, under its own name: the engine asked before may still hold the request."""
        named = request if attempt == 0 else dataclasses.replace(request, request_id=f"{request.request_id}~{attempt}")
        ticket, prefilled = self._backlog.join(len(request.prompt_token_ids)), None
        try:
            async with asyncio.timeout(self._patience.attempt_s(self._backlog)):
                prefilled = await ask(named, first_token)
        finally:
            ticket.close(served=prefilled is not None)
        whose = {"request_id": request.request_id, "prefilled_by": prefilled.replica}
        deltas = tuple(delta.replace(**whose) for delta in prefilled.deltas)
        return dataclasses.replace(prefilled, deltas=deltas, attempt=attempt)

    def _count_refusal(self, request_id: str, error: HandoffRefused) -> None:
        self._metrics.count("truespec_handoffs_total", result="refused")
        self._metrics.count("truespec_handoff_refusals_total", reason=error.reason)
        _logger.warning("handoff of %s refused, computing it here: %s", request_id, error)

    def _count_handoff(self, request_id: str, num_bytes: int, replica: str) -> None:
        self._metrics.count("truespec_handoffs_total", result="ok")
        self._metrics.count("truespec_handoff_bytes_total", num_bytes)
        if self._took_in is not None:
            self._took_in(request_id, replica)


def _reason(error: Exception) -> str:
    """Return the label of `truespec_prefill_failures_total` for an error."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, PoolFull):
        return "full"
    return "engine" if isinstance(error, EngineFault) else "died"


def _after(request: Request, deltas: Sequence[TokenDelta]) -> tuple[Request, list[int]]:
    """The request after these deltas, which may have returned its prompt's logprobs, and their tokens."""
    if any(delta.prompt_logprobs is not None for delta in deltas):
        request = dataclasses.replace(request, params=dataclasses.replace(request.params, prompt_logprobs=None))
    return request, [token for delta in deltas for token in delta.token_ids]
