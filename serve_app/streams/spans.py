"""Spans of a request's phases in an engine: queue, prefill, handoff, decode, replay.

They are made only of requests whose trace is recorded, from one delta a round, never inside a step. They hold counts,
sizes and ids, never tokens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Span

from serve_app.backends.base import Backend, Prefilled, Replayed
from serve_app.telemetry.tracing import Tracing, failed
from speculative.request import Request, TokenDelta


@contextmanager
def phases(tracing: Tracing, request: Request, handoff_bytes: int | None) -> Iterator[Callable[[TokenDelta], None]]:
    """Within it an engine generates: spans `queue`, `prefill` and `decode`, or `handoff` and `decode` with a handoff
    of so many bytes. It gives a function that is to be called with each delta."""
    if not tracing.recording:
        yield _ignore
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
    began_ns, deltas = time.time_ns(), tuple[TokenDelta, ...]()
    fault: BaseException | None = None
    try:
        prefilled = await backend.prefill(request, first_token=first_token)
        deltas = prefilled.deltas
        return prefilled
    except BaseException as error:
        fault = error
        raise
    finally:
        _end_prefill(tracing, request, began_ns, deltas[0] if deltas else None, fault)


async def replay(tracing: Tracing, backend: Backend, request: Request) -> Replayed:
    """Implement `Backend.replay`, with a span `replay`."""
    if not tracing.recording:
        return await backend.replay(request)
    span = tracing.start("replay", time.time_ns(), _about(request))
    try:
        replayed = await backend.replay(request)
        span.set_attribute("truespec.tokens", len(replayed.logprobs))
        return replayed
    except BaseException as error:
        failed(span, error)
        raise
    finally:
        span.end()


class _Phases:
    """The spans of one request, and sums over the rounds that `decode` reports."""

    def __init__(self, tracing: Tracing, request: Request, handoff_bytes: int | None) -> None:
        self._tracing = tracing
        self._request = request
        self._handoff_bytes = handoff_bytes
        self._began_ns = time.time_ns()
        self._begun = False
        self._decode: Span | None = None
        self._rounds = _Rounds()

    def see(self, delta: TokenDelta) -> None:
        """Take in a delta. The first one ends the prefill that emitted it, or the handoff."""
        if not self._begun:
            self._begun = True
            self._end_first_phase(delta, None)
            if self._handoff_bytes is None and delta.finished:
                return
            self._decode = self._tracing.start("decode", time.time_ns(), _about(self._request))
            if self._handoff_bytes is None:
                return
        self._rounds.see(delta)

    def end(self, error: BaseException | None = None) -> None:
        """The deltas have ended, by an error, or because their reader had enough of them (GeneratorExit)."""
        if not self._begun:
            self._end_first_phase(None, error)
        closed = isinstance(error, GeneratorExit)
        if self._decode is None or (closed and not self._rounds.num_deltas):  # then nothing was decoded
            return
        self._decode.set_attributes(self._rounds.attributes)
        if error is not None and not closed:
            failed(self._decode, error)
        self._decode.end()

    def _end_first_phase(self, first: TokenDelta | None, error: BaseException | None) -> None:
        if self._handoff_bytes is None:
            _end_prefill(self._tracing, self._request, self._began_ns, first, error)
            return
        span = self._tracing.start("handoff", self._began_ns, _about(self._request))
        span.set_attribute("truespec.handoff_bytes", self._handoff_bytes)
        if error is not None:
            failed(span, error)
        span.end()


@dataclass(slots=True)
class _Rounds:
    """Sums over the rounds of one request."""

    num_deltas: int = 0
    num: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    finish_reason: str = ""  # "" = closed before its end

    def see(self, delta: TokenDelta) -> None:
        self.num_deltas += 1
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


def _end_prefill(
    tracing: Tracing, request: Request, began_ns: int, first: TokenDelta | None, error: BaseException | None
) -> None:
    """The spans of a prefill that is over: until its first step it was in the queue."""
    computed_ns = began_ns + int(1e9 * (first.queue_s if first else 0.0))
    tracing.start("queue", began_ns, _about(request)).end(computed_ns)
    span = tracing.start("prefill", computed_ns, _about(request))
    span.set_attribute("truespec.prompt_tokens", len(request.prompt_token_ids))
    if first is not None:
        span.set_attribute("truespec.cached_tokens", first.num_cached_tokens)
    if error is not None:
        failed(span, error)
    span.end()


def _about(request: Request) -> dict[str, str]:
    return {"truespec.choice": request.request_id}


def _ignore(delta: TokenDelta) -> None:
    """In the place of `_Phases.see` where nothing is recorded."""
