"""Where a front end's tokens come from: prefill elsewhere when there is a prefill pool, decode on the local engine.

It knows a local `Backend` and, in a disaggregated service, a function that asks the prefill pool; it does not know how
that function reaches it. Whatever goes wrong with a prefill or its handoff, the local engine computes the prompt
itself: the request is slower, and nothing is lost or said twice.
"""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from serve_app.backends.base import Backend, Prefilled
from serve_app.frontend import merge
from serve_app.metrics import Metrics
from speculative.errors import HandoffRefused
from speculative.request import Request, TokenDelta

_logger = logging.getLogger("truespec.handoff")

RemotePrefill = Callable[[Request, bool], Awaitable[Prefilled]]
"""Asks the prefill pool: (request, first_token) -> Prefilled. Raises ConnectionError when no replica answered."""

Deltas = AsyncGenerator[TokenDelta, None]


class PooledTokenSource:
    """Streams tokens for the choices of one prompt: one prefill, one decode per choice.

    Args:
        backend: the local engine.
        metrics: counts handoffs.
        remote_prefill: None = prefill on the local engine too.
    """

    def __init__(self, backend: Backend, metrics: Metrics, remote_prefill: RemotePrefill | None = None) -> None:
        self._backend = backend
        self._metrics = metrics
        self._remote_prefill = remote_prefill

    async def stream(self, requests: Sequence[Request]) -> Deltas:
        """Generate for requests that share one prompt; their deltas come interleaved. Closing it aborts them all."""
        streams = [self._one(requests[0])] if len(requests) == 1 else await self._many(requests)
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """End one of several choices; the others go on."""
        self._backend.abort(request_id)

    async def _one(self, request: Request) -> Deltas:
        prefilled = await self._prefill(request, first_token=True)
        if prefilled is None:
            rest = self._backend.generate(request)
        else:
            for delta in prefilled.deltas:
                yield delta
            if prefilled.handoff is None:
                return
            emitted = [token for delta in prefilled.deltas for token in delta.token_ids]
            rest = self._resume(request, prefilled, emitted)
        async with contextlib.aclosing(rest) as deltas:
            async for delta in deltas:
                yield delta

    async def _many(self, requests: Sequence[Request]) -> list[Deltas]:
        """Each choice draws its own first token, so what is handed off has the last prompt token pending."""
        prefilled = await self._prefill(requests[0], first_token=False)
        if prefilled is None or prefilled.handoff is None:
            return [self._backend.generate(request) for request in requests]
        return [self._resume(request, prefilled, ()) for request in requests]

    async def _prefill(self, request: Request, *, first_token: bool) -> Prefilled | None:
        """Ask the prefill pool; None when the local engine is to do it."""
        if self._remote_prefill is None:
            return None
        began = time.monotonic()
        try:
            prefilled = await self._remote_prefill(request, first_token)
        except ConnectionError as error:
            self._metrics.count("truespec_handoffs_total", result="failed")
            _logger.warning("prefill of %s failed, computing it here: %s", request.request_id, error)
            return None
        self._metrics.count("truespec_handoff_seconds_total", time.monotonic() - began, phase="prefill")
        return prefilled

    async def _resume(self, request: Request, prefilled: Prefilled, emitted: Sequence[int]) -> Deltas:
        """Go on from the handoff; from the tokens alone where the engine refuses it."""
        assert prefilled.handoff is not None
        try:
            async with contextlib.aclosing(self._backend.resume(request, prefilled.handoff)) as deltas:
                async for delta in self._count_handoff(deltas, prefilled.handoff.nbytes):
                    yield delta
        except HandoffRefused as error:
            self._metrics.count("truespec_handoffs_total", result="refused")
            self._metrics.count("truespec_handoff_refusals_total", reason=error.reason)
            _logger.warning("handoff of %s refused, computing it here: %s", request.request_id, error)
            async with contextlib.aclosing(self._backend.generate(request, emitted)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _count_handoff(self, deltas: Deltas, num_bytes: int) -> Deltas:
        """Count a handoff as taken in once its first delta shows that it was."""
        counted = False
        async for delta in deltas:
            if not counted:
                counted = True
                self._metrics.count("truespec_handoffs_total", result="ok")
                self._metrics.count("truespec_handoff_bytes_total", num_bytes)
            yield delta
