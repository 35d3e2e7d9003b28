"""Admission: how much a key may use, and how long those ahead will keep a newcomer waiting.

Each replica that answers HTTP counts for itself: with R of them behind a balancer a key may use up to R times its
limits. Shared counts would cost a call to another process before every request.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.access.access import Caller
from serve_app.errors import RateLimited
from serve_app.streams.backlog import Clock
from serve_app.telemetry.metrics import CounterSums, Metrics

_MINUTE_S = 60.0
_ROUNDING = 1e-6  # else a client that returns exactly on time would be refused


class TokenBucket:
    """Fills evenly, up to a minute's worth.

    More may be taken than is there; nothing more is admitted until that debt is paid off. So the rate holds in the long
    run, although a request's usage is known only afterwards.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until this amount is available; 0 if it is now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / _MINUTE_S)
        self._at = now
        missing = amount - self._level
        return missing * _MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take this amount, whether it is available or not."""
        self.wait_s(0)
        self._level -= amount


class Lease:
    """One request of a key, while it lasts."""

    def __init__(self, use: "_Use", charge: Callable[[int], None], left: Callable[[], None]) -> None:
        self.charge = charge  # called with the number of further tokens used
        self._left = left  # called at the end
        self._use: _Use | None = use

    def leave(self) -> None:
        """The request has ended; calling it again does nothing."""
        if self._use is not None:
            self._use.num_running -= 1
            self._use = None
            self._left()


@dataclass(slots=True)
class _Use:
    """One key's requests in flight, and what it has left."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_running: int = 0


class KeyLimiter:
    """Enforces every key's limits.

    Args:
        metrics: counts what keys use, by their ids.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: Metrics | None = None, clock: Clock = time.monotonic) -> None:
        self._metrics = metrics
        self._sums = None if metrics is None else CounterSums(metrics, clock)  # of tokens
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, caller: Caller) -> Lease:
        """Admit one HTTP request.

        Raises:
            RateLimited: the key has used up its limit.
        """
        use = self._use(caller)
        self._check(caller, use)
        use.num_running += 1
        if use.requests is not None:
            use.requests.take(1)
        if self._metrics is not None and caller.id:
            self._metrics.count("truespec_key_requests_total", key=caller.id)

        def charge(num_tokens: int) -> None:
            if use.tokens is not None:
                use.tokens.take(num_tokens)
            if self._sums is not None and caller.id:
                self._sums.add("truespec_key_tokens_total", num_tokens, key=caller.id)

        return Lease(use, charge, self._left)

    def _check(self, caller: Caller, use: _Use) -> None:
        if caller.max_concurrent is not None and use.num_running >= caller.max_concurrent:
            self._refuse("key_concurrency", f"it may have {caller.max_concurrent} requests under way at once.", 1.0)
        for bucket, need, reason, unit in (
            (use.requests, 1.0, "key_requests", "requests"),
            (use.tokens, 1.0, "key_tokens", "tokens"),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(need)
            if bucket is not None and wait_s > 0:
                self._refuse(reason, f"it may use {bucket.per_minute} {unit} a minute here.", wait_s)

    def _refuse(self, reason: str, why: str, retry_after_s: float) -> None:
        raise RateLimited(reason, f"This key has reached its limit: {why}", retry_after_s)

    def _left(self) -> None:
        if self._sums is not None:
            self._sums.flush()

    def _use(self, caller: Caller) -> _Use:
        use = self._uses.setdefault(caller.id, _Use())
        use.requests = self._bucket(use.requests, caller.requests_per_minute)
        use.tokens = self._bucket(use.tokens, caller.tokens_per_minute)
        return use

    def _bucket(self, known: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        """The existing bucket, or a full one if the limit is new."""
        if per_minute is None or (known is not None and known.per_minute == per_minute):
            return None if per_minute is None else known
        return TokenBucket(per_minute, self._clock)
