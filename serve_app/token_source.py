"""Where a front end's tokens come from: prefill elsewhere when there is a prefill pool, decode on the local engine.

It knows a local `Backend` and, in a disaggregated service, a function that asks the prefill pool; it does not know how
that function reaches it. Whatever goes wrong with a prefill or its handoff, the local engine computes the prompt
itself: the request is slower, and nothing is lost or said twice.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from serve_app.backends.base import Backend, Handoff, Prefilled
from serve_app.frontend import merge
from serve_app.metrics import Metrics
from speculative.errors import HandoffRefused
from speculative.request import Request, TokenDelta

_logger = logging.getLogger("truespec.handoff")

RemotePrefill = Callable[[Request, bool], Awaitable[Prefilled]]
"""Asks the prefill pool: (request, first_token) -> Prefilled. Raises ConnectionError when no replica answered."""

TookIn = Callable[[str, str], None]
"""Told that the handoff of a request (its id) from a prefill replica (its name) was taken in."""

Deltas = AsyncGenerator[TokenDelta, None]


class PooledTokenSource:
    """Streams tokens for the choices of one prompt: one prefill, one decode per choice.

    Args:
        backend: the local engine.
        metrics: counts handoffs.
        remote_prefill: None = prefill on the local engine too.
        took_in: called before the first delta that comes of a handoff.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        remote_prefill: RemotePrefill | None = None,
        took_in: TookIn | None = None,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._remote_prefill = remote_prefill
        self._took_in = took_in

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
        rest = self._backend.generate(request) if prefilled is None else self._go_on(request, prefilled)
        async with contextlib.aclosing(rest) as deltas:
            async for delta in deltas:
                yield delta

    async def _many(self, requests: Sequence[Request]) -> list[Deltas]:
        """Each choice draws its own first token, so what is handed off has the last prompt token pending.

        What the prefill told of the prompt belongs to the first choice: the prefill was asked for in its name.
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
        began = time.monotonic()
        try:
            prefilled = await self._remote_prefill(request, first_token)
        except ConnectionError as error:
            self._metrics.count("truespec_handoffs_total", result="failed")
            _logger.warning("prefill of %s failed, computing it here: %s", request.request_id, error)
            return None
        self._metrics.count("truespec_handoff_seconds_total", time.monotonic() - began, phase="prefill")
        return prefilled

    async def _resume(self, request: Request, handoff: Handoff, replica: str, emitted: Sequence[int]) -> Deltas:
        """Go on from the handoff; from the tokens alone where the engine refuses it."""
        try:
            async with contextlib.aclosing(self._backend.resume(request, handoff)) as deltas:
                first = True
                async for delta in deltas:
                    if first:  # it shows that the handoff was taken in
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


def _without_prompt_logprobs(request: Request) -> Request:
    """The request, when its prompt's logprobs have been told."""
    return dataclasses.replace(request, params=dataclasses.replace(request.params, prompt_logprobs=None))
