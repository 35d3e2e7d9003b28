"""The line in front of the engine: requests by priority and age, scoring behind them."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter

from speculative.state.sequence import Sequence

_Place = tuple[bool, int, float, int]  # scoring?, rank (who was running comes first), when it is due (s), arrival


class RequestQueue:
    """Sequences that wait for room, by request id. Scoring has time: it comes after every request that generates.

    A request is due when it arrived, and one class of priority is worth `ageing_s` of waiting: a request of priority 1
    stands where one of priority 0 would that had arrived so much later. All of them age alike, so places never change,
    and nobody waits for ever: whoever arrives late enough stands behind.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._line: list[tuple[_Place, Sequence]] = []  # in order
        self._places: dict[str, _Place] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._line)

    def append(self, sequence: Sequence) -> None:
        """Join its line."""
        self._count += 1
        self._insert(sequence, (sequence.scores_only, 1, self.due_at(sequence), self._count))

    def push_in(self, sequence: Sequence) -> None:
        """Come back to the front of its line: it was running already."""
        self._count += 1
        self._insert(sequence, (sequence.scores_only, 0, 0.0, -self._count))

    def remove(self, sequence: Sequence) -> None:
        """Leave the line."""
        place = self._places.pop(sequence.request.request_id)
        del self._line[bisect_left(self._line, place, key=itemgetter(0))]

    @property
    def num_replays(self) -> int:
        """Replays among those that wait. Any thread may ask."""
        return sum(sequence.request.replay for _, sequence in tuple(self._line))

    @property
    def first(self) -> Sequence | None:
        """Return who is next; None when nobody waits."""
        return self._line[0][1] if self._line else None

    def due_at(self, sequence: Sequence) -> float:
        """The time (s, monotonic) by which a sequence is put in order."""
        return sequence.arrived_at + sequence.request.priority * self._ageing_s

    def _insert(self, sequence: Sequence, place: _Place) -> None:
        self._places[sequence.request.request_id] = place
        insort(self._line, (place, sequence), key=itemgetter(0))
