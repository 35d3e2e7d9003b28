"""Watches a token source from outside: admission, latencies, outcomes, the deadline, and what is to be checked."""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from serve_app.backends.base import TokenSource, is_taken_in
from serve_app.errors import NoRoom
from serve_app.referee.records.records import Record, Records
from serve_app.referee.records.replay_selection import Selection
from serve_app.streams.backlog import Backlog, Clock, Returns
from serve_app.streams.in_flight import InFlight
from serve_app.telemetry.metric_names import WEIGHT_AGES
from serve_app.telemetry.metrics import Metrics
from speculative.errors import EngineOverloaded, InvalidRequest, RequestTimeout
from speculative.request import FinishReason, Request, TokenDelta

_MOST_VERSIONS = 64  # of the weights, that one request may outlive


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """The load that one replica takes on."""

    max_running: int  # requests at once; a request with n choices counts n times
    timeout_s: float  # the longest a request may take; it may ask for less
    max_others: int | None = None  # requests of other bodies that may run or wait when one is let in
    max_queued_tokens: int | None = None  # of prompts that wait for their first token
    max_first_token_s: float | None = None  # that those ahead may keep a request waiting, as estimated


@dataclass(slots=True)
class _Watched:
    """One request on its way."""

    request: Request
    record: Record
    selection: Selection
    began_at: float
    last_at: float
    outcome: str = "abort"  # unless it comes to an end of its own
    waiting: bool = True  # for its first token

    @property
    def as_computed(self) -> Request:
        """The request, with logprobs where only the referee wants them."""
        if self.selection is not Selection.WITH_LOGPROBS or _asked_for_logprobs(self.request):
            return self.request
        return dataclasses.replace(self.request, params=dataclasses.replace(self.request.params, logprobs=0))


class WeightAges:
    """The age of the weights that made a delta, as a label of three values, however many updates there are."""

    def __init__(self) -> None:
        self._versions: deque[str] = deque(maxlen=_MOST_VERSIONS)  # the newest first

    def age(self, version: str) -> str:
        """Return one of `WEIGHT_AGES`; a version that was not seen before is the current one."""
        if version not in self._versions:
            self._versions.appendleft(version)
        return list(WEIGHT_AGES)[min(self._versions.index(version), len(WEIGHT_AGES) - 1)]


@dataclass(slots=True)
class ObservedSource:
    """A token source that measures, and reports finished requests.

    ended: called for each request that came to an end: the record of it, and whether that is to be checked: it was
        selected, or breaks a limit of its request; must not block.
    """

    source: TokenSource  # where the tokens come from
    metrics: Metrics  # latencies and outcomes are recorded here
    records: Records  # what is served, request by request
    _: KW_ONLY
    select: Callable[[Request], Selection]  # whether a request is to be replayed, and how it is computed then
    ended: Callable[[Record, bool], None]
    limits: SourceLimits  # how many requests may run at once, and how long each
    clock: Clock = time.monotonic  # seconds, monotonic
    in_flight: InFlight = field(default_factory=InFlight)
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _backlog: Backlog = field(init=False)
    _returns: Returns = field(init=False)
    _weights: WeightAges = field(default_factory=WeightAges)

    def __post_init__(self) -> None:
        self._backlog = Backlog(self.clock)
        self._returns = Returns(self.clock)

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        """Deltas as the source gives them; what only the referee asked for is taken out again.

        Raises:
            NoRoom: too many requests are running, or too much waits.
            EngineOverloaded: the source has no room.
            InvalidRequest: it can never be served.
            RequestTimeout: it took too long.
        """
        self._admit(requests)
        now = self.clock()
        watched = {one.request_id: self._begin(one, now) for one in requests}
        self._watched |= watched
        asked = [entry.as_computed for entry in watched.values()]
        ticket = self._backlog.join(len(requests[0].prompt_token_ids), _owner(requests[0]))
        try:
            limit_s = self._time_limit_s(requests[0])
            ends_at = asyncio.get_running_loop().time() + limit_s
            async with contextlib.aclosing(self.source.stream(asked)) as deltas:
                while (delta := await _next(deltas, ends_at, limit_s)) is not None:
                    if is_taken_in(delta):
                        yield delta
                        continue
                    entry = watched[delta.request_id]
                    if entry.waiting:
                        ticket.close(served=True)
                    self._see(entry, delta)
                    hidden = delta.logprobs is not None and not _asked_for_logprobs(entry.request)
                    yield delta._replace(logprobs=None) if hidden else delta
        except Exception as error:
            if isinstance(error, (InvalidRequest, EngineOverloaded)):
                self._refuse(requests[0], error)
            for entry in watched.values():
                entry.outcome = "error" if entry.outcome == "abort" else entry.outcome
            raise
        finally:
            ticket.close(served=False)
            for request_id, entry in watched.items():
                self.in_flight.reach(request_id, "reply")
                del self._watched[request_id]
                self._end(entry)

    async def abort(self, request_id: str) -> None:
        """End one request early: its front end has seen its stop string, perhaps in the last delta."""
        entry = self._watched.get(request_id)
        ended = entry is not None and entry.outcome != "abort"
        if entry is not None:
            entry.outcome = "stop"
        if not ended:
            await self.source.abort(request_id)

    def _begin(self, request: Request, now: float) -> _Watched:
        record, selection = self.records.begin(request), self.select(request)
        record.keeps_alternatives = selection is not Selection.NOT_CHECKED
        return _Watched(request, record, selection, now, now)

    def _time_limit_s(self, request: Request) -> float:
        return min(self.limits.timeout_s, request.timeout_s or math.inf)

    def _admit(self, requests: Sequence[Request]) -> None:
        try:
            self._check_room(requests)
            self._check_backlog(requests[0])
        except (InvalidRequest, NoRoom) as error:
            self.metrics.count("truespec_requests_total", len(requests), outcome="rejected")
            self._refuse(requests[0], error)
            raise

    def _refuse(self, request: Request, error: InvalidRequest | EngineOverloaded) -> None:
        """Count a refusal. What else of the same reply has no token yet is refused with the request; all of it, if it
        can never be served."""
        if isinstance(error, EngineOverloaded):
            reason = error.reason if isinstance(error, NoRoom) else "capacity"
            self.metrics.count("truespec_refusals_total", reason=reason)
        own = _owner(request)
        for entry in self._watched.values():
            is_refused = entry.waiting or isinstance(error, InvalidRequest)
            if is_refused and entry.outcome == "abort" and _owner(entry.request) == own:
                entry.outcome = "rejected"

    def _check_room(self, requests: Sequence[Request]) -> None:
        count, limit, running = len(requests), self.limits.max_running, len(self._watched)
        if count > limit:
            raise InvalidRequest("n", f"n asks for {count} choices; this server runs at most {limit} at once.")
        if running + count > limit:
            raise NoRoom(
                "capacity",
                f"{running} requests are running; the limit is {limit}. Retry later.",
                self._retry_after_s(running + count - limit),
            )
        most = self.limits.max_others
        if most is None or running < most:
            return
        own = _owner(requests[0])
        others = sum(_owner(one.request) != own for one in self._watched.values())
        if others >= most:
            raise NoRoom(
                "load",
                f"{others} requests are running or queued; the limit is {most}. Retry later.",
                self._retry_after_s(others + 1 - most),
            )

    def _retry_after_s(self, missing: int) -> float:
        now = self.clock()
        return self._returns.wait_s([now - one.began_at for one in self._watched.values()], missing)

    def _check_backlog(self, request: Request) -> None:
        """Refuse what would wait too long behind others, while nothing of it is computed yet."""
        wait_s = self._backlog.wait_s(_owner(request))
        num_tokens, most_tokens = self._backlog.num_tokens(_owner(request)), self.limits.max_queued_tokens
        if most_tokens is not None and num_tokens and num_tokens + len(request.prompt_token_ids) > most_tokens:
            raise NoRoom(
                "queued_tokens", f"{num_tokens} prompt tokens are queued; the limit is {most_tokens}.", wait_s or 1.0
            )
        if wait_s is None:
            return
        for reason, limit_s, name in (
            ("time_to_first_token", self.limits.max_first_token_s, "the limit"),
            ("deadline", self._time_limit_s(request), "the request's time"),
        ):
            if limit_s is not None and wait_s > limit_s:
                raise NoRoom(
                    reason,
                    f"The first token would come after about {wait_s:.1f} s, and {name} is {limit_s:g} s.",
                    wait_s - limit_s,
                )

    def _see(self, entry: _Watched, delta: TokenDelta) -> None:
        now = self.clock()
        if delta.token_ids or delta.finished:
            self.in_flight.reach(delta.request_id, "reply" if delta.finished else "decode")
        if delta.token_ids:
            elapsed = now - entry.last_at
            if entry.waiting:
                self.metrics.observe("truespec_time_to_first_token_seconds", elapsed)
                self.metrics.observe("truespec_queue_time_seconds", delta.queue_s)
            else:
                self.metrics.observe("truespec_inter_token_latency_seconds", *_latencies(elapsed, delta))
            entry.last_at, entry.waiting = now, False
        elif delta.finished:
            entry.last_at = now
        if entry.outcome == "abort" and delta.finish_reason not in (None, FinishReason.ABORT):
            entry.outcome = str(delta.finish_reason)
        if delta.num_drafted:
            labels = {"since_handoff": entry.record.since_handoff, "weights": self._weights.age(delta.weight_version)}
            self.metrics.count("truespec_draft_tokens_since_handoff_total", delta.num_drafted, **labels)
            self.metrics.count("truespec_accepted_tokens_since_handoff_total", delta.num_accepted, **labels)
        entry.record.take(delta)

    def _end(self, entry: _Watched) -> None:
        self._returns.ended(self.clock() - entry.began_at)
        self.metrics.count("truespec_requests_total", outcome=entry.outcome)
        if entry.outcome in (FinishReason.STOP, FinishReason.LENGTH):
            self.metrics.observe("truespec_request_duration_seconds", entry.last_at - entry.began_at)
        self.records.end(entry.request.request_id)
        if entry.outcome not in (FinishReason.ERROR, "rejected") and entry.request.score_from is None:
            is_replayed = entry.selection is not Selection.NOT_CHECKED
            self.ended(entry.record, is_replayed or bool(entry.record.broken_limit))


async def _next(deltas: AsyncGenerator[TokenDelta, None], ends_at: float, limit_s: float) -> TokenDelta | None:
    """The next delta, None = there is none; one that is there already is returned however late it is."""
    try:
        async with asyncio.timeout_at(ends_at) as waiting:
            return await anext(deltas, None)
    except TimeoutError as error:
        if not waiting.expired():  # it is another one's
            raise
        raise RequestTimeout(
            f"The request took longer than the {limit_s:g} s it had; ask for fewer tokens, or for more time where the "
            "server allows it."
        ) from error


def _latencies(elapsed: float, delta: TokenDelta) -> Iterable[float]:
    """The seconds that each step of a delta took, by its tokens; `elapsed` is the time since the delta before it."""
    if not delta.gaps_s:
        return (elapsed / len(delta.token_ids),)
    steps_s = (max(0.0, elapsed - sum(delta.gaps_s)), *delta.gaps_s)
    return [step_s / one.num_tokens for step_s, one in zip(steps_s, delta.rounds, strict=True)]


def _owner(request: Request) -> str:
    """The reply that a request is a part of: its prompts and pairs share one, and do not wait behind each other."""
    return "-".join(request.request_id.split("-")[:2])


def _asked_for_logprobs(request: Request) -> bool:
    return request.params.returns_logprobs or request.score_from is not None
