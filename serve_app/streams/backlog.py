"""How many requests wait, for how long, and when one that is refused should return."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

Clock = Callable[[], float]  # seconds, monotonic
_HALF_LIFE_S = 15.0  # of what is remembered of the rate
_PROMPT_COST = 64  # what a prompt costs beside its own tokens, in tokens
_UNKNOWN_DURATION_S = 30.0  # of a request, until one has ended
_SOONEST_RETURN_S = 1.0
_LATEST_RETURN_S = 60.0  # clients wait no longer: openai's take a longer time for none at all


class Backlog:
    """Prompts that wait for their first token, and how long a newcomer would wait behind them.

    The rate is what was measured while anything waited: cost of the prompts that got their first token, over the time.
    It holds all that takes time (the queue, other prompts, decoding beside them, the handoff), and what stands still
    makes it fall. It forgets half of what it knows in 15 s of waiting.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._waiting: dict[str, list[int]] = {}  # tokens of each prompt, by owner
        self._served = 0.0
        self._busy_s = 0.0

    def join(self, num_tokens: int, owner: str = "") -> "Ticket":
        """A prompt joins; `owner` names what it is a part of, as one of many prompts of a body is."""
        self._pass_time()
        self._waiting.setdefault(owner, []).append(num_tokens)
        return Ticket(self, num_tokens, owner)

    def leave(self, num_tokens: int, owner: str = "", *, served: bool) -> None:
        """A prompt has got its first token, or has gone without."""
        self._pass_time()
        self._waiting[owner].remove(num_tokens)
        if not self._waiting[owner]:
            del self._waiting[owner]
        if served:
            self._served += num_tokens + _PROMPT_COST

    def num_tokens(self, newcomer: str | None = None) -> int:
        """Tokens of the prompts that wait; those of a newcomer's own owner do not stand in its way."""
        return sum(sum(prompts) for owner, prompts in self._waiting.items() if owner != newcomer)

    def wait_s(self, newcomer: str | None = None) -> float | None:
        """Seconds until all that wait have got their first token (estimated), the newcomer's own apart; None where
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
        """The prompt waits no longer; calling it again does nothing."""
        if self._backlog is not None:
            self._backlog.leave(self._num_tokens, self._owner, served=served)
            self._backlog = None


class Returns:
    """When those who are turned away may come back: each when room is expected for it, behind those told before.

    Room comes free as what is under way ends, after about the mean time that the last ones took. Until one has ended
    nobody knows how long they take, and what has run for some time is expected to take twice that.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._mean_s: float | None = None
        self._reported: Counter[int] = Counter()  # who was told to come back, by the second (of the clock) at which

    def ended(self, duration_s: float) -> None:
        """One that was let in has ended, so long after it came."""
        if self._mean_s is None:
            self._mean_s = duration_s
        self._mean_s += 0.1 * (duration_s - self._mean_s)

    def wait_s(self, ages_s: Sequence[float], missing: int) -> float:
        """Seconds after which to come back, at least 1 and at most a minute; who is told so counts from now on.

        Args:
            ages_s: how long ago each came that is under way.
            missing: how many of them have to end before there is room for the newcomer alone.
        """
        now = self._clock()
        self._reported = Counter({second: count for second, count in self._reported.items() if second > now})
        rank = min(missing + self._reported.total(), len(ages_s))
        wait_s = min(max(self._room_in_s(ages_s, rank), _SOONEST_RETURN_S), _LATEST_RETURN_S)
        self._reported[math.ceil(now + wait_s)] += 1
        return wait_s

    def _room_in_s(self, ages_s: Sequence[float], rank: int) -> float:
        """Seconds until the `rank`-th of those under way is expected to end."""
        mean_s = self._mean_s
        if mean_s is None:
            mean_s = max(_UNKNOWN_DURATION_S, 2 * max(ages_s))
        overdue = sum(age >= mean_s for age in ages_s)  # nobody knows when: they end one after the other
        if rank <= overdue:
            return mean_s * rank / len(ages_s)
        return mean_s - sorted(ages_s, reverse=True)[rank - 1]
