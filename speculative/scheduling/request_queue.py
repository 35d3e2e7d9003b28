"""The line in front of the engine: requests by priority and age, scoring behind them."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from speculative.state.sequence import Sequence

_Place = tuple[int, float, int]  # rank (who was running comes first), when it is due (s), order of arrival


class RequestQueue:
    """Sequences that wait for room, by request id. Scoring has time: it comes after every request that generates.

    A request is due when it arrived, and one class of priority is worth `ageing_s` of waiting: a request of priority 1
    stands where one of priority 0 would that had arrived so much later. All of them age alike, so places never change,
    and nobody waits for ever: whoever arrives late enough stands behind.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._requests: list[tuple[_Place, Sequence]] = []  # in order
        self._scoring: list[tuple[_Place, Sequence]] = []
        self._places: dict[str, _Place] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        yield from (sequence for _, sequence in self._requests)
        yield from (sequence for _, sequence in self._scoring)

    def append(self, sequence: Sequence) -> None:
        """Join its line."""
        self._count += 1
        self._insert(sequence, (1, self.due_at(sequence), self._count))

    def push_in(self, sequence: Sequence) -> None:
        """Come back to the front of its line: it was running already."""
        self._count += 1
        self._insert(sequence, (0, 0.0, -self._count))

    def remove(self, sequence: Sequence) -> None:
        """Leave the line."""
        line = self._line(sequence)
        place = self._places.pop(sequence.request.request_id)
        del line[bisect_left(line, place, key=_place_of)]

    @property
    def num_replays(self) -> int:
        """Replays among those that wait. Any thread may ask."""
        return sum(sequence.request.replay for _, sequence in tuple(self._scoring))

    @property
    def first(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        line = self._requests or self._scoring
        return line[0][1] if line else None

    def due_at(self, sequence: Sequence) -> float:
        """The time (s, monotonic) by which a sequence is put in order."""
        return sequence.arrived_at + sequence.request.priority * self._ageing_s

    def _insert(self, sequence: Sequence, place: _Place) -> None:
        self._places[sequence.request.request_id] = place
        insort(self._line(sequence), (place, sequence), key=_place_of)

    def _line(self, sequence: Sequence) -> list[tuple[_Place, Sequence]]:
        return self._scoring if sequence.scores_only else self._requests


def _place_of(waiting: tuple[_Place, Sequence]) -> _Place:
    return waiting[0]
