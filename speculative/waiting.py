"""The line in front of the engine: requests first, scoring behind them; everything in O(1)."""

from collections import OrderedDict
from collections.abc import Iterator

from speculative.sequence import Sequence


class WaitingLine:
    """Sequences that wait for room, by request id. Scoring has time: it comes after every request that generates."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Sequence] = OrderedDict()
        self._scoring: OrderedDict[str, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests) + len(self._scoring)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._requests.values()
        yield from self._scoring.values()

    def append(self, sequence: Sequence) -> None:
        """Join the end of its line."""
        self._line(sequence)[sequence.request.request_id] = sequence

    def push_in(self, sequence: Sequence) -> None:
        """Come back to the front of its line: it was running already."""
        self.append(sequence)
        self._line(sequence).move_to_end(sequence.request.request_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Leave the line."""
        del self._line(sequence)[sequence.request.request_id]

    @property
    def first(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        line = self._requests or self._scoring
        return next(iter(line.values()), None)

    def _line(self, sequence: Sequence) -> OrderedDict[str, Sequence]:
        return self._scoring if sequence.scores_only else self._requests
