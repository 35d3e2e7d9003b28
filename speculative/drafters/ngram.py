"""Prompt-lookup drafting: what followed the last time these tokens were seen.

Source: Saxena, "Prompt Lookup Decoding" (2023). Drafts are point masses; they depend on the sequence's own tokens
alone.
"""

from collections.abc import Sequence as Tokens

from speculative.batch import Batch
from speculative.config import DrafterConfig
from speculative.drafting import DraftOutput
from speculative.sequence import Sequence


class NgramDrafter:
    """Looks for the longest recent suffix that occurred before in the same sequence, and drafts what followed it."""

    def __init__(self, config: DrafterConfig) -> None:
        self._sizes = range(config.ngram_max, config.ngram_min - 1, -1)
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, batch: Batch) -> DraftOutput:
        """Up to `max_drafts` tokens per entry; none where no n-gram was seen before."""
        return DraftOutput.pack([self._draft(entry.sequence, entry.max_drafts) for entry in batch.entries])

    def forget(self, request_id: str) -> None:
        """Drop the index of a request that has left."""
        self._indexes.pop(request_id, None)

    def _draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
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
