"""Acts on faults found in one replica: passes evidence to the breaker, and carries out its decisions."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context

from serve_app.backends.base import Backend
from serve_app.guard.breaker import REHEARSAL, Breaker, BreakerState, Mode
from serve_app.guard.heartbeat import Orders, ReplicaStatus
from serve_app.guard.rehearsal import Rehearsal
from serve_app.referee.judge.verdicts import Trip
from serve_app.telemetry.metric_names import BREAKER_STATES, TRIP_REASONS
from serve_app.telemetry.metrics import Metrics
from speculative.errors import EngineFault
from speculative.request import Speculation
from speculative.stats import CheckState, StepStats

_logger = logging.getLogger("truespec.breaker")

_CANARY_TIMEOUT_S = 120.0

TryOut = Callable[[], Awaitable[bool | None]]
"""Tries speculation out: whether it is correct; None if inconclusive."""


class BreakerController:
    """Stops one replica from continuing with a fault.

    Args:
        identity: its name and pool.
        backend: its engine.
        breaker: decides.
        metrics: state, trips, canaries.
        try_out: a canary.
        clock: the breaker's.
    """

    def __init__(
        self,
        identity: tuple[str, str],
        backend: Backend,
        breaker: Breaker,
        metrics: Metrics,
        try_out: TryOut,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._replica, self._pool = identity
        self._backend = backend
        self._breaker = breaker
        self._metrics = metrics
        self._try_out = try_out
        self._clock = clock
        self._inspected_at = clock()
        self._speculation: Speculation | None = None  # as last set on the engine
        self._trips: list[Trip] = []
        self._canary: asyncio.Task[None] | None = None
        self._rehearsal: Rehearsal | None = None
        for reason in TRIP_REASONS:
            metrics.count("truespec_breaker_trips_total", 0, reason=reason)
        for result in ("passed", "failed", "inconclusive"):
            metrics.count("truespec_canaries_total", 0, result=result)
        self.act()

    @property
    def status(self) -> ReplicaStatus:
        """State of the breaker."""
        breaker = self._breaker
        state = breaker.state, breaker.mode, breaker.since, breaker.reason
        return ReplicaStatus(self._replica, self._pool, *state, self._rehearsal)

    def inspect(self, stats: StepStats, checks: Sequence[CheckState] = ()) -> None:
        """Check what the engine found out about itself since the last call; `checks`: how its self-checks stand."""
        began, self._inspected_at = self._inspected_at, self._clock()
        since = min((check.evidence_since for check in checks if check.check in stats.alarms), default=began)
        for reason, found, evidence_since in (
            ("selfcheck", stats.alarms, since),
            ("invariant", stats.violations, began),
            ("logprobs", stats.logprob_violations, began),
        ):
            if found:
                self._trip(reason, f"the engine's own checks: {', '.join(found)}", began, evidence_since)

    def apply(self, orders: Orders) -> None:
        """Carry out the orders in the referee's answer."""
        for finding in orders.findings:
            reason = "drift" if finding.alarm in ("drift", "alternatives") else "law"
            what = f"replays: {finding.alarm} in stratum {finding.stratum}"
            self._trip(reason, what, finding.began_at, finding.evidence_since)
        if orders.mode is not None and orders.mode is not self._breaker.mode:
            _logger.warning("an operator has set speculation to %s", orders.mode)
            self._breaker.set_mode(orders.mode)

    def act(self) -> None:
        """Apply the breaker's state to the engine, and start a canary when one is due."""
        if self._breaker.canary_due and (self._canary is None or self._canary.done()):
            self._breaker.begin_canary()
            # A context of its own: the canary is not part of whichever request triggered this.
            self._canary = asyncio.get_running_loop().create_task(self._run_canary(), context=Context())
        if self._breaker.speculation is not self._speculation:
            self._speculation = self._breaker.speculation
            self._backend.set_speculation(self._speculation)
        self._metrics.gauge("truespec_breaker_state", BREAKER_STATES.index(self._breaker.state.value))
        self._metrics.gauge("truespec_speculation_enabled", int(self._breaker.speculation is Speculation.ON))

    def rehearse(self) -> None:
        """Turn speculation off as for a fault, of which no answer to a client is suspect."""
        self._breaker.rehearse()
        self._metrics.count("truespec_breaker_trips_total", reason=REHEARSAL)
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
        if self._breaker.out_of_service:
            raise EngineFault(f"This replica failed its checks twice ({self._breaker.reason}) and must be replaced.")

    def _trip(self, reason: str, what: str, shown_at: float, evidence_since: float) -> None:
        on_trial = self._breaker.state is BreakerState.CANARY
        trip = self._breaker.trip(reason, shown_at, evidence_since)
        if trip is None:
            _logger.warning("%s; the breaker is %s", what, self._breaker.state)
        else:
            self._trips.append(trip)
            if not on_trial:
                self._metrics.count("truespec_breaker_trips_total", reason=reason)
            _logger.error("%s; the breaker is %s now", what, self._breaker.state)
            if self._breaker.mode is not Mode.ON:
                self._backend.invalidate_cache()
        self.act()

    async def _run_canary(self) -> None:
        passed: bool | None = None
        try:
            async with asyncio.timeout(_CANARY_TIMEOUT_S):
                passed = await self._try_out()
        except Exception:
            _logger.warning("a canary request failed", exc_info=True)
        if self._breaker.state in (BreakerState.OPEN, BreakerState.OUT):
            passed = False  # a fault was found in the meantime
        elif self._breaker.state is BreakerState.CLOSED:
            passed = None  # an operator set it so in the meantime
        trip = self._breaker.end_canary(passed=passed)
        if trip is not None:
            self._trips.append(trip)
        result = {True: "passed", False: "failed", None: "inconclusive"}[passed]
        self._metrics.count("truespec_canaries_total", result=result)
        _logger.warning("the canary %s: the breaker is %s now", result, self._breaker.state)
        if self._breaker.state is not BreakerState.CLOSED:
            self._backend.invalidate_cache()
        self.act()
