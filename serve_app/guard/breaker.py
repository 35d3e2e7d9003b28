"""The breaker of one replica: when it speculates, when it decodes plainly, and when it is to be replaced.

    CLOSED ── trip ──► OPEN ── after a while ──► CANARY ── passed ──► CLOSED
                        ▲                          │
                        └────────── failed ────────┘       a second trip within the window, or one while OPEN, where
                                                           speculation cannot be the cause ──► OUT

It knows no engine and no clock of its own: what follows from its state, `breaker_control.BreakerController` does.
"""

import enum
import math
from collections import deque
from collections.abc import Callable

from serve_app.config.app_config import BreakerSection
from serve_app.referee.judge.verdicts import Trip
from speculative.request import Speculation

REHEARSAL = "rehearsal"  # the reason for which a breaker is open that nothing has tripped
_REHEARSED_S = 15.0  # at most, until speculation is tried out again: no alert on an open breaker is to fire
_MOST_BACK_OFF = 16


class BreakerState(enum.StrEnum):
    """The state of a replica's breaker: what the replica may do."""

    CLOSED = "closed"  # speculates
    CANARY = "canary"  # decodes plainly, and tries speculation out on requests of its own
    OPEN = "open"  # decodes plainly
    OUT = "out"  # decodes plainly until it is replaced


class Mode(enum.StrEnum):
    """The authority over speculation: the breaker, or an operator."""

    AUTO = "auto"
    ON = "on"  # whatever the breaker says; nothing is replaced either
    OFF = "off"


class Breaker:
    """One replica's.

    Args:
        settings: how long things take, and who decides at first.
        clock: seconds; unix time where others are to understand it.
    """

    def __init__(self, settings: BreakerSection, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self.mode = Mode(settings.mode)
        self.state = BreakerState.CLOSED
        self.since = clock()  # of the last change of state
        self.reason = ""  # of the last trip
        self._began = self.since
        self._changed_at = -math.inf  # as `since`, but a replica does not begin with a change
        self._trips: deque[float] = deque()
        self._num_failed = 0  # canaries since the last trip
        self._canary_began = self.since

    @property
    def speculation(self) -> Speculation:
        """Return who may speculate now."""
        if self.mode is not Mode.AUTO:
            return Speculation.ON if self.mode is Mode.ON else Speculation.OFF
        if self.state is BreakerState.CLOSED:
            return Speculation.ON
        return Speculation.CANARY if self.state is BreakerState.CANARY else Speculation.OFF

    @property
    def out_of_service(self) -> bool:
        """Return whether the replica is to be replaced."""
        return self.state is BreakerState.OUT and self.mode is Mode.AUTO

    def trip(self, reason: str, shown_at: float, evidence_since: float) -> Trip | None:
        """Something is wrong; None where that is known already.

        While speculation is on trial it may be what is wrong, even with requests that do not speculate: they share
        steps with canaries. Then the trial has failed, and no more is held against the replica.

        Args:
            reason: one word for the metric.
            shown_at: when the last of what shows it began; what began before the last change counts no more.
            evidence_since: when the first of it began.
        """
        if self.state is BreakerState.OUT or shown_at <= self._changed_at:
            return None
        if self.state is BreakerState.CANARY:
            return self.end_canary(passed=False)
        now = self._clock()
        while self._trips and self._trips[0] < now - self._settings.window_s:
            self._trips.popleft()
        again = bool(self._trips) or (self.state is not BreakerState.CLOSED and self.reason != REHEARSAL)
        self._trips.append(now)
        self.reason = reason
        if self.mode is not Mode.ON:
            self._num_failed = 0
            self._go(BreakerState.OUT if again else BreakerState.OPEN)
        return Trip(reason, now, max(self._began, min(evidence_since, now - self._settings.suspect_s)))

    def rehearse(self) -> None:
        """A rehearsed fault was found: open as for a real one, but it is no trip, and makes nothing suspect."""
        if self.state is BreakerState.CLOSED and self.mode is Mode.AUTO:
            self.state, self.since, self._num_failed = BreakerState.OPEN, self._clock(), 0
            self.reason = REHEARSAL

    @property
    def canary_due(self) -> bool:
        """Return whether it is time to try speculation out."""
        wait_s = self._settings.cooldown_s * min(2**self._num_failed, _MOST_BACK_OFF)
        if self.reason == REHEARSAL and not self._num_failed:
            wait_s = min(wait_s, _REHEARSED_S)
        rested = self._clock() - self.since >= wait_s
        return self.state is BreakerState.OPEN and self.mode is Mode.AUTO and rested

    def begin_canary(self) -> None:
        """Speculation is on trial."""
        self.state = BreakerState.CANARY  # no change to what clients get: what they show counts as before
        self._canary_began = self._clock()

    def end_canary(self, *, passed: bool | None) -> Trip | None:
        """The trial is over; None = it showed nothing. One that failed makes suspect what was answered meanwhile."""
        if self.state is not BreakerState.CANARY:
            return None
        self._num_failed += passed is False
        self._go(BreakerState.CLOSED if passed else BreakerState.OPEN)
        return Trip("canary", self.since, self._canary_began) if passed is False else None

    def set_mode(self, mode: Mode) -> None:
        """An operator decides. `on` also forgets the trips."""
        if mode is self.mode:
            return
        self.mode = mode
        if mode is Mode.ON:
            self._trips.clear()
            self._go(BreakerState.CLOSED)

    def _go(self, state: BreakerState) -> None:
        self.state, self.since = state, self._clock()
        self._changed_at = self.since
