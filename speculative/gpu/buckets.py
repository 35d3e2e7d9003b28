"""Which shapes are captured: every step is padded to one of them."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_CAPTURED_SEQS = 256
"""Larger batches are computed in parts, one after another: the buffers of one replay would be large."""

_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, MAX_CAPTURED_SEQS + 1, 32))
_EXACT_QUERIES = 6


class Bucket(NamedTuple):
    """A captured shape: sequences, and rows of each."""

    num_seqs: int
    num_queries: int

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.num_seqs * self.num_queries


@dataclass(frozen=True, slots=True)
class Buckets:
    """All shapes of one engine: batch sizes and query lengths, each ascending."""

    batch_sizes: tuple[int, ...]
    query_lengths: tuple[int, ...]

    @classmethod
    def of(cls, max_seqs: int, max_drafts: int) -> "Buckets":
        """Small ones exactly, larger ones in steps, the largest exactly: `max_drafts + 1` rows a sequence."""
        most = min(max_seqs, MAX_CAPTURED_SEQS)
        sizes = {*_BATCH_SIZES, most}
        longest = max_drafts + 1
        lengths = {*range(1, min(longest, _EXACT_QUERIES)), *_powers_of_two(longest), longest}
        return cls(tuple(sorted(size for size in sizes if size <= most)), tuple(sorted(lengths)))

    def fit(self, num_seqs: int, num_queries: int) -> Bucket | None:
        """The smallest shape that holds so much; None when none does."""
        seqs, queries = bisect_left(self.batch_sizes, num_seqs), bisect_left(self.query_lengths, num_queries)
        if seqs == len(self.batch_sizes) or queries == len(self.query_lengths):
            return None
        return Bucket(self.batch_sizes[seqs], self.query_lengths[queries])

    def fit_rows(self, num_seqs: int, num_rows: int) -> Bucket | None:
        """The smallest shape for packed rows: a sequence that is padding has one row of its own."""
        seqs = bisect_left(self.batch_sizes, num_seqs)
        if seqs == len(self.batch_sizes):
            return None
        size = self.batch_sizes[seqs]
        return self.fit(size, -(-(num_rows + size - num_seqs) // size))

    @property
    def largest(self) -> Bucket:
        """What the buffers are made for."""
        return Bucket(self.batch_sizes[-1], self.query_lengths[-1])

    def __iter__(self) -> Iterator[Bucket]:
        """Largest first, so that smaller captures reuse the memory of larger ones."""
        return (Bucket(s, q) for s in reversed(self.batch_sizes) for q in reversed(self.query_lengths))


def _powers_of_two(below: int) -> Iterator[int]:
    power = 1
    while power < below:
        yield power
        power *= 2
