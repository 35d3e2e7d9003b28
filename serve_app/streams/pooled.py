"""Where a front end's tokens come from: prefill elsewhere when there is a prefill pool, decode on the local engine.

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

from serve_app.backends.base import Backend, Handoff, Prefilled
from serve_app.streams.merge import merge
from serve_app.telemetry.metrics import Metrics
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


@dataclass(frozen=True, slots=True)
class PrefillPatience:
    """How long and how often the prefill pool is asked before the local engine does the work."""

    timeout_s: float = 60.0  # of one attempt: queue, prefill, and transfer of the handoff
    retries: int = 2  # attempts after the first


class PooledTokenSource:
    """Streams tokens for the choices of one prompt: one prefill, one decode per choice.

    Args:
        backend: the local engine.
        metrics: counts handoffs and failed prefills.
        remote_prefill: None = prefill on the local engine too.
        took_in: called before the first delta from a handoff.
        patience: with the prefill pool.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        remote_prefill: RemotePrefill | None = None,
        took_in: TookIn | None = None,
        patience: PrefillPatience | None = None,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._remote_prefill = remote_prefill
        self._took_in = took_in
        self._patience = patience or PrefillPatience()

    async def stream(self, requests: Sequence[Request]) -> Deltas:
        """Generate for requests that share one prompt; their deltas come interleaved. Closing it aborts them all."""
        streams = [self._one(requests[0])] if len(requests) == 1 else await self._many(requests)
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def go_on(self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]]) -> Deltas:
        """Generate for requests that another replica has begun; `emitted` has each one's tokens up to now, by its id.

        The local engine recomputes prompts and tokens, and the deltas continue after them.
        """
        streams = [self._backend.generate(one, emitted[one.request_id]) for one in requests]
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """End one of several choices; the others continue."""
        self._backend.abort(request_id)

    async def _one(self, request: Request) -> Deltas:
        prefilled = await self._prefill(request, first_token=True)
        rest = self._backend.generate(request) if prefilled is None else self._go_on(request, prefilled)
        async with contextlib.aclosing(rest) as deltas:
            async for delta in deltas:
                yield delta

    async def _many(self, requests: Sequence[Request]) -> list[Deltas]:
        """Each choice draws its own first token, so what is handed off has the last prompt token pending.

        What the prefill reported of the prompt belongs to the first choice, in whose name it was requested.
        """
        prefilled = await self._prefill(requests[0], first_token=False)
        if prefilled is None or prefilled.handoff is None:
            return [self._backend.generate(request) for request in requests]
        others = dataclasses.replace(prefilled, deltas=())
        return [self._go_on(request, others if index else prefilled) for index, request in enumerate(requests)]

    async def _go_on(self, request: Request, prefilled: Prefilled) -> Deltas:
        """What the prefill emitted, then what follows from its handoff."""
        for delta in prefilled.deltas:
            yield delta
        if prefilled.handoff is None:
            return
        emitted = [token for delta in prefilled.deltas for token in delta.token_ids]
        if any(delta.prompt_logprobs is not None for delta in prefilled.deltas):
            request = _without_prompt_logprobs(request)
        async with contextlib.aclosing(self._resume(request, prefilled.handoff, prefilled.replica, emitted)) as deltas:
            async for delta in deltas:
                yield delta

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
        async with asyncio.timeout(self._patience.timeout_s):
            prefilled = await ask(named, first_token)
        whose = {"request_id": request.request_id, "prefilled_by": prefilled.replica}
        return dataclasses.replace(prefilled, deltas=tuple(delta.replace(**whose) for delta in prefilled.deltas))

    async def _resume(self, request: Request, handoff: Handoff, replica: str, emitted: Sequence[int]) -> Deltas:
        """Continue from the handoff; from the tokens alone if the engine refuses it."""
        try:
            async with contextlib.aclosing(self._backend.resume(request, handoff)) as deltas:
                first = True
                async for delta in deltas:
                    if first:  # it shows that the handoff was accepted
                        first = False
                        self._count_handoff(request.request_id, handoff.nbytes, replica)
                    yield delta
        except HandoffRefused as error:
            self._metrics.count("truespec_handoffs_total", result="refused")
            self._metrics.count("truespec_handoff_refusals_total", reason=error.reason)
            _logger.warning("handoff of %s refused, computing it here: %s", request.request_id, error)
            async with contextlib.aclosing(self._backend.generate(request, emitted)) as deltas:
                async for delta in deltas:
                    yield delta

    def _count_handoff(self, request_id: str, num_bytes: int, replica: str) -> None:
        self._metrics.count("truespec_handoffs_total", result="ok")
        self._metrics.count("truespec_handoff_bytes_total", num_bytes)
        if self._took_in is not None:
            self._took_in(request_id, replica)


def _reason(error: Exception) -> str:
    """Why a prefill did not happen, as `truespec_prefill_failures_total` names it."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, PoolFull):
        return "full"
    return "engine" if isinstance(error, EngineFault) else "died"


def _without_prompt_logprobs(request: Request) -> Request:
    """The request, once its prompt's logprobs have been returned."""
    return dataclasses.replace(request, params=dataclasses.replace(request.params, prompt_logprobs=None))
