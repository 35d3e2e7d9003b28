"""A backend whose requests leave spans: queue, prefill, handoff, decode, replay.

It stands before the engine only where tracing is on, and looks at one message a round, never into a step.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Span

from serve_app.backends.base import Backend, Handoff, Prefilled, Replayed
from serve_app.telemetry.tracing import Tracing, failed
from speculative.request import Request, TokenDelta

Deltas = AsyncGenerator[TokenDelta, None]


class TracedBackend:
    """The backend given, with a span for each phase of a request that is traced; others pass as they are.

    Spans hold counts, sizes and ids, never tokens.
    """

    def __init__(self, inner: Backend, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing
        self.start, self.stop, self.abort = inner.start, inner.stop, inner.abort
        self.set_speculation, self.invalidate_cache = inner.set_speculation, inner.invalidate_cache
        self.usage, self.take_stats, self.self_checks = inner.usage, inner.take_stats, inner.self_checks
        self.load_weights, self.switch_weights = inner.load_weights, inner.switch_weights
        self.drop_weights, self.pause, self.unpause = inner.drop_weights, inner.pause, inner.unpause
        self.check_health = inner.check_health
        self.cached_blocks = inner.cached_blocks

    def generate(self, request: Request, emitted: Sequence[int] = ()) -> Deltas:
        """Prefill and decode: spans `queue`, `prefill`, `decode`."""
        deltas = self._inner.generate(request, emitted)
        return self._generating(request, deltas) if self._tracing.recording else deltas

    def resume(self, request: Request, handoff: Handoff) -> Deltas:
        """Go on from a handoff: spans `handoff`, `decode`."""
        deltas = self._inner.resume(request, handoff)
        return self._resuming(request, deltas, handoff.nbytes) if self._tracing.recording else deltas

    async def prefill(self, request: Request, *, first_token: bool) -> Prefilled:
        """Compute the prompt and hand it off: spans `queue`, `prefill`."""
        if not self._tracing.recording:
            return await self._inner.prefill(request, first_token=first_token)
        began_ns, deltas = time.time_ns(), tuple[TokenDelta, ...]()
        fault: BaseException | None = None
        try:
            prefilled = await self._inner.prefill(request, first_token=first_token)
            deltas = prefilled.deltas
            return prefilled
        except BaseException as error:
            fault = error
            raise
        finally:
            self._prefilled(request, began_ns, deltas[0] if deltas else None, fault)

    async def replay(self, request: Request) -> Replayed:
        """Compute a teacher-forced request: span `replay`."""
        if not self._tracing.recording:
            return await self._inner.replay(request)
        with self._phase("replay", request) as span:
            replayed = await self._inner.replay(request)
            span.set_attribute("truespec.tokens", len(replayed.logprobs))
            return replayed

    async def _generating(self, request: Request, deltas: Deltas) -> Deltas:
        began_ns = time.time_ns()
        async with aclosing(deltas):
            try:
                first = await anext(deltas, None)
            except BaseException as error:
                self._prefilled(request, began_ns, None, error)
                raise
            self._prefilled(request, began_ns, first)
            if first is None:
                return
            yield first
            if first.finished:
                return
            async with aclosing(self._decoding(request, deltas)) as rest:
                async for delta in rest:
                    yield delta

    async def _resuming(self, request: Request, deltas: Deltas, num_bytes: int) -> Deltas:
        async with aclosing(deltas):
            with self._phase("handoff", request) as span:
                span.set_attribute("truespec.handoff_bytes", num_bytes)
                first = await anext(deltas, None)
            if first is None:
                return
            async with aclosing(self._decoding(request, deltas, first)) as rest:
                async for delta in rest:
                    yield delta

    async def _decoding(self, request: Request, deltas: Deltas, first: TokenDelta | None = None) -> Deltas:
        rounds = _Rounds()
        with self._phase("decode", request) as span:
            try:
                if first is not None:
                    rounds.see(first)
                    yield first
                async for delta in deltas:
                    rounds.see(delta)
                    yield delta
            finally:
                span.set_attributes(rounds.attributes)

    def _prefilled(
        self, request: Request, began_ns: int, first: TokenDelta | None, error: BaseException | None = None
    ) -> None:
        """The spans of a prefill that is over: until its first step it was in the queue."""
        computed_ns = began_ns + int(1e9 * (first.queue_s if first else 0.0))
        self._tracing.start("queue", began_ns, _about(request)).end(computed_ns)
        span = self._tracing.start("prefill", computed_ns, _about(request))
        span.set_attribute("truespec.prompt_tokens", len(request.prompt_token_ids))
        if first is not None:
            span.set_attribute("truespec.cached_tokens", first.num_cached_tokens)
        if error is not None:
            failed(span, error)
        span.end()

    @contextmanager
    def _phase(self, name: str, request: Request) -> Iterator[Span]:
        span = self._tracing.start(name, time.time_ns(), _about(request))
        try:
            yield span
        except GeneratorExit:  # the stream was closed: its reader had enough
            raise
        except BaseException as error:
            failed(span, error)
            raise
        finally:
            span.end()


@dataclass(slots=True)
class _Rounds:
    """Sums over the rounds of one request."""

    num: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    finish_reason: str = ""  # "" = closed before its end

    def see(self, delta: TokenDelta) -> None:
        self.num += bool(delta.token_ids)
        self.drafted += delta.num_drafted
        self.accepted += delta.num_accepted
        self.tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason or ""

    @property
    def attributes(self) -> dict[str, str | int]:
        return {
            "truespec.rounds": self.num,
            "truespec.drafted_tokens": self.drafted,
            "truespec.accepted_tokens": self.accepted,
            "truespec.tokens": self.tokens,
            "truespec.finish_reason": self.finish_reason,
        }


def _about(request: Request) -> dict[str, str]:
    return {"truespec.choice": request.request_id}
