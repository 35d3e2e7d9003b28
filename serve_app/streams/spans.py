"""Spans of a request's phases in an engine: queue, prefill, handoff, decode, replay.

They are made only of requests whose trace is recorded, from one delta a round, never inside a step. They hold counts,
sizes and ids, never tokens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span

from serve_app.backends.base import Backend, Prefilled, Replayed
from serve_app.telemetry.tracing import Tracing, failed
from speculative.request import Request, TokenDelta


@contextmanager
def phases(tracing: Tracing, request: Request, handoff_bytes: int | None) -> Iterator[Callable[[TokenDelta], None]]:
    """Within it an engine generates: spans `queue`, `prefill` and `decode`, or `handoff` and `decode` with a handoff
    of so many bytes. It gives a function that is to be called with each delta."""
    if not tracing.recording:
        yield lambda delta: None
        return
    spans = _Phases(tracing, request, handoff_bytes)
    try:
        yield spans.see
    except BaseException as error:
        spans.end(error)
        raise
    spans.end()


async def prefill(tracing: Tracing, backend: Backend, request: Request, *, first_token: bool) -> Prefilled:
    """Implement `Backend.prefill`, with spans `queue` and `prefill`."""
    if not tracing.recording:
        return await backend.prefill(request, first_token=first_token)
    spans = _Phases(tracing, request, None)
    try:
        prefilled = await backend.prefill(request, first_token=first_token)
    except BaseException as error:
        spans.end(error)
        raise
    spans.end_first_phase(prefilled.deltas[0] if prefilled.deltas else None)
    return prefilled


async def replay(tracing: Tracing, backend: Backend, request: Request) -> Replayed:
    """Implement `Backend.replay`, with a span `replay`."""
    if not tracing.recording:
        return await backend.replay(request)
    span = tracing.start("replay", time.time_ns(), _about(request))
    try:
        replayed = await backend.replay(request)
    except BaseException as error:
        _end(span, error)
        raise
    span.set_attribute("truespec.tokens", len(replayed.logprobs))
    span.end()
    return replayed


class _Phases:
    """The spans of one request, and sums over the rounds that `decode` reports."""

    def __init__(self, tracing: Tracing, request: Request, handoff_bytes: int | None) -> None:
        self._tracing = tracing
        self._request = request
        self._handoff_bytes = handoff_bytes
        self._began_ns = time.time_ns()
        self._begun = False
        self._decode: Span | None = None
        self._num_deltas = 0
        self._sums = dict.fromkeys(("rounds", "drafted_tokens", "accepted_tokens", "tokens"), 0)
        self._finish_reason = ""  # "" = closed before its end

    def see(self, delta: TokenDelta) -> None:
        """Take in a delta. The first one ends the prefill that emitted it, or the handoff."""
        if not self._begun:
            self.end_first_phase(delta)
            if self._handoff_bytes is None and delta.finished:
                return
            self._decode = self._tracing.start("decode", time.time_ns(), _about(self._request))
            if self._handoff_bytes is None:
                return
        self._num_deltas += 1
        self._sums["rounds"] += len(delta.rounds) or bool(delta.token_ids)
        self._sums["drafted_tokens"] += delta.num_drafted
        self._sums["accepted_tokens"] += delta.num_accepted
        self._sums["tokens"] += len(delta.token_ids)
        self._finish_reason = delta.finish_reason or ""

    def end(self, error: BaseException | None = None) -> None:
        """The deltas have ended, by an error, or because their reader had enough of them (GeneratorExit)."""
        if not self._begun:
            self.end_first_phase(None, error)
        closed = isinstance(error, GeneratorExit)
        if self._decode is None or (closed and not self._num_deltas):  # then nothing was decoded
            return
        self._decode.set_attributes({f"truespec.{name}": value for name, value in self._sums.items()})
        self._decode.set_attribute("truespec.finish_reason", self._finish_reason)
        _end(self._decode, None if closed else error)

    def end_first_phase(self, first: TokenDelta | None, error: BaseException | None = None) -> None:
        """The first delta has come, or an error: end the handoff, or the prefill, which until its first step was in the
        queue."""
        self._begun = True
        if self._handoff_bytes is not None:
            span = self._tracing.start("handoff", self._began_ns, _about(self._request))
            span.set_attribute("truespec.handoff_bytes", self._handoff_bytes)
        else:
            computed_ns = self._began_ns + int(1e9 * (first.queue_s if first else 0.0))
            self._tracing.start("queue", self._began_ns, _about(self._request)).end(computed_ns)
            span = self._tracing.start("prefill", computed_ns, _about(self._request))
            span.set_attribute("truespec.prompt_tokens", len(self._request.prompt_token_ids))
            if first is not None:
                span.set_attribute("truespec.cached_tokens", first.num_cached_tokens)
        _end(span, error)


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None:
        failed(span, error)
    span.end()


def _about(request: Request) -> dict[str, str]:
    return {"truespec.choice": request.request_id}
