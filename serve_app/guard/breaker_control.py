"""Acts on faults found in one replica: passes evidence to the breaker, and carries out its decisions."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace

from serve_app.backends.base import Backend
from serve_app.guard.breaker import REHEARSAL, Breaker, BreakerState, Mode
from serve_app.guard.heartbeat import Orders, ReplicaStatus
from serve_app.guard.rehearsal import Rehearsal
from serve_app.referee.judge.verdicts import Trip
from serve_app.telemetry.metric_names import BREAKER_STATES
from serve_app.telemetry.metrics import Metrics
from speculative.errors import EngineFault
from speculative.request import Speculation
from speculative.stats import CheckState, StepStats

_logger = logging.getLogger("truespec.breaker")

_CANARY_TIMEOUT_S = 120.0

TryOut = Callable[[], Awaitable[bool | None]]
"""Tries speculation out: whether it is correct; None if inconclusive."""


@dataclass(slots=True)
class BreakerController:
    """Stops one replica from continuing with a fault."""

    identity: tuple[str, str]  # its name and pool
    backend: Backend  # its engine
    breaker: Breaker  # decides
    metrics: Metrics  # state, trips, canaries
    try_out: TryOut  # a canary
    clock: Callable[[], float] = time.time  # the breaker's
    _inspected_at: float = field(init=False)
    _speculation: Speculation | None = None  # as last set on the engine
    _trips: list[Trip] = field(default_factory=list)
    _canary: asyncio.Task[None] | None = None
    _rehearsal: Rehearsal | None = None

    def __post_init__(self) -> None:
        self._inspected_at = self.clock()
        self.metrics.begin("truespec_breaker_trips_total", "truespec_canaries_total")
        self.act()

    @property
    def status(self) -> ReplicaStatus:
        """State of the breaker."""
        one = self.breaker
        return ReplicaStatus(*self.identity, one.state, one.mode, one.since, one.reason, self._rehearsal)

    def inspect(self, stats: StepStats, checks: Sequence[CheckState] = ()) -> None:
        """Check what the engine found out about itself since the last call; `checks`: how its self-checks stand."""
        began, self._inspected_at = self._inspected_at, self.clock()
        since = min((check.evidence_since for check in checks if check.check in stats.alarms), default=began)
        for reason, found, evidence_since in (
            ("selfcheck", stats.alarms, since),
            ("invariant", stats.violations, began),
            ("logprobs", stats.logprob_violations, began),
        ):
            if found:
                self._trip(reason, f"the engine's own checks: {', '.join(found)}", began, evidence_since)
        if stats.evidence and self._trips:  # also of a canary that it ended
            self._trips[-1] = replace(self._trips[-1], evidence=stats.evidence)

    def apply(self, orders: Orders) -> None:
        """Carry out the orders in the referee's answer."""
        for finding in orders.findings:
            reason = "drift" if finding.alarm in ("drift", "alternatives") else "law"
            what = f"replays: {finding.alarm} in stratum {finding.stratum}"
            self._trip(reason, what, finding.began_at, finding.evidence_since)
        if orders.mode is not None and orders.mode is not self.breaker.mode:
            _logger.warning("an operator has set speculation to %s", orders.mode)
            self.breaker.set_mode(orders.mode)

    def act(self) -> None:
        """Apply the breaker's state to the engine, and start a canary when one is due."""
        if self.breaker.canary_due and (self._canary is None or self._canary.done()):
            self.breaker.begin_canary()
            # A context of its own: the canary is not part of whichever request triggered this.
            self._canary = asyncio.get_running_loop().create_task(self._run_canary(), context=Context())
        if self.breaker.speculation is not self._speculation:
            self._speculation = self.breaker.speculation
            self.backend.set_speculation(self._speculation)
        self.metrics.gauge("truespec_breaker_state", BREAKER_STATES.index(self.breaker.state.value))
        self.metrics.gauge("truespec_speculation_enabled", int(self.breaker.speculation is Speculation.ON))

    def rehearse(self) -> None:
        """Turn speculation off as for a fault, of which no answer to a client is suspect."""
        self.breaker.rehearse()
        self.metrics.count("truespec_breaker_trips_total", reason=REHEARSAL)
        self.act()

    def note_rehearsal(self, rehearsal: Rehearsal) -> None:
        """Report how far the replica's latest rehearsal has come."""
        self._rehearsal = rehearsal

    def take_trips(self) -> tuple[Trip, ...]:
        """Trips since the last call."""
        taken, self._trips = tuple(self._trips), []
        return taken

    def put_back(self, trips: tuple[Trip, ...]) -> None:
        """Put back trips that could not be reported; they are sent with the next ones."""
        self._trips[:0] = trips

    def check_health(self) -> None:
        """Raises:
        EngineFault: the replica is to be replaced.
        """
        if self.breaker.out_of_service:
            raise EngineFault(f"This replica failed its checks twice ({self.breaker.reason}) and must be replaced.")

    def _trip(self, reason: str, what: str, shown_at: float, evidence_since: float) -> None:
        on_trial = self.breaker.state is BreakerState.CANARY
        trip = self.breaker.trip(reason, shown_at, evidence_since)
        if trip is None:
            _logger.warning("%s; the breaker is %s", what, self.breaker.state)
        else:
            self._trips.append(trip)
            if not on_trial:
                self.metrics.count("truespec_breaker_trips_total", reason=reason)
            _logger.error("%s; the breaker is %s now", what, self.breaker.state)
            if self.breaker.mode is not Mode.ON:
                self.backend.invalidate_cache()
        self.act()

    async def _run_canary(self) -> None:
        passed: bool | None = None
        try:
            async with asyncio.timeout(_CANARY_TIMEOUT_S):
                passed = await self.try_out()
        except Exception:
            _logger.warning("a canary request failed", exc_info=True)
        if self.breaker.state in (BreakerState.OPEN, BreakerState.OUT):
            passed = False  # a fault was found in the meantime
        elif self.breaker.state is BreakerState.CLOSED:
            passed = None  # an operator set it so in the meantime
        trip = self.breaker.end_canary(passed=passed)
        if trip is not None:
            self._trips.append(trip)
        result = {True: "passed", False: "failed", None: "inconclusive"}[passed]
        self.metrics.count("truespec_canaries_total", result=result)
        _logger.warning("the canary %s: the breaker is %s now", result, self.breaker.state)
        if self.breaker.state is not BreakerState.CLOSED:
            self.backend.invalidate_cache()
        self.act()
