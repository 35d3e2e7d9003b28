"""Whether the requests that were selected for a replay are handed in: else whatever is wrong with those that are left
out stays unseen.

A reply is selected by its id alone (`replay_selection.chosen`), and replicas report every request that ended. So the
controller knows which answers must come.
"""

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.evidence import RareTest
from serve_app.referee.judge.verdicts import Finished, split_id
from serve_app.referee.records.replay_selection import chosen

_HANDED_IN_AFTER_S = 15.0  # an answer that nothing holds up any more
_LOST_RATE = 0.01  # share of them that is lost with a connection or a process, at most
_DELTA = 1e-8  # of each test: false alarms
_KEPT = 50_000


@dataclass(slots=True)
class Coverage:
    """Waits for the answers that must come."""

    share: float  # of the replies that is selected
    longest_s: float  # that a reply may hold up its answers, by other choices or a client that takes it slowly
    # where more are missing than are lost by chance: the replica of the last one, and that one
    missed: Callable[[str, Finished], None]
    clock: Callable[[], float] = time.monotonic  # seconds
    _due: deque[tuple[float, str, Finished]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _came: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _tests: defaultdict[str, RareTest] = field(
        default_factory=lambda: defaultdict(lambda: RareTest(_LOST_RATE, _DELTA))
    )

    def came(self, answer: Answer) -> None:
        """An answer was handed in."""
        self._came[answer.request.request_id] = None
        if len(self._came) > _KEPT:
            self._came.popitem(last=False)

    def finished(self, replica: str, requests: Sequence[Finished]) -> None:
        """A replica has reported requests that ended, and has not been silent before."""
        now = self.clock()
        for one in requests:
            if one.num_tokens and chosen(split_id(one.request_id)[0], self.share):
                self._due.append((now, replica, one))
        while self._due and self._due[0][0] <= now - self.longest_s - _HANDED_IN_AFTER_S:
            _, maker, one = self._due.popleft()
            # By length, too: a limit that loses long answers alone loses too few to show among all.
            for stratum in ("all", maker, f"{one.num_tokens.bit_length()} bits of tokens"):
                test = self._tests[stratum]
                test.add([one.request_id not in self._came])
                if test.alarm:
                    del self._tests[stratum]  # else it would raise the alarm again with every answer
                    self.missed(maker, one)
