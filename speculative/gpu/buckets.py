"""The shapes that are captured: every step is padded to one of them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_CAPTURED_SEQS = 256
"""Larger batches are computed in parts, one after another: the buffers of one replay would be large. A power of 2."""

_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, MAX_CAPTURED_SEQS + 1, 32))
_EXACT_QUERIES = 6
_CHEAP_ROWS = 128
"""Rows that take hardly longer than one: a GPU waits for the weights up to about 150 rows on an A100, 200 on an H200
and 300 on an H100, and a matrix product computes tiles of 128 rows anyway."""


class PackedBucket(NamedTuple):
    """A captured shape of packed rows: sequences, and rows of all of them together."""

    num_seqs: int
    num_rows: int


class Bucket(NamedTuple):
    """A captured shape of padded rows: sequences, and rows of each."""

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
    cheap_rows: int  # of shapes with no more rows than this, a batch size has the smallest and the largest only
    most_made: int  # the most drafts that a model makes for a sequence; passages that are repeated may be longer

    @classmethod
    def of(cls, max_seqs: int, max_drafts: int, most_made: int | None = None) -> "Buckets":
        """Small ones exactly, larger ones in steps, the largest exactly: `max_drafts + 1` rows a sequence.

        most_made: None = a model makes all drafts.
        """
        most = min(max_seqs, MAX_CAPTURED_SEQS)
        sizes = {*_BATCH_SIZES, most}
        batch_sizes = tuple(sorted(size for size in sizes if size <= most))
        made = max_drafts if most_made is None else most_made
        return cls(batch_sizes, _lengths_to(max_drafts + 1), _CHEAP_ROWS, made)

    def of_drafts(self, *, varying: bool) -> "Buckets":
        """The same batch sizes by drafts a sequence: a draft after the other takes its time however few the rows.

        varying: whether fewer than the most are planned; else they are few only where an answer ends.
        """
        most = self.most_made
        return Buckets(self.batch_sizes, _lengths_to(most) if varying else (most,), cheap_rows=0, most_made=most)

    def fit(self, num_seqs: int, num_queries: int) -> Bucket | None:
        """The smallest shape that holds so much; None when none does."""
        seqs = bisect_left(self.batch_sizes, num_seqs)
        if seqs == len(self.batch_sizes) or num_queries > self.query_lengths[-1]:
            return None
        size = self.batch_sizes[seqs]
        lengths = self._lengths(size)
        return Bucket(size, lengths[bisect_left(lengths, num_queries)])

    def fit_rows(self, num_seqs: int, num_rows: int) -> PackedBucket | None:
        """The smallest shape for packed rows: a sequence that is padding has one row of its own."""
        seqs = bisect_left(self.batch_sizes, num_seqs)
        if seqs == len(self.batch_sizes):
            return None
        size = self.batch_sizes[seqs]
        counts = self._row_counts(size)
        return PackedBucket(size, counts[bisect_left(counts, num_rows + size - num_seqs)])

    @property
    def packed(self) -> tuple[PackedBucket, ...]:
        """The shapes for packed rows, largest first."""
        return tuple(PackedBucket(size, n) for size in reversed(self.batch_sizes) for n in self._row_counts(size)[::-1])

    @property
    def largest(self) -> Bucket:
        """Return what the buffers are made for."""
        return Bucket(self.batch_sizes[-1], self.query_lengths[-1])

    def __iter__(self) -> Iterator[Bucket]:
        """Largest first, so that smaller captures reuse the memory of larger ones."""
        return (Bucket(size, q) for size in reversed(self.batch_sizes) for q in reversed(self._lengths(size)))

    def _row_counts(self, num_seqs: int) -> tuple[int, ...]:
        """Ascending; where few of many sequences draft, in smaller steps than whole rows of all."""
        most = num_seqs * self.query_lengths[-1]
        counts = {num_seqs * length for length in self.query_lengths} | {num_seqs * 5 // 4, num_seqs * 3 // 2}
        least, *others = sorted(count for count in counts if count <= most)
        return (least, *others[max(0, bisect_right(others, self.cheap_rows) - 1) :])

    def _lengths(self, num_seqs: int) -> tuple[int, ...]:
        lengths = self.query_lengths
        is_cheap = num_seqs * lengths[-1] <= self.cheap_rows
        return (lengths[0], lengths[-1]) if is_cheap and len(lengths) > 1 else lengths


def _lengths_to(longest: int) -> tuple[int, ...]:
    exact = range(1, min(longest, _EXACT_QUERIES))
    powers_of_two = (1 << power for power in range((longest - 1).bit_length()))  # those below it
    return tuple(sorted({*exact, *powers_of_two, longest}))
