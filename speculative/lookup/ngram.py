"""Prompt-lookup drafting: what followed the last time these tokens were seen.

Source: Saxena, "Prompt Lookup Decoding" (2023). Drafts are point masses; they depend on the sequence's own tokens
alone.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from speculative.lookup.registry import drafter
from speculative.options import OptionError, Options, option
from speculative.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NgramOptions(Options):
    """How long the runs are that are looked up."""

    ngram_max: int = option(4, "`ngram`: longest run of tokens to look up.", least=1)
    ngram_min: int = option(2, "`ngram`: shortest run of tokens to look up.", least=1)

    def check(self) -> None:
        """The shortest is no longer than the longest."""
        if self.ngram_min > self.ngram_max:
            raise OptionError("ngram_min", f"must be at most ngram_max ({self.ngram_max}), got {self.ngram_min}.")


@drafter("ngram", NgramOptions)
class NgramDrafter:
    """Looks for the longest recent suffix that occurred before in the same sequence, and drafts what followed it."""

    def __init__(self, options: NgramOptions, max_drafts: int) -> None:
        del max_drafts
        self._sizes = range(options.ngram_max, options.ngram_min - 1, -1)
        self._indexes: dict[str, NgramIndex] = {}

    def forget(self, request_id: str) -> None:
        """Drop the index of a request that has left."""
        self._indexes.pop(request_id, None)

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Up to `max_drafts` tokens; none where no n-gram was seen before."""
        if max_drafts == 0:
            return []
        index = self._indexes.setdefault(sequence.request.request_id, NgramIndex(self._sizes))
        return index.continuation(sequence.tokens, max_drafts)


class NgramIndex:
    """Where each n-gram of one sequence was last followed by another token. Grows with it, in O(1) a token."""

    def __init__(self, sizes: range) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._length = 0  # tokens whose following position is known

    def continuation(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        """The tokens that followed the last earlier occurrence of the longest known suffix of `tokens`.

        An occurrence that overlaps the end goes on periodically, so a loop is drafted to full length.
        """
        self._catch_up(tokens)
        for size, after in self._after.items():
            start = after.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + offset % period] for offset in range(max_tokens)]
        return []

    def _catch_up(self, tokens: Tokens[int]) -> None:
        for end in range(self._length + 1, len(tokens)):
            for size, after in self._after.items():
                if end >= size:
                    after[tuple(tokens[end - size : end])] = end
        self._length = max(self._length, len(tokens) - 1)
