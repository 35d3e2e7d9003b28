"""The backlog: how many requests wait, for how long, and when one that is refused should return."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

Clock = Callable[[], float]  # seconds, monotonic
_HALF_LIFE_S = 15.0  # of the remembered rate
_PROMPT_COST = 64  # overhead of a prompt, in tokens
_UNKNOWN_DURATION_S = 30.0  # of a request, until one has ended
_SOONEST_RETURN_S = 1.0
_LATEST_RETURN_S = 60.0  # clients wait no longer: openai's ignore a longer time


class Backlog:
    """Prompts that wait for their first token, and how long a newcomer would wait behind them.

    The rate is measured while anything waits: cost of the prompts that got their first token, over the time. It
    includes everything that takes time (the queue, other prompts, concurrent decoding, the handoff), and falls when
    nothing moves. Its half-life is 15 s of waiting.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._waiting: dict[str, list[int]] = {}  # tokens of each prompt, by owner
        self._served = 0.0
        self._busy_s = 0.0

    def join(self, num_tokens: int, owner: str = "") -> "Ticket":
        """A prompt joins; `owner` names what it belongs to, such as a body with many prompts."""
        self._pass_time()
        self._waiting.setdefault(owner, []).append(num_tokens)
        return Ticket(self, num_tokens, owner)

    def leave(self, num_tokens: int, owner: str = "", *, served: bool) -> None:
        """A prompt has got its first token, or has left without one."""
        self._pass_time()
        self._waiting[owner].remove(num_tokens)
        if not self._waiting[owner]:
            del self._waiting[owner]
        if served:
            self._served += num_tokens + _PROMPT_COST

    def num_tokens(self, newcomer: str | None = None) -> int:
        """Tokens of the prompts that wait; without those of the newcomer's own owner."""
        return sum(sum(prompts) for owner, prompts in self._waiting.items() if owner != newcomer)

    def wait_s(self, newcomer: str | None = None) -> float | None:
        """Seconds until all that wait have got their first token (estimated), except the newcomer's own; None if
        nothing was measured yet."""
        self._pass_time()
        num_prompts = sum(len(prompts) for owner, prompts in self._waiting.items() if owner != newcomer)
        if num_prompts == 0:
            return 0.0
        cost = self.num_tokens(newcomer) + num_prompts * _PROMPT_COST
        return None if self._served == 0 else cost * self._busy_s / self._served

    def _pass_time(self) -> None:
        now = self._clock()
        if self._waiting:
            passed = now - self._at
            kept = 0.5 ** (passed / _HALF_LIFE_S)
            self._served *= kept
            self._busy_s = self._busy_s * kept + passed
        self._at = now


class Ticket:
    """A prompt's place in the backlog."""

    def __init__(self, backlog: Backlog, num_tokens: int, owner: str) -> None:
        self._backlog: Backlog | None = backlog
        self._num_tokens = num_tokens
        self._owner = owner

    def close(self, *, served: bool) -> None:
        """The prompt no longer waits; calling it again does nothing."""
        if self._backlog is not None:
            self._backlog.leave(self._num_tokens, self._owner, served=served)
            self._backlog = None


class Returns:
    """Times at which refused clients should retry: each when room is expected for it, after those refused earlier.

    Room is freed as running requests end, after about the mean duration of the last ones. Until one has ended that
    duration is unknown, and a request is expected to take twice as long as it has run.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._mean_s: float | None = None
        self._reported: Counter[int] = Counter()  # refused clients, by the second (of the clock) of their retry

    def ended(self, duration_s: float) -> None:
        """An admitted request has ended, this long after its arrival."""
        if self._mean_s is None:
            self._mean_s = duration_s
        self._mean_s += 0.1 * (duration_s - self._mean_s)

    def wait_s(self, ages_s: Sequence[float], missing: int) -> float:
        """Seconds until a retry, at least 1 and at most a minute; this client is counted from now on.

        Args:
            ages_s: ages of the running requests.
            missing: how many of them have to end before there is room for the newcomer alone.
        """
        now = self._clock()
        self._reported = Counter({second: count for second, count in self._reported.items() if second > now})
        rank = min(missing + self._reported.total(), len(ages_s))
        wait_s = min(max(self._room_in_s(ages_s, rank), _SOONEST_RETURN_S), _LATEST_RETURN_S)
        self._reported[math.ceil(now + wait_s)] += 1
        return wait_s

    def _room_in_s(self, ages_s: Sequence[float], rank: int) -> float:
        """Seconds until the `rank`-th running request is expected to end."""
        mean_s = self._mean_s
        if mean_s is None:
            mean_s = max(_UNKNOWN_DURATION_S, 2 * max(ages_s))
        overdue = sum(age >= mean_s for age in ages_s)  # their end is unknown: assumed to be evenly spaced
        if rank <= overdue:
            return mean_s * rank / len(ages_s)
        return mean_s - sorted(ages_s, reverse=True)[rank - 1]
